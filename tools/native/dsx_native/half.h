// bf16 and fp16 beside fp32: one number, a register, a row. To nearest, ties to even; NaN becomes a quiet NaN.
//
// For sources that are compiled once per instruction set: everything is inlined or local to its object, since a shared
// function compiled with AVX-512 could be picked by the linker for all callers.
#pragma once
#include <stdint.h>
#if defined(DSX_ISA_AVX2) || defined(DSX_ISA_AVX512)
#include <immintrin.h>
#endif

namespace dsx_native {

#define DSX_NATIVE_INLINE static inline __attribute__((always_inline, unused))

DSX_NATIVE_INLINE float bits_to_float(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}
DSX_NATIVE_INLINE uint32_t float_to_bits(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    return bits;
}

DSX_NATIVE_INLINE float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
DSX_NATIVE_INLINE uint16_t float_to_bf16(float f) {
    const uint32_t bits = float_to_bits(f), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
// The bits of bf16 numbers in 32-bit lanes. U: a vector of uint32_t, F: of as many floats.
template <class U, class F> DSX_NATIVE_INLINE U lanes_to_bf16(F x) {
    const U bits = (U)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, number = (U)(x == x);
    return (rounded & number) | (0x7fc0u & ~number);
}

DSX_NATIVE_INLINE float f16_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u)  // infinity, or NaN, which becomes quiet as the hardware does it
        return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u));
    if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
    return bits_to_float(sign | float_to_bits((float)magnitude * 5.9604644775390625e-8f));  // subnormal: units of 2^-24
}
DSX_NATIVE_INLINE uint16_t float_to_f16(float f) {
    const uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to infinity, or is it
    if (magnitude < 0x38800000u)  // subnormal: the addition rounds to units of 2^-24
        return (uint16_t)(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

// ---- rows: n numbers at any address -----------------------------------------------------------------

enum Half { BFLOAT16, FLOAT16 };

template <Half KIND> static inline void widen_row(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
#if defined(DSX_ISA_AVX512)
    constexpr __mmask16 all = (__mmask16)-1;
    for (; i + 16 <= n; i += 16) {
        const __m256i h = _mm256_loadu_si256((const __m256i*)(from + i));
        if (KIND == FLOAT16) _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(all, h));
        else _mm512_storeu_si512(to + i, _mm512_maskz_slli_epi32(all, _mm512_maskz_cvtepu16_epi32(all, h), 16));
    }
#elif defined(DSX_ISA_AVX2)
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm_loadu_si128((const __m128i*)(from + i));
        if (KIND == FLOAT16) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(h));
        else _mm256_storeu_si256((__m256i*)(to + i), _mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
#endif
    for (; i < n; ++i) to[i] = KIND == FLOAT16 ? f16_to_float(from[i]) : bf16_to_float(from[i]);
}

template <Half KIND> static inline void narrow_row(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
#if defined(DSX_ISA_AVX512)
    typedef uint32_t lanes __attribute__((vector_size(64)));
    constexpr __mmask16 all = (__mmask16)-1;
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(from + i);
        const __m256i h = KIND == FLOAT16 ? _mm512_maskz_cvtps_ph(all, x, _MM_FROUND_TO_NEAREST_INT)
                                          : _mm512_maskz_cvtepi32_epi16(all, (__m512i)lanes_to_bf16<lanes>(x));
        _mm256_storeu_si256((__m256i*)(to + i), h);
    }
#elif defined(DSX_ISA_AVX2)
    typedef uint32_t lanes __attribute__((vector_size(32)));
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(from + i);
        const __m256i b = (__m256i)lanes_to_bf16<lanes>(x);
        const __m128i h = KIND == FLOAT16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
                                          : _mm_packus_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
        _mm_storeu_si128((__m128i*)(to + i), h);
    }
#endif
    for (; i < n; ++i) to[i] = KIND == FLOAT16 ? float_to_f16(from[i]) : float_to_bf16(from[i]);
}

}  // namespace dsx_native
