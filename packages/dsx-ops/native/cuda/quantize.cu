// Groupwise int8 and int4, the same bits as native/cpu/quantize.cpp. A warp (large groups: a block) reads its group twice: once for
// the range, once, out of the cache, for the codes.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t MAGIC_BITS = 0x4b400000u;
constexpr int64_t WARP_GROUP = 4096;  // groups up to this are a warp's

__device__ __forceinline__ uint32_t code_of(const Quant& q, float t, int64_t index) {
    const float high = (float)((1 << (q.symmetric ? q.bits - 1 : q.bits)) - 1), low = q.symmetric ? -high : 0.0f;
    if (q.stochastic) {
        t = t + (float)(int32_t)(Noise(q.seed, index).first >> 8) * 5.9604644775390625e-8f;  // 24 bits in [0, 1)
        const float nearest = (t + MAGIC) - MAGIC;
        t = t < nearest ? nearest - 1.0f : nearest;
    }
    t = high < t ? high : t;
    t = t < low ? low : t;
    return (__float_as_uint(t + MAGIC) - MAGIC_BITS) & ((1u << q.bits) - 1);
}

// n codes, four at most, from element i (a multiple of four) on.
__device__ __forceinline__ void store_codes(const Quant& q, char* codes, int64_t i, int n, uint32_t word) {
    if (q.bits == 8) return store_bytes(codes, i, n, false, word);
    const uint32_t packed = (word & 0xfu) | (word >> 4 & 0xf0u) | (word >> 8 & 0xf00u) | (word >> 12 & 0xf000u);
    codes[i / 2] = (char)(uint8_t)packed;
    if (n > 2) codes[i / 2 + 1] = (char)(uint8_t)(packed >> 8);
}
__device__ __forceinline__ uint32_t load_codes(const Quant& q, const char* codes, int64_t i, int n) {
    if (q.bits == 8) return load_bytes(codes, i, n, false);
    const uint32_t a = (uint8_t)codes[i / 2], b = n > 2 ? (uint8_t)codes[i / 2 + 1] : 0;
    return (a & 0xfu) | (a & 0xf0u) << 4 | (b & 0xfu) << 16 | (b & 0xf0u) << 20;
}

template <class Team>
__global__ void __launch_bounds__(THREADS)
    quantize_groups(const Quant q, const char* x, int64_t numel, bool whole_words, char* codes, float* scale, float* zero) {
    __shared__ float scratch[THREADS / WARP];
    const int64_t group = Team::first(), from = group * q.group;
    if (from >= numel) return;  // the whole team
    const int64_t to = numel - from < q.group ? numel : from + q.group;
    float high = q.symmetric ? 0.0f : load1(q.dtype, x, from), low = q.symmetric ? 0.0f : high;
    for (int64_t i = from + 4 * Team::rank(); i < to; i += 4 * Team::size()) {
        const int n = to - i < 4 ? (int)(to - i) : 4;
        const Float4 v = load4(q.dtype, x, i, n, n == 4 && whole_words);
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            high = Largest()(high, q.symmetric ? fabsf(v.x[k]) : v.x[k]);
            if (!q.symmetric) low = Smallest()(low, v.x[k]);
        }
    }
    high = Team::all(high, Largest(), scratch);
    low = Team::all(low, Smallest(), scratch);
    const float step = (high - low) / (float)((1 << (q.symmetric ? q.bits - 1 : q.bits)) - 1);
    if (Team::rank() == 0) {
        scale[group] = step;
        if (!q.symmetric) zero[group] = low;
    }
    const float inverse = step >= 1.1754944e-38f || step != step ? 1.0f / step : 0.0f;
    for (int64_t i = from + 4 * Team::rank(); i < to; i += 4 * Team::size()) {
        const int n = to - i < 4 ? (int)(to - i) : 4;
        const Float4 v = load4(q.dtype, x, i, n, n == 4 && whole_words);
        uint32_t word = 0;
        for (int k = 0; k < 4; ++k)
            if (k < n) word |= code_of(q, (q.symmetric ? v.x[k] : v.x[k] - low) * inverse, q.offset + i + k) << 8 * k;
        store_codes(q, codes, i, n, word);
    }
}

__global__ void __launch_bounds__(THREADS)
    dequantize_elements(const Quant q, const char* codes, const float* scale, const float* zero, char* x, int64_t numel, bool whole_words) {
    const int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= numel) return;
    const int n = numel - i < 4 ? (int)(numel - i) : 4;
    const int64_t group = i / q.group;  // groups are multiples of 16: four neighbours share one
    const float step = scale[group], base = q.symmetric ? 0.0f : zero[group];
    const uint32_t word = load_codes(q, codes, i, n);
    const int32_t sign = q.symmetric ? 1 << (q.bits - 1) : 0;
    Float4 v;
    for (int k = 0; k < 4; ++k) {
        const int32_t code = (int32_t)(word >> 8 * k & 0xffu);
        const float value = (float)((code ^ sign) - sign) * step;
        v.x[k] = q.symmetric ? value : value + base;
    }
    store4(q.dtype, x, i, n, n == 4 && whole_words, v);
}

}  // namespace

void quantize(const Where& where, const Quant& q, const char* x, int64_t numel, char* codes, float* scale, float* zero) {
    OnDevice on(where);
    const int64_t groups = (numel + q.group - 1) / q.group;
    const bool whole = fits(x, q.dtype == F32 ? 16 : 8);
    if (q.group > WARP_GROUP) return launch(where, quantize_groups<BlockTeam>, groups, THREADS, q, x, numel, whole, codes, scale, zero);
    const int64_t per_block = THREADS / WARP;
    launch(where, quantize_groups<WarpTeam>, (groups + per_block - 1) / per_block, THREADS, q, x, numel, whole, codes, scale, zero);
}

void dequantize(const Where& where, const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t numel) {
    OnDevice on(where);
    launch(where, dequantize_elements, (numel + 4 * THREADS - 1) / (4 * THREADS), THREADS, q, codes, scale, zero, x, numel,
           fits(x, q.dtype == F32 ? 16 : 8));
}

}  // namespace cuda
}  // namespace dsx
