// What the kernels over rows share: a row held in registers by the threads of a team, column sums, and the position of a column.
#pragma once
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {

constexpr int KEPT = 8;                             // groups of four per thread that stay in registers
constexpr int64_t WARP_COLUMNS = 4 * WARP * KEPT;   // rows up to this are a warp's
constexpr int64_t BLOCK_COLUMNS = 4 * THREADS * KEPT;

__device__ __forceinline__ int left_in(int64_t end, int64_t i) { return end - i < 4 ? (int)(end - i) : 4; }
// Rows of a multiple of four columns begin at aligned addresses if the tensor does.
inline bool whole_rows(const Rows& r, std::initializer_list<const void*> streams) {
    bool whole = r.cols % 4 == 0;
    for (const void* at : streams) whole = whole && fits(at, r.dtype == F32 ? 16 : 8);
    return whole;
}
inline bool whole_vector(const Vector& v) { return fits(v.at, v.dtype == F32 ? 16 : 8); }

// Starts kernel<Team, held> with the team and the way of holding a row that its length asks for.
template <class F> void for_rows(int64_t rows, int64_t cols, F f) {
    constexpr int per_block = THREADS / WARP;
    if (cols <= WARP_COLUMNS) f(WarpTeam(), std::true_type(), (rows + per_block - 1) / per_block);
    else if (cols <= BLOCK_COLUMNS) f(BlockTeam(), std::true_type(), rows);
    else f(BlockTeam(), std::false_type(), rows);
}

// The values make(column, n) of one row, four columns at a time: computed once and kept in registers when the row fits (HELD), else at every visit.
template <class Team, bool HELD, class Make> struct RowValues {
    const Make& make;
    int64_t cols;
    Float4 kept[HELD ? KEPT : 1];

    __device__ __forceinline__ RowValues(const Make& make_, int64_t cols_) : make(make_), cols(cols_) {
        if constexpr (HELD) {
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                const int64_t c = 4 * ((int64_t)k * Team::size() + Team::rank());
                if (c < cols) kept[k] = make(c, left_in(cols, c));
            }
        }
    }
    // f(column, n, values)
    template <class F> __device__ __forceinline__ void each(const F& f) {
        if constexpr (HELD) {
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                const int64_t c = 4 * ((int64_t)k * Team::size() + Team::rank());
                if (c < cols) f(c, left_in(cols, c), kept[k]);
            }
        } else {
            for (int64_t c = 4 * Team::rank(); c < cols; c += 4 * Team::size()) {
                const int n = left_in(cols, c);
                Float4 v = make(c, n);
                f(c, n, v);
            }
        }
    }
};
template <class Team, bool HELD, class Make> __device__ __forceinline__ RowValues<Team, HELD, Make> row_values(const Make& make, int64_t cols) {
    return RowValues<Team, HELD, Make>(make, cols);
}

// ---- column sums --------------------------------------------------------------------------------------------------------
//
// Two kernels: every slab (a run of rows) is summed per column, then the slabs. The order is the same in every run, and depends on the
// number of rows only.

inline int64_t slabs_of(int64_t rows) { return rows < SLABS ? rows : SLABS; }

struct Slab {
    int64_t begin, end;
};
__device__ __forceinline__ Slab slab_of(int64_t slab, int64_t slabs, int64_t rows) { return {rows * slab / slabs, rows * (slab + 1) / slabs}; }

// out[c] = sum over slabs of partials[slab, c]. A block has 32 columns; its warps share the slabs.
static __global__ void __launch_bounds__(THREADS) add_slabs(const float* partials, int64_t slabs, int64_t cols, char* out, DType dtype) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ float shared[WARPS * WARP];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const int64_t c = (int64_t)blockIdx.x * WARP + lane;
    float sum = 0;
    for (int64_t s = warp; s < slabs && c < cols; s += WARPS) sum = sum + partials[s * cols + c];
    shared[warp * WARP + lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= cols) return;
    for (int w = 1; w < WARPS; ++w) sum = sum + shared[w * WARP + lane];
    store1(dtype, out, c, sum);
}
inline void start_add_slabs(const Where& where, const float* partials, const Rows& r, char* out, DType dtype) {
    launch(where, add_slabs, (r.cols + WARP - 1) / WARP, THREADS, partials, slabs_of(r.rows), r.cols, out, dtype);
}

}  // namespace cuda
}  // namespace dsx
