// exp and the error function of sixteen floats. The baseline has no fused multiply-add, so its last bits may differ
// from the others'.
#pragma once
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

// e^r for r = c - n ln 2, |r| <= ln 2 / 2, ln 2 in two parts (Cody & Waite): 1 + r q(r), q the polynomial of degree 4
// whose largest relative error is least, 9.2e-8.
DSX_INLINE F exponential_near_zero(F n, F c) {
    F r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), c));
    F q = multiply_add(splat(8.290272206e-3f), r, splat(4.189816117e-2f));
    q = multiply_add(q, r, splat(1.666763872e-1f));
    q = multiply_add(q, r, splat(4.999914765e-1f));
    q = multiply_add(q, r, splat(9.999997020e-1f));
    return multiply_add(q, r, splat(1.0f));
}

// e^x for x <= 88 to 2 units in the last place. What is no normal number is 0 (with AVX-512 only below e^-104); NaN
// stays.
DSX_INLINE F exponential(F x) {
#if defined(DSX_ISA_AVX512)
    // The instruction that scales by a power of two rounds to zero by itself what is too small.
    F c = larger(x, splat(-106.0f));
    F n = c * splat(1.44269504f);
    n.r[0] =
        (freg)_mm512_maskz_roundscale_ps((__mmask16)-1, (__m512)n.r[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F p = exponential_near_zero(n, c);
    p.r[0] = (freg)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p.r[0], (__m512)n.r[0]);
    return p;
#else
    const F magic = splat(12582912.0f);  // adding it rounds to the nearest integer
    F c = larger(x, splat(-87.5f));
    F shifted = multiply_add(c, splat(1.44269504f), magic), n = shifted - magic;
    F p = exponential_near_zero(n, c);
    U power = (bits(shifted) - splatu(0x4b400000u - 127u)) << 23;  // n lies in [-126, 127]
    return select(less(x, splat(-87.33f)), splat(0.0f), p * floats(power));
#endif
}

// 1 / x for 0 < x < 2^126, to 1 unit in the last place.
DSX_INLINE F inverse_of(F x) {
#if defined(DSX_ISA_AVX512)
    // An estimate of 14 bits and a step of Newton's: division would take the longest of all that a GELU does.
    F y;
    y.r[0] = (freg)_mm512_maskz_rcp14_ps((__mmask16)-1, (__m512)x.r[0]);
    F rest;
    rest.r[0] = (freg)_mm512_fnmadd_ps((__m512)x.r[0], (__m512)y.r[0], _mm512_set1_ps(1.0f));
    return multiply_add(y, rest, y);
#else
    return splat(1.0f) / x;
#endif
}

// erfc(|x|) / 2 for x = u / sqrt 2, from e = exp(-x^2), to 1e-7 (Abramowitz & Stegun 7.1.26).
DSX_INLINE F half_complement(F u, F e) {
    F t = inverse_of(multiply_add(splat(0.3275911f * 0.70710678f), smaller(absolute(u), splat(1e18f)), splat(1.0f)));
    F p = multiply_add(splat(0.5f * 1.061405429f), t, splat(0.5f * -1.453152027f));
    p = multiply_add(p, t, splat(0.5f * 1.421413741f));
    p = multiply_add(p, t, splat(0.5f * -0.284496736f));
    p = multiply_add(p, t, splat(0.5f * 0.254829592f));
    return (p * t) * e;
}

// The lanes' sum, by halves.
DSX_INLINE float sum_lanes(F a) {
    float lane[16];
    __builtin_memcpy(lane, &a, 64);
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
    return lane[0];
}

}  // namespace
}  // namespace DSX_ISA
}  // namespace dsx
