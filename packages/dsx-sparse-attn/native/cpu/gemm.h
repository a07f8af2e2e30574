// The matrix product everything here is made of: C[m x n] = A[m x k] * B[k x n] on tiles that lie in the caches.
//
// B's rows are contiguous (lanes run along n). A is read one element at a time and broadcast, so it may lie either way:
// row-major, or (FROM_COLUMNS) with its columns contiguous, which is A transposed for free. What happens to a finished
// register tile is the caller's affair (`Finish`), so that maxima, exponentials and masks are applied before the scores
// are stored. m and n are multiples of PAD.
#pragma once
#include "simd.h"

namespace dsx_sparse {
namespace DSX_ISA {

// Rows of a register tile. With AVX2's 16 registers there are two ways: 4 rows leave room for what is done with a
// finished tile; 6 (TALL) need fewer loads for each multiply-add, which pays where finishing is little.
#if defined(DSX_ISA_AVX512)
constexpr int TILE_ROWS = 8, TALL_ROWS = 8;
#elif defined(DSX_ISA_AVX2)
constexpr int TILE_ROWS = 4, TALL_ROWS = 6;
#else
constexpr int TILE_ROWS = 4, TALL_ROWS = 4;
#endif
constexpr int TILE_REGS = 2;  // registers along n

template <int ROWS, int REGS> struct Tile {
    vf at[ROWS][REGS];
};

template <bool FROM_COLUMNS, int ROWS, int REGS, class Finish>
static DSX_INLINE void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                             const Finish& finish, int64_t row,
                             int64_t col) {
    Tile<ROWS, REGS> c;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < REGS; ++v) c.at[r][v] = splat(0.0f);
#pragma GCC unroll 2
    for (int64_t p = 0; p < k; ++p) {
        vf right[REGS];
#pragma GCC unroll 2
        for (int v = 0; v < REGS; ++v) right[v] = load(b + p * ldb + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const vf left = splat(FROM_COLUMNS ? a[p * lda + r] : a[r * lda + p]);
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) c.at[r][v] = fma(left, right[v], c.at[r][v]);
        }
    }
    finish(c, row, col);
}

// m is a multiple of PAD, so rows that ROWS leaves over come in fours and twos.
template <bool FROM_COLUMNS, int ROWS, int REGS, class Finish>
static DSX_INLINE void strip(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                             int64_t col, const Finish& finish) {
    const int64_t step = FROM_COLUMNS ? 1 : lda;
    int64_t row = 0;
    for (; row + ROWS <= m; row += ROWS)
        micro<FROM_COLUMNS, ROWS, REGS>(a + row * step, lda, b + col, ldb, k, finish, row, col);
    if constexpr (PAD % ROWS != 0) {
        if (row + 4 <= m) {
            micro<FROM_COLUMNS, 4, REGS>(a + row * step, lda, b + col, ldb, k, finish, row, col);
            row += 4;
        }
        if (row < m) micro<FROM_COLUMNS, 2, REGS>(a + row * step, lda, b + col, ldb, k, finish, row, col);
    }
}

template <bool FROM_COLUMNS, int ROWS = TILE_ROWS, class Finish>
static DSX_INLINE void gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                            const Finish& finish) {
    int64_t col = 0;
    for (; col + TILE_REGS * LANES <= n; col += TILE_REGS * LANES)
        strip<FROM_COLUMNS, ROWS, TILE_REGS>(m, k, a, lda, b, ldb, col, finish);
    // With AVX-512 n may be an odd multiple of 16.
    if (col < n) strip<FROM_COLUMNS, ROWS, 1>(m, k, a, lda, b, ldb, col, finish);
}

// ---- what to do with finished tiles ----

struct Store {
    float* c;
    int64_t ldc;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) store(c + (row + r) * ldc + col + v * LANES, t.at[r][v]);
    }
};

struct Add {  // c += t
    float* c;
    int64_t ldc;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) {
                float* at = c + (row + r) * ldc + col + v * LANES;
                store(at, load(at) + t.at[r][v]);
            }
    }
};

struct AddScaled {  // c += factor * t
    float* c;
    int64_t ldc;
    float factor;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
        const vf f = splat(factor);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) {
                float* at = c + (row + r) * ldc + col + v * LANES;
                store(at, fma(f, t.at[r][v], load(at)));
            }
    }
};

}  // namespace DSX_ISA
}  // namespace dsx_sparse
