// Signs and scales of many runs of one flat fp32 buffer in one launch; see signs.cuh. A block takes one piece of a run,
// as the caller's table on the device says.
#include "signs.cuh"

namespace dsx {
namespace cuda {
namespace {

// A block per run: its pieces are first[run] to first[run + 1].
__global__ void __launch_bounds__(THREADS)
    root_mean_of_runs(const RunTable table, const int64_t* first, const double* partials, float* scales) {
    __shared__ double scratch[THREADS / WARP];
    double sum = 0, count = 0;
    for (int64_t p = fetch(first + blockIdx.x) + threadIdx.x; p < fetch(first + blockIdx.x + 1); p += blockDim.x) {
        const SignPiece piece = table.piece(p);
        sum = sum + fetch(partials + p);
        count = count + (double)(piece.end - piece.begin);
    }
    sum = over_block(sum, Sum(), scratch);
    count = over_block(count, Sum(), scratch);
    if (threadIdx.x == 0) put(scales + blockIdx.x, (float)sqrt(sum / count));
}

__global__ void __launch_bounds__(SIGN_THREADS)
    unpack_pieces(const RunTable table, const char* bits, const float* scales, bool whole, char* out) {
    const SignPiece piece = table.piece(blockIdx.x);
    const float magnitude = fetch(scales + piece.scale);
    const auto read = [&](int64_t i, int n) -> uint32_t {
        return n > 0 ? (uint8_t)fetch(bits + piece.byte + (i - piece.begin) / OCTET) : 0;
    };
    octets(piece, read, [&](int64_t i, int n, int64_t, uint32_t signs) {
        store(F32, out, i, n, whole && n == OCTET, signed_values(signs, magnitude));
    });
}

RunTable table_of(const SignPieces& p) { return {p.at, p.count}; }

}  // namespace

void compress_sign_runs(const Where& where, const SignPieces& p, const int64_t* first, int64_t runs, const float* x,
                        float* error, char* bits, float* scales, double* partials) {
    OnDevice on(where);
    const RunTable table = table_of(p);
    const Values v{F32, reinterpret_cast<const char*>(x), fits(x, 16)};
    const Values e{F32, reinterpret_cast<const char*>(error), fits(error, 16)};
    launch(where, square_pieces<RunTable>, p.count, SIGN_THREADS, table, v, e, partials);
    launch(where, root_mean_of_runs, runs, THREADS, table, first, (const double*)partials, scales);
    launch(where, compress_pieces<RunTable>, p.count, SIGN_THREADS, table, v, e, (const float*)scales, bits);
}

void unpack_sign_runs(const Where& where, const SignPieces& p, const char* bits, const float* scales, float* out) {
    OnDevice on(where);
    launch(where, unpack_pieces, p.count, SIGN_THREADS, table_of(p), bits, scales, fits(out, 16),
           reinterpret_cast<char*>(out));
}

void mean_of_sign_runs(const Where& where, const SignPieces& p, const char* bits, int64_t bit_stride,
                       const float* scales, int64_t scale_stride, int64_t ranks, float* out) {
    OnDevice on(where);
    launch(where, mean_pieces<RunTable>, p.count, SIGN_THREADS, table_of(p), bits, bit_stride, scales, scale_stride,
           ranks, (float)(1.0 / (double)ranks), fits(out, 16), out);
}

}  // namespace cuda
}  // namespace dsx
