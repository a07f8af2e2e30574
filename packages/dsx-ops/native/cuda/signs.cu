// One bit per element, with error feedback (what the arithmetic is: native/cpu/signs.cpp). A warp's vote is the packing: 32 votes of 32
// lanes make 1024 bits, which the 32 lanes write side by side.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr int64_t STRETCH = WARP * WARP;  // elements of a warp

// Packs make(element) >= 0 for the warp's stretch; make is called for every element of it that there is.
template <class Make> __device__ __forceinline__ void pack_stretch(int64_t first, int64_t numel, char* bits, const Make& make) {
    const int lane = (int)threadIdx.x % WARP;
    uint32_t mine = 0;
    for (int turn = 0; turn < WARP; ++turn) {
        const int64_t i = first + turn * WARP + lane;
        const uint32_t word = __ballot_sync(ALL, i < numel && make(i) >= 0.0f);  // NaN: no
        if (turn == lane) mine = word;
    }
    const int64_t byte = (first + lane * WARP) / 8, bytes = (numel + 7) / 8;
    const bool whole = byte + 4 <= bytes && ((reinterpret_cast<uintptr_t>(bits) + byte) & 3) == 0;
    if (byte < bytes) store_bytes(bits, byte, bytes - byte < 4 ? (int)(bytes - byte) : 4, whole, mine);
}
__device__ __forceinline__ int64_t first_of_warp() {
    return ((int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * STRETCH;
}

__global__ void __launch_bounds__(THREADS) pack(DType dtype, const char* x, char* bits, int64_t numel) {
    const int64_t first = first_of_warp();
    if (first < numel) pack_stretch(first, numel, bits, [&](int64_t i) { return load1(dtype, x, i); });
}

__global__ void __launch_bounds__(THREADS) compress(DType dtype, const char* x, float* error, const float* scale, char* bits, int64_t numel) {
    const int64_t first = first_of_warp();
    const float magnitude = *scale;
    if (first >= numel) return;
    pack_stretch(first, numel, bits, [&](int64_t i) {
        const float t = load1(dtype, x, i) + error[i];
        error[i] = t - (t >= 0.0f ? magnitude : -magnitude);
        return t;
    });
}

__global__ void __launch_bounds__(THREADS) square_chunks(DType dtype, const char* x, const float* error, int64_t numel, double* partials) {
    __shared__ double scratch[THREADS / WARP];
    const int64_t begin = blockIdx.x * CUDA_CHUNK, end = numel - begin < CUDA_CHUNK ? numel : begin + CUDA_CHUNK;
    double sum = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const double t = load1(dtype, x, i) + error[i];
        sum = sum + t * t;
    }
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(THREADS) root_mean(const double* partials, int64_t chunks, int64_t numel, float* scale) {
    __shared__ double scratch[THREADS / WARP];
    double sum = 0;
    for (int64_t c = threadIdx.x; c < chunks; c += blockDim.x) sum = sum + partials[c];
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) *scale = (float)sqrt(sum / (double)(numel > 0 ? numel : 1));
}

// Rows of bits, each with its scale; eight elements (one byte) per thread.
__global__ void __launch_bounds__(THREADS) unpack(const char* bits, const float* scale, DType dtype, char* out, int64_t rows, int64_t numel) {
    const int64_t bytes = (numel + 7) / 8, at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * bytes) return;
    const int64_t row = at / bytes, first = at % bytes * 8;
    const uint32_t byte = (uint8_t)bits[at];
    const float magnitude = scale[row];
    for (int k = 0; k < 8; ++k)
        if (first + k < numel) store1(dtype, out, row * numel + first + k, byte >> k & 1 ? magnitude : -magnitude);
}

__global__ void __launch_bounds__(THREADS)
    mean(const char* bits, const float* scales, int64_t ranks, float factor, float* out, int64_t numel) {
    const int64_t bytes = (numel + 7) / 8, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel) return;
    float sum = 0;
    for (int64_t r = 0; r < ranks; ++r) {
        const float magnitude = scales[r];
        sum = sum + ((uint8_t)bits[r * bytes + i / 8] >> i % 8 & 1 ? magnitude : -magnitude);
    }
    out[i] = sum * factor;
}

int64_t blocks_of(int64_t work, int64_t per_block) { return (work + per_block - 1) / per_block; }
constexpr int64_t PER_BLOCK = THREADS / WARP * STRETCH;

}  // namespace

void pack_signs(const Where& where, DType dtype, const char* x, char* bits, int64_t numel) {
    OnDevice on(where);
    launch(where, pack, blocks_of(numel, PER_BLOCK), THREADS, dtype, x, bits, numel);
}

void compress_signs(const Where& where, DType dtype, const char* x, float* error, char* bits, float* scale, double* partials, int64_t numel) {
    OnDevice on(where);
    const int64_t chunks = chunks_of(numel);
    launch(where, square_chunks, chunks, THREADS, dtype, x, (const float*)error, numel, partials);
    launch(where, root_mean, 1, THREADS, (const double*)partials, chunks, numel, scale);
    launch(where, compress, blocks_of(numel, PER_BLOCK), THREADS, dtype, x, error, (const float*)scale, bits, numel);
}

void unpack_signs(const Where& where, const char* bits, const float* scale, DType dtype, char* out, int64_t rows, int64_t numel) {
    OnDevice on(where);
    launch(where, unpack, blocks_of(rows * ((numel + 7) / 8), THREADS), THREADS, bits, scale, dtype, out, rows, numel);
}

void mean_of_signs(const Where& where, const char* bits, const float* scales, int64_t ranks, float* out, int64_t numel) {
    OnDevice on(where);
    launch(where, mean, blocks_of(numel, THREADS), THREADS, bits, scales, ranks, (float)(1.0 / (double)ranks), out, numel);
}

}  // namespace cuda
}  // namespace dsx
