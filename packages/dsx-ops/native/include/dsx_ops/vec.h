// Sixteen floats at a time, in whatever registers the instruction set has. Included by files compiled per instruction
// set.
//
// F and U behave like a float and a uint32_t of 16 lanes: one 512-bit register, two of 256 or four of 128 bits. The
// sixteen lanes are the same on every machine, which makes sums taken per lane equal too. Everything here is in the
// namespace of its instruction set and inlined: a shared inline function compiled with AVX-512 could be picked by the
// linker for all callers.
#pragma once
#include <stdint.h>

#include "dsx_ops/kernels.h"
#include "dsx_native/half.h"
#ifdef DSX_X86
#include <immintrin.h>
#endif

namespace dsx {
namespace DSX_ISA {

#define DSX_INLINE inline __attribute__((always_inline))
// What is a short instruction or two with AVX2 and a loop over lanes without: there a call, because a copy at every
// place made the baseline's files take twice as long to compile as the others together.
#if defined(DSX_ISA_AVX2) || defined(DSX_ISA_AVX512)
#define DSX_INLINE_HERE inline __attribute__((always_inline))
#else
#define DSX_INLINE_HERE __attribute__((noinline, unused))
#endif

#if defined(DSX_ISA_AVX512)
constexpr int WIDTH = 64;
#elif defined(DSX_ISA_AVX2)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int REGS = 64 / WIDTH;
constexpr int PER = WIDTH / 4;

typedef float freg __attribute__((vector_size(WIDTH)));
typedef uint32_t ureg __attribute__((vector_size(WIDTH)));
typedef int32_t ireg __attribute__((vector_size(WIDTH)));
typedef uint16_t hreg __attribute__((vector_size(WIDTH / 2)));
typedef uint8_t breg __attribute__((vector_size(WIDTH / 4)));

// Loads and stores of whole registers: a memcpy of 64 bytes is split into pieces of 16 by the compiler, and the
// registers read back from such pieces wait for all of them.
typedef float freg_at __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef uint16_t hreg_at __attribute__((vector_size(WIDTH / 2), aligned(1), may_alias));

struct F {
    freg r[REGS];
};
struct U {
    ureg r[REGS];
};

#define DSX_EACH for (int i = 0; i < REGS; ++i)
#define DSX_BINARY(T, op) \
    static DSX_INLINE T operator op(T a, T b) { \
        T c; \
        DSX_EACH c.r[i] = a.r[i] op b.r[i]; \
        return c; \
    }
// clang-format off
DSX_BINARY(F, +) DSX_BINARY(F, -) DSX_BINARY(F, *) DSX_BINARY(F, /)
DSX_BINARY(U, +) DSX_BINARY(U, -) DSX_BINARY(U, *) DSX_BINARY(U, &) DSX_BINARY(U, |) DSX_BINARY(U, ^)
// clang-format on
#undef DSX_BINARY

static DSX_INLINE U operator<<(U a, int n) {
    U c;
    DSX_EACH c.r[i] = a.r[i] << n;
    return c;
}
static DSX_INLINE U operator>>(U a, int n) {
    U c;
    DSX_EACH c.r[i] = a.r[i] >> n;
    return c;
}
static DSX_INLINE F splat(float x) {
    F c;
    DSX_EACH c.r[i] = x - (freg){};
    return c;
}
static DSX_INLINE U splatu(uint32_t x) {
    U c;
    DSX_EACH c.r[i] = x + (ureg){};
    return c;
}
static DSX_INLINE U bits(F a) {
    U c;
    DSX_EACH c.r[i] = (ureg)a.r[i];
    return c;
}
static DSX_INLINE F floats(U a) {
    F c;
    DSX_EACH c.r[i] = (freg)a.r[i];
    return c;
}
// Masks are all-ones or zero per lane.
static DSX_INLINE U less(F a, F b) {
    U c;
    DSX_EACH c.r[i] = (ureg)(a.r[i] < b.r[i]);
    return c;
}
static DSX_INLINE U lessu(U a, U b) {
    U c;
    DSX_EACH c.r[i] = (ureg)(a.r[i] < b.r[i]);
    return c;
}
static DSX_INLINE U is_nan(F a) {
    U c;
    DSX_EACH c.r[i] = (ureg)(a.r[i] != a.r[i]);
    return c;
}
static DSX_INLINE U equalu(U a, U b) {
    U c;
    DSX_EACH c.r[i] = (ureg)(a.r[i] == b.r[i]);
    return c;
}
static DSX_INLINE U select(U mask, U a, U b) {
    U c;
    DSX_EACH c.r[i] = (ireg)mask.r[i] ? a.r[i] : b.r[i];
    return c;
}
static DSX_INLINE F select(U mask, F a, F b) { return floats(select(mask, bits(a), bits(b))); }
static DSX_INLINE F absolute(F a) { return floats(bits(a) & splatu(0x7fffffffu)); }
// b < a ? b : a, and a < b ? b : a: a when either is NaN.
#if defined(DSX_ISA_AVX512)
static DSX_INLINE F smaller(F a, F b) {
    F c;
    c.r[0] = (freg)_mm512_maskz_min_ps((__mmask16)-1, (__m512)b.r[0], (__m512)a.r[0]);
    return c;
}
static DSX_INLINE F larger(F a, F b) {
    F c;
    c.r[0] = (freg)_mm512_maskz_max_ps((__mmask16)-1, (__m512)b.r[0], (__m512)a.r[0]);
    return c;
}
#elif defined(DSX_ISA_AVX2)
static DSX_INLINE F smaller(F a, F b) {
    F c;
    DSX_EACH c.r[i] = (freg)_mm256_min_ps((__m256)b.r[i], (__m256)a.r[i]);
    return c;
}
static DSX_INLINE F larger(F a, F b) {
    F c;
    DSX_EACH c.r[i] = (freg)_mm256_max_ps((__m256)b.r[i], (__m256)a.r[i]);
    return c;
}
#else
static DSX_INLINE F smaller(F a, F b) { return select(less(b, a), b, a); }
static DSX_INLINE F larger(F a, F b) { return select(less(a, b), b, a); }
#endif
// a * b + c, rounded once where the instruction set does so: not for kernels that promise equal bits.
static DSX_INLINE F multiply_add(F a, F b, F c) {
#if defined(DSX_ISA_AVX512)
    c.r[0] = (freg)_mm512_fmadd_ps((__m512)a.r[0], (__m512)b.r[0], (__m512)c.r[0]);
    return c;
#elif defined(DSX_ISA_AVX2)
    DSX_EACH c.r[i] = (freg)_mm256_fmadd_ps((__m256)a.r[i], (__m256)b.r[i], (__m256)c.r[i]);
    return c;
#else
    return a * b + c;
#endif
}
// Of magnitudes: as integers they order like floats, with NaN above infinity.
static DSX_INLINE F larger_magnitude(F a, F b) {
#if defined(DSX_ISA_AVX512)
    F c;
    c.r[0] = (freg)_mm512_max_epu32((__m512i)a.r[0], (__m512i)b.r[0]);
    return c;
#elif defined(DSX_ISA_AVX2)
    F c;
    DSX_EACH c.r[i] = (freg)_mm256_max_epu32((__m256i)a.r[i], (__m256i)b.r[i]);
    return c;
#else
    return select(lessu(bits(a), bits(b)), b, a);
#endif
}
static DSX_INLINE F to_float(U a) {
    F c;
    DSX_EACH c.r[i] = __builtin_convertvector((ireg)a.r[i], freg);
    return c;
}

static DSX_INLINE F root(F a) {
    F c;
#if defined(DSX_ISA_AVX512)
    c.r[0] = (freg)_mm512_maskz_sqrt_ps((__mmask16)-1, (__m512)a.r[0]);
#elif defined(DSX_ISA_AVX2)
    DSX_EACH c.r[i] = (freg)_mm256_sqrt_ps((__m256)a.r[i]);
#elif defined(DSX_X86)
    DSX_EACH c.r[i] = (freg)_mm_sqrt_ps((__m128)a.r[i]);
#else
    DSX_EACH for (int k = 0; k < PER; ++k) c.r[i][k] = __builtin_sqrtf(a.r[i][k]);
#endif
    return c;
}

// The largest integer not above a; |a| < 2^22.
static DSX_INLINE F floor_of(F a) {
#if defined(DSX_ISA_AVX512)
    a.r[0] = (freg)_mm512_maskz_roundscale_ps((__mmask16)-1, (__m512)a.r[0], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return a;
#elif defined(DSX_ISA_AVX2)
    DSX_EACH a.r[i] = (freg)_mm256_floor_ps((__m256)a.r[i]);
    return a;
#else
    const F magic = splat(12582912.0f);
    F nearest = (a + magic) - magic;
    return select(less(a, nearest), nearest - splat(1.0f), nearest);
#endif
}

static DSX_INLINE F load32(const void* at) {
    F c;
    DSX_EACH c.r[i] = (freg)((const freg_at*)at)[i];
    return c;
}
static DSX_INLINE void store32(void* at, F a) { DSX_EACH((freg_at*)at)[i] = (freg_at)a.r[i]; }

// 16-bit integers, widened.
static DSX_INLINE U load16(const void* at) {
    U c;
#if defined(DSX_ISA_AVX512)
    c.r[0] = (ureg)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, _mm256_loadu_si256((const __m256i*)at));
#elif defined(DSX_ISA_AVX2)
    DSX_EACH c.r[i] = (ureg)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at + i));
#else
    DSX_EACH c.r[i] = __builtin_convertvector((hreg)((const hreg_at*)at)[i], ureg);
#endif
    return c;
}
static DSX_INLINE void store16(void* at, U a) {
#if defined(DSX_ISA_AVX2)
    // The values fit 16 bits: pack both registers, then put the quarters in order.
    __m256i packed = _mm256_packus_epi32((__m256i)(a.r[0] & 0xffffu), (__m256i)(a.r[1] & 0xffffu));
    packed = _mm256_permute4x64_epi64(packed, 0xd8);
    _mm256_storeu_si256((__m256i*)at, packed);
#else
    DSX_EACH((hreg_at*)at)[i] = (hreg_at) __builtin_convertvector(a.r[i], hreg);
#endif
}
static DSX_INLINE_HERE U load8(const void* at) {
    U c;
#if defined(DSX_ISA_AVX512)
    c.r[0] = (ureg)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(DSX_ISA_AVX2)
    c.r[0] = (ureg)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
    c.r[1] = (ureg)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)at + 8)));
