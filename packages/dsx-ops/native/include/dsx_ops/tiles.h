// Streams of a kernel in first-level-cache tiles, conversions between dtypes, and noise; compiled per instruction set.
#pragma once
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

// ---- tiles ------------------------------------------------------------------------------------------
//
// A tile is a stretch of a row that stays in the first-level cache. Streams that are fp32 are worked on where they lie;
// others are converted into fp32 tiles and back. So there is one fp32 kernel per algorithm, not one per combination of
// dtypes.

constexpr int64_t TILE = 512;
constexpr int size_of(DType t) { return t == NONE ? 0 : t == F32 ? 4 : 2; }

template <DType FROM, DType TO> void map(const char* in, char* out, int64_t n, F factor, bool scaled) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F x = Access<FROM>::load(in, i);
        Access<TO>::store(out, i, scaled ? x * factor : x);
    }
    if (i < n) {
        alignas(64) char from[64] = {}, to[64];
        __builtin_memcpy(from, in + i * Access<FROM>::SIZE, (n - i) * Access<FROM>::SIZE);
        F x = Access<FROM>::load(from, 0);
        Access<TO>::store(to, 0, scaled ? x * factor : x);
        __builtin_memcpy(out + i * Access<TO>::SIZE, to, (n - i) * Access<TO>::SIZE);
    }
}

template <DType FROM> void map_from(const char* in, DType to, char* out, int64_t n, F factor, bool scaled) {
    if (to == BF16) return map<FROM, BF16>(in, out, n, factor, scaled);
    if (to == F16) return map<FROM, F16>(in, out, n, factor, scaled);
    map<FROM, F32>(in, out, n, factor, scaled);
}

void convert_n(DType from, const char* in, DType to, char* out, int64_t n) {
    if (from == BF16) return map_from<BF16>(in, to, out, n, splat(1.0f), false);
    if (from == F16) return map_from<F16>(in, to, out, n, splat(1.0f), false);
    map_from<F32>(in, to, out, n, splat(1.0f), false);
}

// bf16 weights whose fp32 masters are completed by 16 low bits kept elsewhere. The weight is the master rounded to
// nearest, ties away from zero: that gives 65536 masters to every weight, so 16 bits always complete it. (With ties to
// even it would be 65537 for even weights.)
DSX_INLINE F joined(U weight, U low) { return floats((weight << 16) + ((low ^ splatu(0x8000u)) - splatu(0x8000u))); }
DSX_INLINE void join(const char* weight, const char* low, char* out, int64_t i) {
    store32(out + 4 * i, joined(load16(weight + 2 * i), load16(low + 2 * i)));
}
DSX_INLINE void split(const char* master, char* weight, char* low, int64_t i) {
    F a = load32(master + 4 * i);
    U b = select(is_nan(a), splatu(0x7fc00000u), bits(a));
    store16(weight + 2 * i, (b + splatu(0x8000u)) >> 16);
    store16(low + 2 * i, b & splatu(0xffffu));
}
void join_n(const char* weight, const char* low, char* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) join(weight, low, out, i);
    if (i < n) {
        char w[32] = {}, l[32] = {}, o[64];
        __builtin_memcpy(w, weight + 2 * i, 2 * (n - i));
        __builtin_memcpy(l, low + 2 * i, 2 * (n - i));
        join(w, l, o, 0);
        __builtin_memcpy(out + 4 * i, o, 4 * (n - i));
    }
}
void split_n(const char* master, char* weight, char* low, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) split(master, weight, low, i);
    if (i < n) {
        char m[64] = {}, w[32], l[32];
        __builtin_memcpy(m, master + 4 * i, 4 * (n - i));
        split(m, w, l, 0);
        __builtin_memcpy(weight + 2 * i, w, 2 * (n - i));
        __builtin_memcpy(low + 2 * i, l, 2 * (n - i));
    }
}

// The low-precision copy is only written, never read: non-temporal stores save reading its lines.
template <DType T> void stream_n(const float* p, char* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        alignas(32) char packed[32];
        Access<T>::store(packed, 0, load32(p + i));
        stream16(out + 2 * i, packed);
    }
    if (i < n) convert_n(F32, (const char*)(p + i), T, out + 2 * i, n - i);
}
__attribute__((unused)) void write_copy(DType copy, const float* p, char* base, int64_t at, int64_t n) {
    if (copy == NONE) return;
    char* out = base + at * size_of(copy);
    const bool aligned = ((uintptr_t)out & 31) == 0;
    if (aligned && copy == BF16) return stream_n<BF16>(p, out, n);
    if (aligned && copy == F16) return stream_n<F16>(p, out, n);
    convert_n(F32, (const char*)p, copy, out, n);
}

