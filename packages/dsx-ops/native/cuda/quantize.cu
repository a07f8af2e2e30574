// Groupwise int8, int4 and fp8, swizzled and reduced: the bits of native/cpu/quantize.cpp. A warp (large groups: a block) goes over its
// group twice: once for the range, once, out of the cache, for the codes.
//
// What is quantised is a tensor, or the sum of what several ranks' codes stand for; the second never exists in memory.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t MAGIC_BITS = 0x4b400000u;
constexpr float UNIT24 = 5.9604644775390625e-8f;  // 2^-24
constexpr int64_t WARP_GROUP = 4096;              // groups up to this are a warp's

// Up with the probability of the fraction; `random` has 24 bits.
__device__ __forceinline__ float round_random(float t, uint32_t random) {
    t = t + (float)(int32_t)random * UNIT24;
    const float nearest = (t + MAGIC) - MAGIC;
    return t < nearest ? nearest - 1.0f : nearest;
}

// ---- formats; see the CPU's file for what they are --------------------------------------------------------------------------

template <int BITS_, bool SYMMETRIC_> struct Integer {
    static constexpr int BITS = BITS_;
    static constexpr bool SYMMETRIC = SYMMETRIC_;
    static constexpr float RANGE = (float)((1 << (SYMMETRIC_ ? BITS_ - 1 : BITS_)) - 1);

    static __device__ __forceinline__ uint32_t encode(float t, bool stochastic, uint32_t random) {
        if (stochastic) t = round_random(t, random);
        const float low = SYMMETRIC ? -RANGE : 0.0f;
        t = RANGE < t ? RANGE : t;
        t = t < low ? low : t;
        return (__float_as_uint(t + MAGIC) - MAGIC_BITS) & ((1u << BITS) - 1);
    }
    static __device__ __forceinline__ float decode(uint32_t code) {
        const int32_t sign = SYMMETRIC ? 1 << (BITS - 1) : 0;
        return (float)(((int32_t)code ^ sign) - sign);
    }
};

template <int MANTISSA, int BIAS, uint32_t TOP, uint32_t INFINITE> struct Float8 {
    static constexpr int BITS = 8;
    static constexpr bool SYMMETRIC = true;
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t REBIAS = (uint32_t)(127 - BIAS) << MANTISSA;
    static constexpr uint32_t SMALLEST = (uint32_t)(128 - BIAS) << 23;
    static constexpr float RANGE = MANTISSA == 3 ? 448.0f : 57344.0f;
    static constexpr float PER_STEP = MANTISSA == 3 ? 512.0f : 65536.0f;

    static __device__ __forceinline__ uint32_t encode(float t, bool stochastic, uint32_t random) {
        const uint32_t sign = __float_as_uint(t) >> 24 & 0x80u;
        if (t != t) return 0x7fu | sign;
        float a = fabsf(t);
        a = RANGE < a ? RANGE : a;
        const uint32_t b = __float_as_uint(a);
        if (b < SMALLEST) {
            const float scaled = a * PER_STEP, steps = stochastic ? round_random(scaled, random) : scaled;
            return (__float_as_uint(steps + MAGIC) - MAGIC_BITS) | sign;
        }
        const uint32_t extra = stochastic ? random >> (24 - SHIFT) : ((1u << (SHIFT - 1)) - 1) + (b >> SHIFT & 1);
        const uint32_t normal = ((b + extra) >> SHIFT) - REBIAS;
        return (TOP < normal ? TOP : normal) | sign;
    }
    static __device__ __forceinline__ float decode(uint32_t code) {
        const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
        uint32_t b;
        if (magnitude < (1u << MANTISSA)) b = __float_as_uint((float)(int32_t)magnitude * (1.0f / PER_STEP));
        else if (magnitude <= TOP) b = (magnitude + REBIAS) << SHIFT;
        else b = magnitude == INFINITE && INFINITE < 0x7fu ? 0x7f800000u : 0x7fc00000u;
        return __uint_as_float(b | sign);
    }
};
typedef Float8<3, 7, 0x7e, 0x7f> FloatE4M3;
typedef Float8<2, 15, 0x7b, 0x7c> FloatE5M2;

__host__ __device__ __forceinline__ bool halves(Format f) { return f == INT4 || f == INT4_ASYM; }
__host__ __device__ __forceinline__ bool has_zero(Format f) { return f == INT8_ASYM || f == INT4_ASYM; }