#else
    uint8_t raw[16];
    __builtin_memcpy(raw, at, 16);
    DSX_EACH for (int k = 0; k < PER; ++k) c.r[i][k] = raw[i * PER + k];
#endif
    return c;
}
static DSX_INLINE_HERE void store8(void* at, U a) {
#if defined(DSX_ISA_AVX512)
    _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8((__m512i)a.r[0]));
#elif defined(DSX_ISA_AVX2)
    __m256i words = _mm256_packus_epi32((__m256i)a.r[0], (__m256i)a.r[1]);
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)at, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    uint8_t raw[16];
    DSX_EACH for (int k = 0; k < PER; ++k) raw[i * PER + k] = (uint8_t)a.r[i][k];
    __builtin_memcpy(at, raw, 16);
#endif
}

// Sixteen values of four bits <-> eight bytes, the even one in the low half.
static DSX_INLINE_HERE void store4(void* at, U a) {
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    __m128i codes;
    store8(&codes, a);
    const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));  // even + 16 odd
    _mm_storel_epi64((__m128i*)at, _mm_packus_epi16(pairs, pairs));
#else
    uint64_t w[2];
    store8(w, a);
    for (int k = 0; k < 2; ++k) {
        w[k] = (w[k] | (w[k] >> 4)) & 0x00ff00ff00ff00ffull;
        w[k] = (w[k] | (w[k] >> 8)) & 0x0000ffff0000ffffull;
        const uint32_t packed = (uint32_t)(w[k] | (w[k] >> 16));
        __builtin_memcpy((char*)at + 4 * k, &packed, 4);
    }
