// Groupwise int8, int4 and fp8: two passes over a group that stays in cache (range, then codes); compiled once per
// instruction set.
//
// A format is a small struct: how many bits, which range, how sixteen scaled numbers become codes and back. Where a
// group's codes go is an index function (for ZeRO++'s swizzle), not a pass.
#include "dsx_ops/kernels.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t MAGIC_BITS = 0x4b400000u;
constexpr float UNIT24 = 5.9604644775390625e-8f;  // 2^-24

// Up with the probability of the fraction; `random` has 24 bits.
DSX_INLINE F round_random(F t, U random) {
    return floor_of(multiply_add(to_float(random), splat(UNIT24),
                                 t));  // the product is exact: the same bits without a fused multiply-add
}
DSX_INLINE F limit(F t, float low, float high) { return larger(smaller(t, splat(high)), splat(low)); }

// ---- formats ----------------------------------------------------------------------------------------

template <int BITS_, bool SYMMETRIC_> struct Integer {
    static constexpr int BITS = BITS_;
    static constexpr bool SYMMETRIC = SYMMETRIC_;
    static constexpr int LEVELS = (1 << (SYMMETRIC ? BITS - 1 : BITS)) - 1;
    static constexpr float RANGE = (float)LEVELS;

    template <bool STOCHASTIC> static DSX_INLINE U encode(F t, U random) {
        // To nearest, what the scale was made for does not leave the range: it exceeds it by a few units in the last
        // place at most.
        if (STOCHASTIC) t = limit(round_random(t, random), SYMMETRIC ? -RANGE : 0.0f, RANGE);
        return (bits(t + splat(MAGIC)) - splatu(MAGIC_BITS)) & splatu((1u << BITS) - 1);
    }
    static DSX_INLINE F decode(U code) {
        const U sign = splatu(SYMMETRIC ? 1u << (BITS - 1) : 0u);
        return to_float((code ^ sign) - sign);
    }
};

// Eight bits of float: sign, 7 - MANTISSA bits of exponent with the given bias. TOP is the largest finite code,
// NAN_CODE a NaN; what is between them (e5m2 only) is infinity.
template <int MANTISSA, int BIAS, uint32_t TOP, uint32_t INFINITE> struct Float8 {
    static constexpr int BITS = 8;
    static constexpr bool SYMMETRIC = true;
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t REBIAS = (uint32_t)(127 - BIAS) << MANTISSA;
    static constexpr uint32_t SMALLEST = (uint32_t)(128 - BIAS) << 23;  // bits of the smallest normal number
    static constexpr float RANGE = MANTISSA == 3 ? 448.0f : 57344.0f;
    static constexpr float PER_STEP = MANTISSA == 3 ? 512.0f : 65536.0f;  // 1 / the distance of subnormal numbers

    template <bool STOCHASTIC> static DSX_INLINE U encode(F t, U random) {
        const U sign = (bits(t) >> 24) & splatu(0x80u), nan = is_nan(t);
        F a = absolute(t);
        a = select(less(splat(RANGE), a), splat(RANGE), a);
        const U b = bits(a);
        U extra = STOCHASTIC ? random >> (24 - SHIFT) : splatu((1u << (SHIFT - 1)) - 1) + ((b >> SHIFT) & splatu(1));
        U normal = ((b + extra) >> SHIFT) - splatu(REBIAS);
        normal = select(lessu(splatu(TOP), normal), splatu(TOP), normal);
        F scaled = a * splat(PER_STEP);  // huge for normal numbers, where it is not used
        F steps = STOCHASTIC ? round_random(scaled, random) : scaled;
        U subnormal = bits(steps + splat(MAGIC)) - splatu(MAGIC_BITS);
        U code = select(lessu(b, splatu(SMALLEST)), subnormal, normal);
        return select(nan, splatu(0x7fu), code) | sign;
    }
    static DSX_INLINE F decode(U code) {
        const U sign = (code & splatu(0x80u)) << 24, magnitude = code & splatu(0x7fu);
        F normal = floats((magnitude + splatu(REBIAS)) << SHIFT);
        F subnormal = to_float(magnitude) * splat(1.0f / PER_STEP);
        U b = bits(select(lessu(magnitude, splatu(1u << MANTISSA)), subnormal, normal));
        if (INFINITE < 0x7fu) b = select(equalu(magnitude, splatu(INFINITE)), splatu(0x7f800000u), b);
        b = select(lessu(splatu(INFINITE < 0x7fu ? INFINITE : TOP), magnitude), splatu(0x7fc00000u), b);
        return floats(b | sign);
    }
};
typedef Float8<3, 7, 0x7e, 0x7f> FloatE4M3;
typedef Float8<2, 15, 0x7b, 0x7c> FloatE5M2;

