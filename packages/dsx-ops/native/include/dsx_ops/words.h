// Two elements per lane of 32 bits, as bf16 numbers lie in memory: the even element low, the odd one high. Compiled per
// instruction set.
//
// For kernels bound by arithmetic: 32 elements of 16 bits are one load, and parting them is a shift and a mask, where
// widening sixteen by sixteen costs more. The even elements fill one register of floats, the odd ones another.
#pragma once
#include "dsx_ops/tiles.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr uint32_t HIGH = 0xffff0000u, LOW = 0xffffu;
typedef uint16_t wreg __attribute__((vector_size(WIDTH)));

DSX_INLINE U load_words(const void* at) { return bits(load32(at)); }
DSX_INLINE void store_words(void* at, U a) { store32(at, floats(a)); }

// (a & b) | c
DSX_INLINE U and_or(U a, U b, U c) {
#if defined(DSX_ISA_AVX512)
    c.r[0] = (ureg)_mm512_ternarylogic_epi32((__m512i)a.r[0], (__m512i)b.r[0], (__m512i)c.r[0], 0xea);
    return c;
#else
    return (a & b) | c;
#endif
}

DSX_INLINE U low_words(U a) { return a & splatu(LOW); }
DSX_INLINE U join_low(U even, U odd) { return even | (odd << 16); }                      // both below 2^16
DSX_INLINE U join_high(U even, U odd) { return and_or(odd, splatu(HIGH), even >> 16); }  // of both the high halves
DSX_INLINE U shift_words(U a, int n) {
    DSX_EACH a.r[i] = (ureg)((wreg)a.r[i] >> n);
    return a;
}  // to the right, each word for itself

DSX_INLINE U larger_words(U a, U b) {
#if defined(DSX_ISA_AVX512)
    a.r[0] = (ureg)_mm512_maskz_max_epu16((__mmask32)-1, (__m512i)a.r[0], (__m512i)b.r[0]);
#elif defined(DSX_ISA_AVX2)
    DSX_EACH a.r[i] = (ureg)_mm256_max_epu16((__m256i)a.r[i], (__m256i)b.r[i]);
#else
    DSX_EACH a.r[i] = (ureg)((wreg)a.r[i] < (wreg)b.r[i] ? (wreg)b.r[i] : (wreg)a.r[i]);
#endif
    return a;
}

// Of each word the low byte plus 16 times the high one.
DSX_INLINE U add_bytes_times_16(U a) {
#if defined(DSX_ISA_AVX512)
    a.r[0] = (ureg)_mm512_maskz_maddubs_epi16((__mmask32)-1, (__m512i)a.r[0], _mm512_set1_epi16(0x1001));
#elif defined(DSX_ISA_AVX2)
    DSX_EACH a.r[i] = (ureg)_mm256_maddubs_epi16((__m256i)a.r[i], _mm256_set1_epi16(0x1001));
#else
    DSX_EACH a.r[i] = (ureg)(((wreg)a.r[i] & 0xff) + ((wreg)a.r[i] >> 8) * 16);
#endif
    return a;
}

// 32 bytes -> words. SIGNED: their sign fills the word.
template <bool SIGNED> DSX_INLINE_HERE U load_bytes_as_words(const void* at) {
    U c;
#if defined(DSX_ISA_AVX512)
    const __m256i raw = _mm256_loadu_si256((const __m256i*)at);
    c.r[0] = (ureg)(SIGNED ? _mm512_maskz_cvtepi8_epi16((__mmask32)-1, raw)
                           : _mm512_maskz_cvtepu8_epi16((__mmask32)-1, raw));
#elif defined(DSX_ISA_AVX2)
    DSX_EACH {
        const __m128i raw = _mm_loadu_si128((const __m128i*)at + i);
        c.r[i] = (ureg)(SIGNED ? _mm256_cvtepi8_epi16(raw) : _mm256_cvtepu8_epi16(raw));
    }
#else
    uint8_t raw[32];
    uint16_t wide[32];
    __builtin_memcpy(raw, at, 32);
    for (int k = 0; k < 32; ++k) wide[k] = SIGNED ? (uint16_t)(int8_t)raw[k] : raw[k];
    DSX_EACH for (int k = 0; k < PER; ++k) c.r[i][k] = wide[2 * (i * PER + k)] | (uint32_t)wide[2 * (i * PER + k) + 1]
                                                                                     << 16;
#endif
    return c;
}
// The low bytes of 32 words.
DSX_INLINE_HERE void store_words_as_bytes(void* at, U a) {
#if defined(DSX_ISA_AVX512)
    _mm256_storeu_si256((__m256i*)at, _mm512_maskz_cvtepi16_epi8((__mmask32)-1, (__m512i)a.r[0]));
#elif defined(DSX_ISA_AVX2)
    const __m256i low = _mm256_set1_epi16(255);
    const __m256i packed =
        _mm256_packus_epi16(_mm256_and_si256((__m256i)a.r[0], low), _mm256_and_si256((__m256i)a.r[1], low));
    _mm256_storeu_si256((__m256i*)at, _mm256_permute4x64_epi64(packed, 0xd8));
#else
    uint8_t raw[32];
    DSX_EACH for (int k = 0; k < PER; ++k) {
        raw[2 * (i * PER + k)] = (uint8_t)a.r[i][k];
        raw[2 * (i * PER + k) + 1] = (uint8_t)(a.r[i][k] >> 16);
    }
    __builtin_memcpy(at, raw, 32);
#endif
}

