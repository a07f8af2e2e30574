// One bit per element of a tensor; see signs.cuh.
#include "signs.cuh"

namespace dsx {
namespace cuda {
namespace {

static_assert(SIGN_PIECE == CUDA_CHUNK, "the caller makes room for chunks_of(numel) partial sums");

__global__ void __launch_bounds__(SIGN_THREADS) pack(const WholeTensor tensor, const Values x, char* bits) {
    const auto read = [&](int64_t i, int n) { return x.read(i, n); };
    octets(tensor.piece(blockIdx.x), read, [&](int64_t, int n, int64_t byte, const Raw<OCTET>& loaded) {
        const Floats<OCTET> v = decode(x.dtype, loaded);
        uint32_t signs = 0;
        for (int k = 0; k < OCTET; ++k)
            if (v.x[k] >= 0.0f && k < n) signs |= 1u << k;  // NaN: no
        put(bits + byte, (char)(uint8_t)signs);
    });
}

__global__ void __launch_bounds__(THREADS)
    root_mean(const double* partials, int64_t count, int64_t numel, float* scale) {
    __shared__ double scratch[THREADS / WARP];
    double sum = 0;
    for (int64_t p = threadIdx.x; p < count; p += blockDim.x) sum = sum + fetch(partials + p);
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) put(scale, (float)sqrt(sum / (double)(numel > 0 ? numel : 1)));
}

// Rows of bits, each with its scale. `pieces`: of a row.
__global__ void __launch_bounds__(SIGN_THREADS) unpack(const WholeTensor row, int64_t pieces, const char* bits,
                                                       const float* scale, DType dtype, char* out, bool whole) {
    const int64_t number = blockIdx.x / pieces, bytes = (row.numel + OCTET - 1) / OCTET, first = number * row.numel;
    const float magnitude = fetch(scale + number);
    const auto read = [&](int64_t i, int n) -> uint32_t {
        return n > 0 ? (uint8_t)fetch(bits + number * bytes + i / OCTET) : 0;
    };
    octets(row.piece(blockIdx.x % pieces), read, [&](int64_t i, int n, int64_t, uint32_t signs) {
        store(dtype, out, first + i, n, whole && n == OCTET, signed_values(signs, magnitude));
    });
}

Values values(DType dtype, const void* at) {
    return {dtype, static_cast<const char*>(at), fits_words<OCTET>(at, dtype)};
}

}  // namespace

void pack_signs(const Where& where, DType dtype, const char* x, char* bits, int64_t numel) {
    OnDevice on(where);
    const WholeTensor tensor{numel};
    launch(where, pack, tensor.count(), SIGN_THREADS, tensor, values(dtype, x), bits);
}

void compress_signs(const Where& where, DType dtype, const char* x, float* error, char* bits, float* scale,
                    double* partials, int64_t numel) {
    OnDevice on(where);
    const WholeTensor tensor{numel};
    const Values v = values(dtype, x), e = values(F32, error);
    launch(where, square_pieces<WholeTensor>, tensor.count(), SIGN_THREADS, tensor, v, e, partials);
    launch(where, root_mean, 1, THREADS, (const double*)partials, tensor.count(), numel, scale);
    launch(where, compress_pieces<WholeTensor>, tensor.count(), SIGN_THREADS, tensor, v, e, (const float*)scale, bits);
}

void unpack_signs(const Where& where, const char* bits, const float* scale, DType dtype, char* out, int64_t rows,
                  int64_t numel) {
    OnDevice on(where);
    const WholeTensor row{numel};
    const bool whole = fits_words<OCTET>(out, dtype) && (rows == 1 || numel % OCTET == 0);
    launch(where, unpack, rows * row.count(), SIGN_THREADS, row, row.count(), bits, scale, dtype, out, whole);
}

void mean_of_signs(const Where& where, const char* bits, const float* scales, int64_t ranks, float* out,
                   int64_t numel) {
    OnDevice on(where);
    const WholeTensor tensor{numel};
    const int64_t bytes = (numel + OCTET - 1) / OCTET;
    launch(where, mean_pieces<WholeTensor>, tensor.count(), SIGN_THREADS, tensor, bits, bytes, scales, (int64_t)1,
           ranks, (float)(1.0 / (double)ranks), fits(out, 16), out);
}

}  // namespace cuda
}  // namespace dsx
