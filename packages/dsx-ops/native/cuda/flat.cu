// Norm with overflow check, and scaling, over lists of tensors. Sums are fp64 and taken in a fixed order: the same in
// every run.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr int TURNS = 4;  // a thread's loads of four turns are in flight together

// f(first element, elements, loaded, whole) over the groups of WIDTH elements of a piece.
template <int WIDTH, class F>
__device__ __forceinline__ void each_group(const Table<Flat>& table, const Piece& piece, DType dtype, const F& f) {
    const Flat& row = table.rows[piece.row];
    const int64_t stride = WIDTH * (int64_t)blockDim.x;
    for (int64_t i = piece.begin + WIDTH * (int64_t)threadIdx.x; i < piece.end; i += TURNS * stride) {
        Raw<WIDTH> loaded[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const int n = count_of<WIDTH>(piece.end, i + t * stride);
            const bool whole = n == WIDTH && table.aligned[piece.row];
            loaded[t] = load_raw<WIDTH>(dtype, row.data, i + t * stride, n, whole);
        }
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const int n = count_of<WIDTH>(piece.end, i + t * stride);
            f(i + t * stride, n, loaded[t], n == WIDTH && table.aligned[piece.row]);
        }
    }
}
// f(width, dtype): the width as a type.
template <class F> __device__ __forceinline__ void by_dtype(DType dtype, const F& f) {
    if (dtype == F32) f(std::integral_constant<int, 4>(), F32);
    else f(std::integral_constant<int, 8>(), narrowed<8>(dtype));
}

__global__ void __launch_bounds__(THREADS) square_chunks(const __grid_constant__ Table<Flat> table, double* partials) {
    __shared__ double scratch[THREADS / WARP];
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    double sum = 0;
    by_dtype(table.rows[piece.row].dtype, [&](auto width, DType dtype) {
        constexpr int WIDTH = decltype(width)::value;
        each_group<WIDTH>(table, piece, dtype, [&](int64_t, int, const Raw<WIDTH>& raw, bool) {
            const Floats<WIDTH> x = decode(dtype, raw);
            for (int k = 0; k < WIDTH; ++k) sum = sum + (double)x.x[k] * (double)x.x[k];  // what is missing is zero
        });
    });
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) put(partials + blockIdx.x, sum);
}

__global__ void __launch_bounds__(THREADS)
    add_chunks(const __grid_constant__ Table<Flat> table, const double* partials, double* out) {
    __shared__ double scratch[THREADS / WARP];
    const int row = (int)blockIdx.x;
    double sum = 0;
    for (int64_t c = table.start[row] + (int64_t)threadIdx.x; c < table.start[row + 1]; c += blockDim.x)
        sum = sum + fetch(partials + c);
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) put(out + table.index[row], sum);
}

__device__ __forceinline__ float read_factor(const Scalar& s) {
    if (s.at == nullptr) return (float)s.value;
    if (s.type == SCALAR_F64) return (float)fetch(static_cast<const double*>(s.at));
    return fetch(static_cast<const float*>(s.at));
}
__global__ void __launch_bounds__(THREADS)
    scale_chunks(const __grid_constant__ Table<Flat> table, const Scalar factor) {
    const float f = read_factor(factor);
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    char* data = table.rows[piece.row].data;
    by_dtype(table.rows[piece.row].dtype, [&](auto width, DType dtype) {
        constexpr int WIDTH = decltype(width)::value;
        each_group<WIDTH>(table, piece, dtype, [&](int64_t i, int n, const Raw<WIDTH>& raw, bool whole) {
            Floats<WIDTH> x = decode(dtype, raw);
            for (int k = 0; k < WIDTH; ++k) x.x[k] = x.x[k] * f;
            store(dtype, data, i, n, whole, x);
        });
    });
}

bool aligned(const Flat& row) { return fits(row.data, 16); }

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