__device__ __forceinline__ float decode_any(Format f, uint32_t code) {
    switch (f) {
        case INT8: return Integer<8, true>::decode(code);
        case INT4: return Integer<4, true>::decode(code);
        case INT8_ASYM: return Integer<8, false>::decode(code);
        case INT4_ASYM: return Integer<4, false>::decode(code);
        case E4M3: return FloatE4M3::decode(code);
        default: return FloatE5M2::decode(code);
    }
}

// ---- codes in memory: up to four, from element i on (4 bits: i is even) -----------------------------------------------------

__device__ __forceinline__ void write_codes(bool four_bits, char* codes, int64_t i, int n, uint32_t word) {
    if (!four_bits) return store_bytes(codes, i, n, n == 4 && ((reinterpret_cast<uintptr_t>(codes) + i) & 3) == 0, word);
    const uint32_t packed = (word & 0xfu) | (word >> 4 & 0xf0u) | (word >> 8 & 0xf00u) | (word >> 12 & 0xf000u);
    codes[i / 2] = (char)(uint8_t)packed;
    if (n > 2) codes[i / 2 + 1] = (char)(uint8_t)(packed >> 8);
}
__device__ __forceinline__ uint32_t read_code(bool four_bits, const char* codes, int64_t i) {
    if (!four_bits) return (uint8_t)codes[i];
    return (uint8_t)codes[i / 2] >> 4 * (i % 2) & 0xfu;
}

// Where group g of x lies among the codes.
__device__ __forceinline__ int64_t place(const Quant& q, int64_t g) {
    if (q.slice == 0) return g;
    const int64_t per_chunk = q.slice * q.pipeline, chunk = g / per_chunk, within = g % per_chunk;
    const int64_t node = chunk / q.devices, device = chunk % q.devices;
    return (((within / q.slice) * q.devices + device) * q.nodes + node) * q.slice + within % q.slice;
}

// ---- what is quantised ------------------------------------------------------------------------------------------------------

struct Tensor {
    DType dtype;
    const char* x;
    bool whole_words;
    __device__ __forceinline__ Float4 at(int64_t i, int n) const { return load4(dtype, x, i, n, n == 4 && whole_words); }
};
struct Ranks {
    Format format;
    int64_t group;
    Codes codes;
    __device__ __forceinline__ float one(int64_t i) const {
        const int64_t g = i / group;
        float sum = 0;
        for (int64_t r = 0; r < codes.ranks; ++r) {
            const int64_t s = r * codes.scale_stride + g;
            float v = decode_any(format, read_code(halves(format), codes.codes + r * codes.code_stride, i)) * codes.scale[s];
            if (has_zero(format)) v = v + codes.zero[s];
            sum = r == 0 ? v : sum + v;
        }
        return sum * codes.factor;
    }
    __device__ __forceinline__ Float4 at(int64_t i, int n) const {
        Float4 v = {};
        for (int k = 0; k < 4; ++k)
            if (k < n) v.x[k] = one(i + k);
        return v;
    }
};

// ---- kernels ----------------------------------------------------------------------------------------------------------------

template <class Team, class FORMAT, class Source>
__global__ void __launch_bounds__(THREADS)
    quantize_groups(const Quant q, const Source source, int64_t numel, char* codes, float* scale, float* zero) {
    __shared__ float scratch[THREADS / WARP];
    const int64_t group = Team::first(), from = group * q.group;
    if (from >= numel) return;  // the whole team
    const int64_t to = numel - from < q.group ? numel : from + q.group, g = place(q, group), shift = g * q.group - from;
    float high = 0.0f, low = 0.0f;
    if (!FORMAT::SYMMETRIC) high = low = source.at(from, 1).x[0];
    for (int64_t i = from + 4 * Team::rank(); i < to; i += 4 * Team::size()) {
        const int n = to - i < 4 ? (int)(to - i) : 4;
        const Float4 v = source.at(i, n);
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            high = Largest()(high, FORMAT::SYMMETRIC ? fabsf(v.x[k]) : v.x[k]);
            if (!FORMAT::SYMMETRIC) low = Smallest()(low, v.x[k]);
        }
    }
    high = Team::all(high, Largest(), scratch);
    if (!FORMAT::SYMMETRIC) low = Team::all(low, Smallest(), scratch);
    const float step = (high - low) / FORMAT::RANGE;
    if (Team::rank() == 0) {
        scale[g] = step;
        if (!FORMAT::SYMMETRIC) zero[g] = low;
    }
    const float inverse = step >= 1.1754944e-38f || step != step ? 1.0f / step : 0.0f;
    for (int64_t i = from + 4 * Team::rank(); i < to; i += 4 * Team::size()) {
        const int n = to - i < 4 ? (int)(to - i) : 4;
        const Float4 v = source.at(i, n);
        uint32_t word = 0;
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            const uint32_t random = q.stochastic ? Noise(q.seed, q.offset + i + k).first >> 8 : 0;
            word |= FORMAT::encode((FORMAT::SYMMETRIC ? v.x[k] : v.x[k] - low) * inverse, q.stochastic, random) << 8 * k;
        }
        write_codes(FORMAT::BITS == 4, codes, i + shift, n, word);
    }
}