// 32 elements, parted and joined again.
struct Pair {
    F even, odd;
};

DSX_INLINE_HERE Pair parted(F first, F second) {
#if defined(DSX_ISA_AVX512)
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                  odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    Pair p;
    p.even.r[0] = (freg)_mm512_permutex2var_ps((__m512)first.r[0], even, (__m512)second.r[0]);
    p.odd.r[0] = (freg)_mm512_permutex2var_ps((__m512)first.r[0], odd, (__m512)second.r[0]);
    return p;
#elif defined(DSX_ISA_AVX2)
    Pair p;
    DSX_EACH {
        const __m256 a = (__m256)(i ? second : first).r[0], b = (__m256)(i ? second : first).r[1];
        p.even.r[i] = (freg)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps(a, b, 0x88), 0xd8);
        p.odd.r[i] = (freg)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps(a, b, 0xdd), 0xd8);
    }
    return p;
#else
    float in[32], out[32];
    store32(in, first);
    store32(in + 16, second);
    for (int k = 0; k < 16; ++k) out[k] = in[2 * k];
    for (int k = 0; k < 16; ++k) out[16 + k] = in[2 * k + 1];
    return {load32(out), load32(out + 16)};
#endif
}
DSX_INLINE_HERE void rejoined(Pair p, F& first, F& second) {
#if defined(DSX_ISA_AVX512)
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                  high = _mm512_or_si512(low, _mm512_set1_epi32(8));
    first.r[0] = (freg)_mm512_permutex2var_ps((__m512)p.even.r[0], low, (__m512)p.odd.r[0]);
    second.r[0] = (freg)_mm512_permutex2var_ps((__m512)p.even.r[0], high, (__m512)p.odd.r[0]);
#elif defined(DSX_ISA_AVX2)
    DSX_EACH {
        const __m256 low = _mm256_unpacklo_ps((__m256)p.even.r[i], (__m256)p.odd.r[i]),
                     high = _mm256_unpackhi_ps((__m256)p.even.r[i], (__m256)p.odd.r[i]);
        (i ? second : first).r[0] = (freg)_mm256_permute2f128_ps(low, high, 0x20);
        (i ? second : first).r[1] = (freg)_mm256_permute2f128_ps(low, high, 0x31);
    }
#else
    float in[32], out[32];
    store32(in, p.even);
    store32(in + 16, p.odd);
    for (int k = 0; k < 16; ++k) {
        out[2 * k] = in[k];
        out[2 * k + 1] = in[16 + k];
    }
    first = load32(out);
    second = load32(out + 16);
#endif
}

// 32 elements of a buffer of dtype T from element i on; `low`: the low bits of SPLIT.
template <DType T> struct Pairs {
    static constexpr DType WIDE = T == F16 ? F16 : F32;
    static DSX_INLINE Pair load(const char* base, const char* low, int64_t i) {
        if (T != BF16 && T != SPLIT) return parted(Access<WIDE>::load(base, i), Access<WIDE>::load(base, i + LANES));
        const U both = load_words(base + 2 * i);
        if (T == BF16) return {floats(both << 16), floats(both & splatu(HIGH))};
        const U rest = load_words(low + 2 * i);
        return {joined(low_words(both), low_words(rest)), joined(both >> 16, rest >> 16)};
    }
    static DSX_INLINE void store(char* base, char* low, int64_t i, Pair p) {
        if (T == BF16) return store_words(base + 2 * i, join_low(float_to_bf16(p.even), float_to_bf16(p.odd)));
        if (T == SPLIT) {
            const U quiet = splatu(0x7fc00000u), half = splatu(0x8000u);
            const U even = select(is_nan(p.even), quiet, bits(p.even)), odd = select(is_nan(p.odd), quiet, bits(p.odd));
            store_words(base + 2 * i, join_high(even + half, odd + half));
            return store_words(low + 2 * i, join_low(low_words(even), odd));
        }
        F first, second;
        rejoined(p, first, second);
        Access<WIDE>::store(base, i, first);
        Access<WIDE>::store(base, i + LANES, second);
    }
};

}  // namespace
}  // namespace DSX_ISA
}  // namespace dsx
