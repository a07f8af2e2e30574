// Moving blocks of rows between the user's tensors and fp32 tiles: converted, transposed, padded with zeros.
#pragma once
#include "dsx_native/half.h"
#include "simd.h"

namespace dsx_sparse {
namespace DSX_ISA {

static inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t size_of(DType t) { return t == F32 ? 4 : 2; }

static inline const char* row_address(const Tensor4& t, DType dtype, int64_t batch, int64_t head, int64_t row) {
    return t.data + size_of(dtype) * (batch * t.batch + head * t.head + row * t.row);
}

// n elements, any dtype, to fp32.
static inline void widen(DType dtype, const char* from, float* to, int64_t n) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(from);
    if (dtype == F32) __builtin_memcpy(to, from, 4 * n);
    else if (dtype == BF16) dsx_native::widen_row<dsx_native::BFLOAT16>(half, to, n);
    else dsx_native::widen_row<dsx_native::FLOAT16>(half, to, n);
}

// n elements of fp32 to any dtype.
static inline void narrow(DType dtype, const float* from, char* to, int64_t n) {
    uint16_t* half = reinterpret_cast<uint16_t*>(to);
    if (dtype == F32) __builtin_memcpy(to, from, 4 * n);
    else if (dtype == BF16) dsx_native::narrow_row<dsx_native::BFLOAT16>(from, half, n);
    else dsx_native::narrow_row<dsx_native::FLOAT16>(from, half, n);
}

// Rows of a tensor as fp32 [rows x padded dim], read where they lie if that is what they are, else copied into `room`.
struct Rows {
    const float* at;
    int64_t stride;
};
static inline Rows rows_as_float(const Tensor4& t, const Problem& p, int64_t batch, int64_t head, int64_t first,
                             int64_t count, float* room) {
    const char* source = row_address(t, p.dtype, batch, head, first);
    if (p.dtype == F32 && p.dim % PAD == 0 && count == p.block) return {reinterpret_cast<const float*>(source), t.row};
    const int64_t width = padded(p.dim);
    for (int64_t r = 0; r < count; ++r) {
        widen(p.dtype, source + r * t.row * size_of(p.dtype), room + r * width, p.dim);
        for (int64_t d = p.dim; d < width; ++d) room[r * width + d] = 0.0f;
    }
    if (count < p.block) __builtin_memset(room + count * width, 0, 4 * (p.block - count) * width);
    return {room, width};
}

// to[c * ldt + r] = from[r * ldf + c] * factor for a 16 x 16 square.
static DSX_INLINE void transpose16(const float* from, int64_t ldf, float* to, int64_t ldt, vf factor) {
#if defined(DSX_ISA_AVX512)
    const __mmask16 all = (__mmask16)-1;
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = (__m512)(load(from + i * ldf) * factor);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_maskz_unpacklo_ps(all, a[i], a[i + 1]);
        b[i + 1] = _mm512_maskz_unpackhi_ps(all, a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_maskz_shuffle_ps(all, b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_maskz_shuffle_ps(all, b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_maskz_shuffle_ps(all, b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_maskz_shuffle_ps(all, b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_maskz_shuffle_f32x4(all, a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_maskz_shuffle_f32x4(all, a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_maskz_shuffle_f32x4(all, a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_maskz_shuffle_f32x4(all, a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        store(to + i * ldt, (vf)_mm512_maskz_shuffle_f32x4(all, b[i], b[i + 8], 0x88));
        store(to + (i + 4) * ldt, (vf)_mm512_maskz_shuffle_f32x4(all, b[i + 4], b[i + 12], 0x88));
        store(to + (i + 8) * ldt, (vf)_mm512_maskz_shuffle_f32x4(all, b[i], b[i + 8], 0xdd));
        store(to + (i + 12) * ldt, (vf)_mm512_maskz_shuffle_f32x4(all, b[i + 4], b[i + 12], 0xdd));
    }
#elif defined(DSX_ISA_AVX2)
    for (int half = 0; half < 2; ++half)
        for (int side = 0; side < 2; ++side) {
            const float* source = from + half * 8 * ldf + side * 8;
            float* target = to + side * 8 * ldt + half * 8;
            __m256 a[8], b[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) a[i] = (__m256)(load(source + i * ldf) * factor);
#pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
                a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
                a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
                a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                store(target + i * ldt, (vf)_mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                store(target + (i + 4) * ldt, (vf)_mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
            }
        }
#else
    for (int r = 0; r < 16; ++r)
        for (int c = 0; c < 16; ++c) to[c * ldt + r] = from[r * ldf + c] * factor[0];
#endif
}

// to[c][r] = from[r][c] * factor; rows and cols are multiples of PAD.
static inline void transpose(const float* from, int64_t ldf, float* to, int64_t ldt, int64_t rows, int64_t cols,
                             float factor) {
    const vf f = splat(factor);
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < cols; c += 16) transpose16(from + r * ldf + c, ldf, to + c * ldt + r, ldt, f);
}

// ---- per-element masks, keyed the same way in every implementation ----

static inline uint32_t head_key(const Problem& p, int64_t batch, int64_t head) {
    return mix1(p.seed ^ (uint32_t)(batch * p.heads + head));
}
static inline void row_keys(uint32_t head, int64_t first, int64_t n, uint32_t* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = mix1(head + (uint32_t)(first + i));
}
static inline void col_keys(uint32_t head, int64_t first, int64_t n, uint32_t* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = mix1(~head + (uint32_t)(first + i));
}

// Consecutive pieces of a thread's scratch, 64 bytes aligned.
struct BumpAllocator {
    float* at;
    float* take(int64_t n) {
        float* piece = at;
        at += (n + 15) / 16 * 16;
        return piece;
    }
};

}  // namespace DSX_ISA
}  // namespace dsx_sparse