// Sixteen elements from i, of which `count` are there; the others read as zero and are not written.
template <DType T> struct Padded {
    static DSX_INLINE F load(const char* base, int64_t i, int64_t count) {
        if (count >= LANES) return Access<T>::load(base, i);
        alignas(64) char padded[64] = {};
        if (count > 0) __builtin_memcpy(padded, base + i * Access<T>::SIZE, count * Access<T>::SIZE);
        return Access<T>::load(padded, 0);
    }
    static DSX_INLINE void store(char* base, int64_t i, int64_t count, F a) {
        if (count >= LANES) return Access<T>::store(base, i, a);
        alignas(64) char padded[64];
        Access<T>::store(padded, 0, a);
        if (count > 0) __builtin_memcpy(base + i * Access<T>::SIZE, padded, count * Access<T>::SIZE);
    }
    // Past the caches; base + i * SIZE is aligned to 64 bytes.
    static DSX_INLINE void stream(char* base, int64_t i, int64_t count, F a) {
        if (count < LANES) return store(base, i, count, a);
        if (T == F32) return stream32(base + 4 * i, a);
        alignas(32) char packed[32];
        Access<T>::store(packed, 0, a);
        stream16(base + 2 * i, packed);
    }
};

// f(column, count) for all columns: count is LANES, a constant to the compiler, except in the last call of an odd row.
template <class Body> DSX_INLINE void columns(int64_t cols, const Body& f) {
    int64_t c = 0;
    for (; c + LANES <= cols; c += LANES) f(c, LANES);
    if (c < cols) f(c, cols - c);
}

// As Padded, for integers of 16 bits.
DSX_INLINE U load_codes16(const char* at, int64_t count) {
    if (count >= LANES) return load16(at);
    char raw[32] = {};
    __builtin_memcpy(raw, at, 2 * count);
    return load16(raw);
}
DSX_INLINE void store_codes16(char* at, int64_t count, U codes) {
    if (count >= LANES) return store16(at, codes);
    char raw[32];
    store16(raw, codes);
    __builtin_memcpy(at, raw, 2 * count);
}

// The parameter of a row.
template <DType P> struct Parameter {
    static DSX_INLINE F load(const Row& row, int64_t i, int64_t count) { return Padded<P>::load(row.param, i, count); }
    static DSX_INLINE void store(const Row& row, int64_t i, int64_t count, F a) {
        Padded<P>::store(row.param, i, count, a);
    }
};
template <> struct Parameter<SPLIT> {
    static DSX_INLINE F load(const Row& row, int64_t i, int64_t count) {
        return joined(load_codes16(row.param + 2 * i, count), load_codes16(row.low_bits + 2 * i, count));
    }
    static DSX_INLINE void store(const Row& row, int64_t i, int64_t count, F a) {
        U b = select(is_nan(a), splatu(0x7fc00000u), bits(a));
        store_codes16(row.param + 2 * i, count, (b + splatu(0x8000u)) >> 16);
        store_codes16(row.low_bits + 2 * i, count, b & splatu(0xffffu));
    }
};

// One stream of a tile: a pointer into the row when that is fp32 and a multiple of sixteen long, else a converted copy.
struct Stream {
    alignas(64) float buffer[TILE];
    float* at = buffer;
    bool converted = false;

    DSX_INLINE void open(DType dtype, const char* row, const char* low, int64_t begin, int64_t n) {
        converted = dtype != F32 || n % LANES != 0;
        if (!converted) {
            at = (float*)(const_cast<char*>(row)) + begin;
            return;
        }
        at = buffer;
        for (int64_t k = n; k % LANES; ++k) buffer[k] = 0;
        if (dtype == SPLIT) join_n(row + 2 * begin, low + 2 * begin, (char*)buffer, n);
        else convert_n(dtype, row + begin * size_of(dtype), F32, (char*)buffer, n);
    }
    DSX_INLINE void close(DType dtype, char* row, char* low, int64_t begin, int64_t n) {
        if (!converted) return;
        if (dtype == SPLIT) split_n((const char*)buffer, row + 2 * begin, low + 2 * begin, n);
        else convert_n(F32, (const char*)buffer, dtype, row + begin * size_of(dtype), n);
    }
};