#endif
}
static DSX_INLINE_HERE U load4(const void* at) {
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    const __m128i packed = _mm_loadl_epi64((const __m128i*)at), low = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(packed, low), _mm_and_si128(_mm_srli_epi16(packed, 4), low));
    return load8(&codes);
#else
    uint64_t w[2];
    for (int k = 0; k < 2; ++k) {
        uint32_t packed;
        __builtin_memcpy(&packed, (const char*)at + 4 * k, 4);
        w[k] = packed;
        w[k] = (w[k] | (w[k] << 16)) & 0x0000ffff0000ffffull;
        w[k] = (w[k] | (w[k] << 8)) & 0x00ff00ff00ff00ffull;
        w[k] = (w[k] | (w[k] << 4)) & 0x0f0f0f0f0f0f0f0full;
    }
    return load8(w);
#endif
}

// bf16: round to nearest, ties to even; NaN becomes the quiet NaN torch writes.
static DSX_INLINE F bf16_to_float(U h) { return floats(h << 16); }
static DSX_INLINE U float_to_bf16(F a) {
#if defined(DSX_ISA_AVX512)
    const __m512i b = (__m512i)a.r[0], half = _mm512_add_epi32(b, _mm512_set1_epi32(0x7fff));
    const __m512i rounded =
        _mm512_mask_add_epi32(half, _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000)), half, _mm512_set1_epi32(1));
    const __mmask16 numbers = _mm512_cmp_ps_mask((__m512)a.r[0], (__m512)a.r[0], _CMP_ORD_Q);
    U c;
    c.r[0] = (ureg)_mm512_mask_srli_epi32(_mm512_set1_epi32(0x7fc0), numbers, rounded, 16);
    return c;