// ---- codes in memory --------------------------------------------------------------------------------

template <int BITS> DSX_INLINE void write_codes(U code, char* codes, int64_t i, int64_t count) {
    char* at = codes + (BITS == 8 ? i : i / 2);
    char raw[16];
    if (BITS == 8) {
        if (count >= LANES) return store8(at, code);
        store8(raw, code);
        __builtin_memcpy(at, raw, count);
        return;
    }
    if (count >= LANES) return store4(at, code);
    store4(raw, code & lane_mask((1u << count) - 1u));
    __builtin_memcpy(at, raw, (count + 1) / 2);
}

template <int BITS> DSX_INLINE U read_codes(const char* codes, int64_t i, int64_t count) {
    const char* at = codes + (BITS == 8 ? i : i / 2);
    if (count >= LANES) return BITS == 8 ? load8(at) : load4(at);
    char raw[16] = {};
    __builtin_memcpy(raw, at, BITS == 8 ? count : (count + 1) / 2);
    return BITS == 8 ? load8(raw) : load4(raw);
}

// Where group g of x lies among the codes.
DSX_INLINE int64_t place(const Quant& q, int64_t g) {
    if (q.slice == 0) return g;
    const int64_t per_chunk = q.slice * q.pipeline, chunk = g / per_chunk, within = g % per_chunk;
    const int64_t node = chunk / q.devices, device = chunk % q.devices;
    return (((within / q.slice) * q.devices + device) * q.nodes + node) * q.slice + within % q.slice;
}

// Noise::first for sixteen elements after the other. Counting on is cheaper than starting again, and it is right unless
// the low half of an index overflows.
struct NoiseRun {
    uint32_t seed;
    bool overflows;
    U lanes, key;
    DSX_INLINE NoiseRun(uint32_t seed_, int64_t begin, int64_t end)
        : seed(seed_), overflows((begin >> 32) != ((end + LANES) >> 32)),
          lanes(lane_numbers() + splatu((uint32_t)begin)), key(splatu(noise_key(seed_, begin))) {}
    DSX_INLINE U at(int64_t index) {
        if (overflows) return Noise(seed, index).first;
        const U random = mix(lanes ^ key);
        lanes = lanes + splatu(LANES);
        return random;
    }
};

// ---- kernels ----------------------------------------------------------------------------------------

struct Range {
    float base, width;  // base: subtracted before scaling
};

template <DType T> DSX_INLINE Range magnitude_of(const char* x, int64_t from, int64_t to) {
    F top[2] = {splat(0.0f), splat(0.0f)};
    int64_t i = from;
    for (; i + 2 * LANES <= to; i += 2 * LANES)
        for (int k = 0; k < 2; ++k) top[k] = larger_magnitude(top[k], absolute(Access<T>::load(x, i + k * LANES)));
    for (; i < to; i += LANES) top[0] = larger_magnitude(top[0], absolute(Padded<T>::load(x, i, to - i)));
    return {0.0f, largest_magnitude(larger_magnitude(top[0], top[1]))};
}

template <DType T> DSX_INLINE Range interval_of(const char* x, int64_t from, int64_t to) {
    char first[64] = {};
    __builtin_memcpy(first, x + from * Access<T>::SIZE, Access<T>::SIZE);
    F value = Access<T>::load(first, 0);
    float one;
    __builtin_memcpy(&one, &value, 4);
    F high[2] = {splat(one), splat(one)}, low[2] = {high[0], high[0]}, top = absolute(high[0]);  // top: NaN shows in it
    auto take = [&](int k, F v) __attribute__((always_inline)) {
        high[k] = larger(high[k], v);
        low[k] = smaller(low[k], v);
        top = larger_magnitude(top, absolute(v));
    };
    int64_t i = from;
    for (; i + 2 * LANES <= to; i += 2 * LANES)
        for (int k = 0; k < 2; ++k) take(k, Access<T>::load(x, i + k * LANES));
    for (; i < to; i += LANES) {
        const U there = lane_mask(to - i >= LANES ? 0xffffu : (1u << (to - i)) - 1u);
        take(0, select(there, Padded<T>::load(x, i, to - i), splat(one)));
    }
    const float most = largest_magnitude(top);
    if (most != most) return {__builtin_nanf(""), __builtin_nanf("")};
    const float base = smallest(smaller(low[0], low[1]));
    return {base, largest(larger(high[0], high[1])) - base};
}