// ---- noise and block maxima -------------------------------------------------------------------------

DSX_INLINE U mix(U x) {
    x = (x ^ (x >> 16)) * splatu(0x7feb352du);
    x = (x ^ (x >> 15)) * splatu(0x846ca68bu);
    return x ^ (x >> 16);
}

DSX_INLINE U second_noise(U first) { return first * splatu(0x9e3779b1u); }

// Random numbers of 32 bits, keyed by seed and element index. `second` costs one multiplication more; its high bits do
// not go with the high bits of `first`.
DSX_INLINE U lane_numbers() {
    uint32_t lane[16];
    for (uint32_t k = 0; k < 16; ++k) lane[k] = k;
    U numbers;
    __builtin_memcpy(&numbers, lane, 64);
    return numbers;
}
DSX_INLINE uint32_t noise_key(uint32_t seed, int64_t index) {
    return seed + (uint32_t)((uint64_t)index >> 32) * 0x9e3779b9u;
}

struct Noise {
    U first, second;
    DSX_INLINE Noise(uint32_t seed, int64_t index) {
        const uint32_t low = (uint32_t)index;
        U lanes = lane_numbers() + splatu(low), key = splatu(noise_key(seed, index));
        if (low > 0xfffffff0u)
            key = select(lessu(lanes, splatu(low)), splatu(noise_key(seed, index + LANES)), key);  // carry
        first = mix(lanes ^ key);
        second = second_noise(first);
    }
};

// One number from sixteen lanes: fold(a, b) of the halves, then of the quarters, ...
template <class Fold> DSX_INLINE float fold_lanes(F a, const Fold& fold) {
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
#if defined(DSX_ISA_AVX512)
    const __m256 low = _mm512_castps512_ps256((__m512)a.r[0]), high = _mm512_extractf32x8_ps((__m512)a.r[0], 1);
#else
    const __m256 low = (__m256)a.r[0], high = (__m256)a.r[1];
#endif
    const __m256 eight = fold.of8(low, high);
    const __m128 four = fold.of4(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = fold.of4(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(fold.of4(two, _mm_movehdup_ps(two)));
#else
    float lane[16];
    __builtin_memcpy(lane, &a, 64);
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; ++k) lane[k] = fold.of1(lane[k], lane[k + half]);
    return lane[0];
#endif
}

struct Larger {  // a < b ? b : a
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    static DSX_INLINE __m256 of8(__m256 a, __m256 b) { return _mm256_max_ps(b, a); }
    static DSX_INLINE __m128 of4(__m128 a, __m128 b) { return _mm_max_ps(b, a); }
#else
    static DSX_INLINE float of1(float a, float b) { return a < b ? b : a; }
#endif
};
struct Smaller {  // b < a ? b : a
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    static DSX_INLINE __m256 of8(__m256 a, __m256 b) { return _mm256_min_ps(b, a); }
    static DSX_INLINE __m128 of4(__m128 a, __m128 b) { return _mm_min_ps(b, a); }
#else
    static DSX_INLINE float of1(float a, float b) { return b < a ? b : a; }
#endif
};
struct LargerMagnitude {  // as integers, so that NaN is above infinity
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    static DSX_INLINE __m256 of8(__m256 a, __m256 b) {
        return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    }
    static DSX_INLINE __m128 of4(__m128 a, __m128 b) {
        return _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(a), _mm_castps_si128(b)));
    }
#else
    static DSX_INLINE float of1(float a, float b) {
        uint32_t x, y;
        __builtin_memcpy(&x, &a, 4);
        __builtin_memcpy(&y, &b, 4);
        return x < y ? b : a;
    }
#endif
};
DSX_INLINE float largest(F a) { return fold_lanes(a, Larger()); }  // of numbers; NaN is the caller's concern
DSX_INLINE float smallest(F a) { return fold_lanes(a, Smaller()); }
DSX_INLINE float largest_magnitude(F a) { return fold_lanes(a, LargerMagnitude()); }

// Magnitudes that fp32 cannot invert are flushed to zero.
DSX_INLINE F inverse(float scale) { return splat(scale >= 1.1754944e-38f || scale != scale ? 1.0f / scale : 0.0f); }

}  // namespace
}  // namespace DSX_ISA
}  // namespace dsx
