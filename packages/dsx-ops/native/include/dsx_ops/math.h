// exp and the error function of sixteen floats. The baseline has no fused multiply-add, so its last bits may differ from the others'.
#pragma once
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

// e^r for r = c - n ln 2, |r| <= ln 2 / 2, ln 2 in two parts (Cody & Waite), by its series.
DSX_INLINE F exponential_near_zero(F n, F c) {
    F r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), c));
    F p = multiply_add(splat(1.98756915e-4f), r, splat(1.39819995e-3f));
    p = multiply_add(p, r, splat(8.33345191e-3f));
    p = multiply_add(p, r, splat(4.16657960e-2f));
    p = multiply_add(p, r, splat(1.66666655e-1f));
    p = multiply_add(p, r, splat(5.00000012e-1f));
    return multiply_add(p, r * r, r) + splat(1.0f);
}

// e^x to 2 units in the last place. What is no normal number is 0 (with AVX-512 only below e^-104), above 88.72 infinity; NaN stays.
DSX_INLINE F exponential(F x) {
#if defined(DSX_ISA_AVX512)
    // The instruction that scales by a power of two rounds to zero by itself what is too small.
    F c = larger(smaller(x, splat(89.0f)), splat(-106.0f));
    F n = c * splat(1.44269504f);
    n.r[0] = (freg)_mm512_maskz_roundscale_ps((__mmask16)-1, (__m512)n.r[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F p = exponential_near_zero(n, c);
    p.r[0] = (freg)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p.r[0], (__m512)n.r[0]);
    return p;
#else
    const F magic = splat(12582912.0f);  // adding it rounds to the nearest integer
    F c = larger(smaller(x, splat(89.0f)), splat(-87.5f));
    F shifted = multiply_add(c, splat(1.44269504f), magic), n = shifted - magic;
    F p = exponential_near_zero(n, c);
    // n lies in [-126, 128]: times 2^(n-1) and 2, so that 2^128 is infinity by itself.
    U power = (bits(shifted) - splatu(0x4b400000u - 126u)) << 23;
    F y = (p * floats(power)) * splat(2.0f);
    return select(less(x, splat(-87.33f)), splat(0.0f), y);
#endif
}

// erfc(|x|) from e = exp(-x^2), to 1.5e-7 (Abramowitz & Stegun 7.1.26).
DSX_INLINE F complement(F magnitude, F e) {
    F t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * magnitude);
    F p = multiply_add(splat(1.061405429f), t, splat(-1.453152027f));
    p = multiply_add(p, t, splat(1.421413741f));
    p = multiply_add(p, t, splat(-0.284496736f));
    p = multiply_add(p, t, splat(0.254829592f));
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