template <class FORMAT, DType T> DSX_INLINE Range range_of(const char* x, int64_t from, int64_t to) {
    return FORMAT::SYMMETRIC ? magnitude_of<T>(x, from, to) : interval_of<T>(x, from, to);
}

template <class FORMAT, DType T, bool STOCHASTIC>
void quantize_of(const Quant& q, const char* x, char* codes, float* scale, float* zero, int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end; from += q.group) {
        const int64_t to = end - from < q.group ? end : from + q.group, g = place(q, from / q.group),
                      shift = g * q.group - from;
        const Range range = range_of<FORMAT, T>(x, from, to);
        const float step = range.width / FORMAT::RANGE;
        scale[g] = step;
        if (!FORMAT::SYMMETRIC) zero[g] = range.base;
        const F inv = inverse(step), base = splat(range.base);
        NoiseRun noise(q.seed, q.offset + from, q.offset + to);
        auto code_at = [&](F v, int64_t i) __attribute__((always_inline)) {
            F t = (FORMAT::SYMMETRIC ? v : v - base) * inv;
            return FORMAT::template encode<STOCHASTIC>(t, STOCHASTIC ? noise.at(q.offset + i) >> 8 : splatu(0));
        };
        int64_t i = from;
        for (; i + LANES <= to; i += LANES)
            write_codes<FORMAT::BITS>(code_at(Access<T>::load(x, i), i), codes, i + shift, LANES);
        if (i < to) write_codes<FORMAT::BITS>(code_at(Padded<T>::load(x, i, to - i), i), codes, i + shift, to - i);
    }
}

// What the codes of one group stand for.
template <class FORMAT> struct Values {
    F step, base;
    Values() = default;
    DSX_INLINE Values(float step_, float base_) : step(splat(step_)), base(splat(base_)) {}
    DSX_INLINE F at(const char* codes, int64_t i, int64_t count) const {
        F v = FORMAT::decode(read_codes<FORMAT::BITS>(codes, i, count)) * step;
        return FORMAT::SYMMETRIC ? v : v + base;
    }
};
#if defined(DSX_ISA_AVX512)
// Four bits have sixteen values: a register holds them all.
template <bool SYMMETRIC> struct Values<Integer<4, SYMMETRIC>> {
    F table;
    Values() = default;
    DSX_INLINE Values(float step, float base) {
        table = Integer<4, SYMMETRIC>::decode(lane_numbers()) * splat(step);
        if (!SYMMETRIC) table = table + splat(base);
    }
    DSX_INLINE F at(const char* codes, int64_t i, int64_t count) const {
        uint64_t raw = 0;
        if (count >= LANES) __builtin_memcpy(&raw, codes + i / 2, 8);
        else __builtin_memcpy(&raw, codes + i / 2, (count + 1) / 2);
        const __m512i halves =
            _mm512_permutexvar_epi32(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
                                     _mm512_castsi128_si512(_mm_cvtsi64_si128((long long)raw)));
        const __m512i index =
            _mm512_srlv_epi32(halves, _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0));
        F v;
        v.r[0] = (freg)_mm512_permutexvar_ps(index, (__m512)table.r[0]);  // looks at the low four bits alone
        return v;
    }
};
#endif

template <class FORMAT, DType T>
void dequantize_of(const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t begin,
                   int64_t end) {
    for (int64_t from = begin; from < end; from += q.group) {
        const int64_t to = end - from < q.group ? end : from + q.group, g = place(q, from / q.group),
                      shift = g * q.group - from;
        const Values<FORMAT> values(scale[g], FORMAT::SYMMETRIC ? 0.0f : zero[g]);
        const bool stream = q.stream && ((uintptr_t)(x + from * Access<T>::SIZE) & 63) == 0;
        int64_t i = from;
        for (; i + LANES <= to; i += LANES) {
            F v = values.at(codes, i + shift, LANES);
            if (stream) Padded<T>::stream(x, i, LANES, v);
            else Access<T>::store(x, i, v);
        }
        if (i < to) Padded<T>::store(x, i, to - i, values.at(codes, i + shift, to - i));
    }
    if (q.stream) fence();
}

