// Registers of floats as wide as the instruction set has them, and the few operations attention needs. Everything is in
// the namespace of its instruction set and inlined: a shared inline function compiled with AVX-512 could be picked by
// the linker for all callers.
#pragma once
#include <stdint.h>

#include "dsx_sparse_attn/kernels.h"
#ifdef DSX_X86
#include <immintrin.h>
#endif

namespace dsx_sparse {
namespace DSX_ISA {

#define DSX_INLINE inline __attribute__((always_inline))

#if defined(DSX_ISA_AVX512)
constexpr int WIDTH = 64;
#elif defined(DSX_ISA_AVX2)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int LANES = WIDTH / 4;

typedef float vf __attribute__((vector_size(WIDTH), aligned(WIDTH), may_alias));
typedef float vf_any __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(WIDTH), aligned(WIDTH), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(WIDTH), aligned(4), may_alias));

constexpr float INF = __builtin_inff();
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

static DSX_INLINE vf load(const float* at) { return *reinterpret_cast<const vf_any*>(at); }
static DSX_INLINE void store(float* at, vf a) { *reinterpret_cast<vf_any*>(at) = a; }
static DSX_INLINE vu loadu(const uint32_t* at) { return *reinterpret_cast<const vu_any*>(at); }
static DSX_INLINE vf splat(float x) {
#if defined(DSX_ISA_AVX512)
    return (vf)_mm512_set1_ps(x);
#elif defined(DSX_ISA_AVX2)
    return (vf)_mm256_set1_ps(x);
#else
    return x - (vf){};
#endif
}
static DSX_INLINE vu splatu(uint32_t x) { return x + (vu){}; }

static DSX_INLINE vf fma(vf a, vf b, vf c) {
#if defined(DSX_ISA_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(DSX_ISA_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
// Where either is NaN the second operand is the result (as the instruction does it).
static DSX_INLINE vf maximum(vf a, vf b) {
#if defined(DSX_ISA_AVX512)
    return (vf)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif defined(DSX_ISA_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x to a relative 1e-7; exactly 0 below 2^-126 (so that -inf gives 0 and no denormal slows the products); NaN stays.
static DSX_INLINE vf exp2v(vf x) {
    const vf c0 = splat(1.00000007165f), c1 = splat(0.693146967046f), c2 = splat(0.240221197258f);
    const vf c3 = splat(0.05550713304f), c4 = splat(0.00967554125623f), c5 = splat(0.00132764621311f);
#if defined(DSX_ISA_AVX512)
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512 n = _mm512_maskz_roundscale_ps((__mmask16)-1, (__m512)x, NEAREST);
#elif defined(DSX_ISA_AVX2)
    const __m256 n = _mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(12582912.0f), shifted = x + magic, n = shifted - magic;
#endif
    const vf r = x - (vf)n;
    vf p = fma(c5, r, c4);
    p = fma(p, r, c3);
    p = fma(p, r, c2);
    p = fma(p, r, c1);
    p = fma(p, r, c0);
#if defined(DSX_ISA_AVX512)
    const __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(alive, (__m512)p, n);
#elif defined(DSX_ISA_AVX2)
    const __m256 alive = _mm256_cmp_ps((__m256)x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m256i bits = _mm256_add_epi32((__m256i)p, _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return (vf)_mm256_and_ps(alive, (__m256)bits);
#else
    const vu bits = (vu)p + (((vu)shifted - (vu)magic) << 23);
    const vf powered = (vf)(bits & ~(vu)(x < splat(-126.0f)));
    return x == x ? powered : x;
#endif
}

static DSX_INLINE bool any_not_one(vf a) {
#if defined(DSX_ISA_AVX512)
    return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
#elif defined(DSX_ISA_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, _mm256_set1_ps(1.0f), _CMP_NEQ_UQ)) != 0;
#else
    for (int i = 0; i < LANES; ++i)
        if (a[i] != 1.0f) return true;
    return false;
#endif
}

// A hash of 32 bits (two rounds of xor-shift and multiply); the reference in Python computes the same.
static DSX_INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * splatu(0x7feb352du);
    x = (x ^ (x >> 15)) * splatu(0x846ca68bu);
    return x ^ (x >> 16);
}
static DSX_INLINE uint32_t mix1(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
// Lanes of `a` where hash >= limit, zero elsewhere.
static DSX_INLINE vf keep(vf a, vu hash, uint32_t limit) { return (vf)((vu)a & (vu)(hash >= splatu(limit))); }

}  // namespace DSX_ISA
}  // namespace dsx_sparse