#else
    U c;
    DSX_EACH c.r[i] = dsx_native::lanes_to_bf16<ureg>(a.r[i]);
    return c;
#endif
}

static DSX_INLINE_HERE F load_half(const void* at) {
    F c;
#if defined(DSX_ISA_AVX512)
    c.r[0] = (freg)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)at));
#elif defined(DSX_ISA_AVX2)
    DSX_EACH c.r[i] = (freg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + i));
#else
    const uint16_t* h = (const uint16_t*)at;
    DSX_EACH for (int k = 0; k < PER; ++k) {
        uint16_t raw;
        __builtin_memcpy(&raw, h + i * PER + k, 2);
        c.r[i][k] = dsx_native::f16_to_float(raw);
    }
#endif
    return c;
}
static DSX_INLINE_HERE void store_half(void* at, F a) {
#if defined(DSX_ISA_AVX512)
    _mm256_storeu_si256((__m256i*)at, _mm512_maskz_cvtps_ph((__mmask16)-1, (__m512)a.r[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(DSX_ISA_AVX2)
    DSX_EACH _mm_storeu_si128((__m128i*)at + i, _mm256_cvtps_ph((__m256)a.r[i], _MM_FROUND_TO_NEAREST_INT));
#else
    DSX_EACH for (int k = 0; k < PER; ++k) {
        const uint16_t raw = dsx_native::float_to_f16(a.r[i][k]);
        __builtin_memcpy((char*)at + 2 * (i * PER + k), &raw, 2);
    }
#endif
}

// One bit per lane: bit k of the result is lane k of an all-ones-or-zero mask, and back.
static DSX_INLINE uint32_t lane_bits(U mask) {
#if defined(DSX_ISA_AVX512)
    return (uint32_t)_mm512_movepi32_mask((__m512i)mask.r[0]);
#elif defined(DSX_ISA_AVX2)
    return (uint32_t)_mm256_movemask_ps((__m256)mask.r[0]) | (uint32_t)_mm256_movemask_ps((__m256)mask.r[1]) << 8;
#elif defined(DSX_X86)
    uint32_t found = 0;
    DSX_EACH found |= (uint32_t)_mm_movemask_ps((__m128)mask.r[i]) << (4 * i);
    return found;
#else
    uint32_t found = 0;
    DSX_EACH for (int k = 0; k < PER; ++k) found |= (mask.r[i][k] & 1u) << (i * PER + k);
    return found;
#endif
}
static DSX_INLINE U lane_mask(uint32_t bits) {
#if defined(DSX_ISA_AVX512)
    U c;
    c.r[0] = (ureg)_mm512_movm_epi32((__mmask16)bits);
    return c;
#else
    U lane;
    DSX_EACH for (int k = 0; k < PER; ++k) lane.r[i][k] = 1u << (i * PER + k);
    return equalu(splatu(bits) & lane, lane);
#endif
}

// Non-temporal stores, for buffers that are only written: they save reading the lines. `at` is aligned to 64 bytes.
static DSX_INLINE void stream32(void* at, F a) {
#if defined(DSX_ISA_AVX512)
    _mm512_stream_ps((float*)at, (__m512)a.r[0]);
#elif defined(DSX_ISA_AVX2)
    DSX_EACH _mm256_stream_ps((float*)at + 8 * i, (__m256)a.r[i]);
#elif defined(DSX_X86)
    DSX_EACH _mm_stream_ps((float*)at + 4 * i, (__m128)a.r[i]);
#else
    store32(at, a);
#endif
}

// Non-temporal store of 16 bf16 or half values: saves reading the line of a buffer that is only written.
static DSX_INLINE void stream16(void* at, const void* from) {
#if defined(DSX_ISA_AVX512) || defined(DSX_ISA_AVX2)
    _mm256_stream_si256((__m256i*)at, _mm256_loadu_si256((const __m256i*)from));
#else
    __builtin_memcpy(at, from, 32);
#endif
}
static DSX_INLINE void fence() {
#ifdef DSX_X86
    _mm_sfence();
#endif
}

// Sixteen fp64 sums, one per lane.
typedef double dreg __attribute__((vector_size(WIDTH)));
constexpr int DREGS = 2 * REGS;
struct D {
    dreg r[DREGS];
};
static DSX_INLINE D zero_sums() {
    D d;
    for (int i = 0; i < DREGS; ++i) d.r[i] = (dreg){};
    return d;
}
static DSX_INLINE void add_squares(D& sum, F a) {
    DSX_EACH for (int k = 0; k < 2; ++k) {
#if defined(DSX_ISA_AVX512)
        dreg d = (dreg)_mm512_maskz_cvtps_pd(
            (__mmask8)-1, k ? _mm512_extractf32x8_ps((__m512)a.r[i], 1) : _mm512_castps512_ps256((__m512)a.r[i]));
#elif defined(DSX_ISA_AVX2)
        dreg d = (dreg)_mm256_cvtps_pd(k ? _mm256_extractf128_ps((__m256)a.r[i], 1)
                                         : _mm256_castps256_ps128((__m256)a.r[i]));
#else
        typedef float part __attribute__((vector_size(WIDTH / 2)));
        part x[2];
        __builtin_memcpy(x, &a.r[i], WIDTH);
        dreg d = __builtin_convertvector(x[k], dreg);
#endif
        sum.r[2 * i + k] = sum.r[2 * i + k] + d * d;
    }
}
static DSX_INLINE double total(const D& sum) {
    double lane[16], t = 0;
    __builtin_memcpy(lane, &sum, sizeof(lane));
    for (int k = 0; k < 16; ++k) t += lane[k];
    return t;
}

// Sixteen elements of a buffer of dtype T, starting at element i.
template <DType T> struct Access {
    static constexpr int SIZE = T == F32 ? 4 : 2;
    static DSX_INLINE F load(const char* base, int64_t i) {
        if (T == F32) return load32(base + 4 * i);
        if (T == F16) return load_half(base + 2 * i);
        return bf16_to_float(load16(base + 2 * i));
    }
    static DSX_INLINE void store(char* base, int64_t i, F a) {
        if (T == F32) store32(base + 4 * i, a);
        else if (T == F16) store_half(base + 2 * i, a);
        else store16(base + 2 * i, float_to_bf16(a));
    }
};

}  // namespace DSX_ISA
}  // namespace dsx