// Adds what RANKS ranks' codes of [from, to), all of one group, stand for to out, or begins it. The sum stays in a
// register meanwhile.
template <class FORMAT, int RANKS>
DSX_INLINE void add_ranks(const char* codes, const float* scale, const float* zero, int64_t code_stride,
                          int64_t scale_stride, bool first, F factor, float* out, int64_t from, int64_t to) {
    Values<FORMAT> values[RANKS];
    for (int r = 0; r < RANKS; ++r)
        values[r] = Values<FORMAT>(scale[r * scale_stride], FORMAT::SYMMETRIC ? 0.0f : zero[r * scale_stride]);
    columns(to - from, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        F sum = values[0].at(codes, from + i, count);
        if (!first) sum = Padded<F32>::load((char*)out, i, count) + sum;
        for (int r = 1; r < RANKS; ++r) sum = sum + values[r].at(codes + r * code_stride, from + i, count);
        Padded<F32>::store((char*)out, i, count, sum * factor);
    });
}

template <class FORMAT>
void reduce_of(const Quant& q, const char* codes, const float* scale, const float* zero, int64_t ranks,
               int64_t code_stride, int64_t scale_stride, float factor, float* out, int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end;) {
        const int64_t g = from / q.group, border = (g + 1) * q.group, to = end < border ? end : border;
        for (int64_t r = 0; r < ranks;) {
            const int64_t several = ranks - r >= 4 ? 4 : 1;
            const F times = splat(r + several == ranks ? factor : 1.0f);
            const char* c = codes + r * code_stride;
            const float *s = scale + r * scale_stride + g, *z = zero + (FORMAT::SYMMETRIC ? 0 : r * scale_stride + g);
            if (several == 4)
                add_ranks<FORMAT, 4>(c, s, z, code_stride, scale_stride, r == 0, times, out + (from - begin), from, to);
            else
                add_ranks<FORMAT, 1>(c, s, z, code_stride, scale_stride, r == 0, times, out + (from - begin), from, to);
            r += several;
        }
        from = to;
    }
}

// ---- formats and dtypes -----------------------------------------------------------------------------

template <class FORMAT>
void quantize_as(const Quant& q, const char* x, char* codes, float* scale, float* zero, int64_t begin, int64_t end) {
    if (q.stochastic) {
        if (q.dtype == BF16) return quantize_of<FORMAT, BF16, true>(q, x, codes, scale, zero, begin, end);
        if (q.dtype == F16) return quantize_of<FORMAT, F16, true>(q, x, codes, scale, zero, begin, end);
        return quantize_of<FORMAT, F32, true>(q, x, codes, scale, zero, begin, end);
    }
    if (q.dtype == BF16) return quantize_of<FORMAT, BF16, false>(q, x, codes, scale, zero, begin, end);
    if (q.dtype == F16) return quantize_of<FORMAT, F16, false>(q, x, codes, scale, zero, begin, end);
    quantize_of<FORMAT, F32, false>(q, x, codes, scale, zero, begin, end);
}

template <class FORMAT>
void dequantize_as(const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t begin,
                   int64_t end) {
    if (q.dtype == BF16) return dequantize_of<FORMAT, BF16>(q, codes, scale, zero, x, begin, end);
    if (q.dtype == F16) return dequantize_of<FORMAT, F16>(q, codes, scale, zero, x, begin, end);
    dequantize_of<FORMAT, F32>(q, codes, scale, zero, x, begin, end);
}

// Calls function<format>(arguments).
#define DSX_BY_FORMAT(function, ...) \
    switch (q.format) { \
        case INT8: return function<Integer<8, true>>(__VA_ARGS__); \
        case INT4: return function<Integer<4, true>>(__VA_ARGS__); \
        case INT8_ASYM: return function<Integer<8, false>>(__VA_ARGS__); \
        case INT4_ASYM: return function<Integer<4, false>>(__VA_ARGS__); \
        case E4M3: return function<FloatE4M3>(__VA_ARGS__); \
        case E5M2: return function<FloatE5M2>(__VA_ARGS__); \
    }

void quantize(const Quant& q, const char* x, char* codes, float* scale, float* zero, int64_t begin, int64_t end) {
    DSX_BY_FORMAT(quantize_as, q, x, codes, scale, zero, begin, end)
}
void dequantize(const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t begin,
                int64_t end) {
    DSX_BY_FORMAT(dequantize_as, q, codes, scale, zero, x, begin, end)
}
void reduce(const Quant& q, const char* codes, const float* scale, const float* zero, int64_t ranks,
            int64_t code_stride, int64_t scale_stride, float factor, float* out, int64_t begin, int64_t end) {
    DSX_BY_FORMAT(reduce_of, q, codes, scale, zero, ranks, code_stride, scale_stride, factor, out, begin, end)
}

}  // namespace

extern const QuantKernels quant_table;
const QuantKernels quant_table = {quantize, dequantize, reduce};

}  // namespace DSX_ISA
}  // namespace dsx