template <class Team>
__global__ void __launch_bounds__(THREADS)
    dequantize_groups(const Quant q, const char* codes, const float* scale, const float* zero, char* x, int64_t numel, bool whole_words) {
    const int64_t group = Team::first(), from = group * q.group;
    if (from >= numel) return;
    const int64_t to = numel - from < q.group ? numel : from + q.group, g = place(q, group), shift = g * q.group - from;
    const float step = scale[g], base = has_zero(q.format) ? zero[g] : 0.0f;
    for (int64_t i = from + 4 * Team::rank(); i < to; i += 4 * Team::size()) {
        const int n = to - i < 4 ? (int)(to - i) : 4;
        Float4 v = {};
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            v.x[k] = decode_any(q.format, read_code(halves(q.format), codes, i + shift + k)) * step;
            if (has_zero(q.format)) v.x[k] = v.x[k] + base;
        }
        store4(q.dtype, x, i, n, n == 4 && whole_words, v);
    }
}

__global__ void __launch_bounds__(THREADS) add_ranks(const Ranks ranks, float* out, int64_t numel) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < numel) out[i] = ranks.one(i);
}

// ---- start ------------------------------------------------------------------------------------------------------------------

template <class F> void by_format(Format format, const F& f) {
    switch (format) {
        case INT8: return f(Integer<8, true>());
        case INT4: return f(Integer<4, true>());
        case INT8_ASYM: return f(Integer<8, false>());
        case INT4_ASYM: return f(Integer<4, false>());
        case E4M3: return f(FloatE4M3());
        case E5M2: return f(FloatE5M2());
    }
    throw std::runtime_error("unknown format");
}
// f(team, blocks)
template <class F> void by_team(const Quant& q, int64_t numel, const F& f) {
    const int64_t groups = (numel + q.group - 1) / q.group, per_block = THREADS / WARP;
    if (q.group > WARP_GROUP) f(BlockTeam(), groups);
    else f(WarpTeam(), (groups + per_block - 1) / per_block);
}
bool whole_groups(const Quant& q, const void* x) { return q.group % 4 == 0 && fits(x, q.dtype == F32 ? 16 : 8); }

template <class Source>
void start_quantize(const Where& where, const Quant& q, const Source& source, int64_t numel, char* codes, float* scale, float* zero) {
    by_format(q.format, [&](auto format) {
        by_team(q, numel, [&](auto team, int64_t blocks) {
            launch(where, quantize_groups<decltype(team), decltype(format), Source>, blocks, THREADS, q, source, numel, codes, scale, zero);
        });
    });
}

}  // namespace

void quantize(const Where& where, const Quant& q, const char* x, int64_t numel, char* codes, float* scale, float* zero) {
    OnDevice on(where);
    start_quantize(where, q, Tensor{q.dtype, x, whole_groups(q, x)}, numel, codes, scale, zero);
}

void dequantize(const Where& where, const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t numel) {
    OnDevice on(where);
    by_team(q, numel, [&](auto team, int64_t blocks) {
        launch(where, dequantize_groups<decltype(team)>, blocks, THREADS, q, codes, scale, zero, x, numel, whole_groups(q, x));
    });
}

void reduce_codes(const Where& where, const Quant& q, const Codes& from, int64_t numel, float* out) {
    OnDevice on(where);
    launch(where, add_ranks, (numel + THREADS - 1) / THREADS, THREADS, Ranks{q.format, q.group, from}, out, numel);
}

void requantize(const Where& where, const Quant& q, const Codes& from, int64_t numel, const Quant& to, char* codes, float* scale, float* zero) {
    OnDevice on(where);
    start_quantize(where, to, Ranks{q.format, q.group, from}, numel, codes, scale, zero);
}

}  // namespace cuda
}  // namespace dsx
