// Norm with overflow check, and scaling, over lists of tensors. Sums are fp64 and taken in a fixed order: the same in every run.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

__global__ void __launch_bounds__(THREADS) square_chunks(const __grid_constant__ Table<Flat> table, double* partials) {
    __shared__ double scratch[THREADS / WARP];
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Flat& row = table.rows[piece.row];
    double sum = 0;
    for (int64_t i = piece.begin + 4 * threadIdx.x; i < piece.end; i += 4 * blockDim.x) {
        const int n = piece.end - i < 4 ? (int)(piece.end - i) : 4;
        const Float4 x = load4(row.dtype, row.data, i, n, n == 4 && table.aligned[piece.row]);
        for (int k = 0; k < 4; ++k) sum = sum + (double)x.x[k] * (double)x.x[k];  // what is missing is zero
    }
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS) add_chunks(const __grid_constant__ Table<Flat> table, const double* partials, double* out) {
    __shared__ double scratch[THREADS / WARP];
    const int row = (int)blockIdx.x;
    double sum = 0;
    for (int64_t c = table.start[row] + (int64_t)threadIdx.x; c < table.start[row + 1]; c += blockDim.x) sum = sum + partials[c];
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) out[table.index[row]] = sum;
}

__global__ void __launch_bounds__(THREADS) scale_chunks(const __grid_constant__ Table<Flat> table, const Scalar factor) {
    float f = (float)factor.value;
    if (factor.at != nullptr) f = factor.type == SCALAR_F64 ? (float)*static_cast<const double*>(factor.at) : *static_cast<const float*>(factor.at);
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Flat& row = table.rows[piece.row];
    for (int64_t i = piece.begin + 4 * threadIdx.x; i < piece.end; i += 4 * blockDim.x) {
        const int n = piece.end - i < 4 ? (int)(piece.end - i) : 4;
        const bool whole = n == 4 && table.aligned[piece.row];
        Float4 x = load4(row.dtype, row.data, i, n, whole);
        for (int k = 0; k < 4; ++k) x.x[k] = x.x[k] * f;
        store4(row.dtype, row.data, i, n, whole, x);
    }
}

bool aligned(const Flat& row) { return fits(row.data, row.dtype == F32 ? 16 : 8); }

}  // namespace

int64_t chunks_of(int64_t numel) { return (numel + CUDA_CHUNK - 1) / CUDA_CHUNK; }

void squares(const Where& where, const Flat* rows, size_t count, double* out, double* partials) {
    OnDevice on(where);
    for_tables(rows, count, aligned, [&](const Table<Flat>& table) {
        launch(where, square_chunks, table.chunks(), THREADS, table, partials);
        launch(where, add_chunks, table.count, THREADS, table, (const double*)partials, out);
        partials += table.chunks();
    });
}

void scale(const Where& where, const Flat* rows, size_t count, const Scalar& factor) {
    OnDevice on(where);
    for_tables(rows, count, aligned,
               [&](const Table<Flat>& table) { launch(where, scale_chunks, table.chunks(), THREADS, table, factor); });
}

}  // namespace cuda
}  // namespace dsx
