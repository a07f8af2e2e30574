// What the kernels over rows share: a row held in registers by the threads of a team, and sums down the columns.
#pragma once
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {

// ---- rows -------------------------------------------------------------------------------------------
//
// Up to 1024 columns a warp has a row (no barrier, many rows in flight), beyond that a block of as many threads as the
// row needs. A thread holds at most 32 elements of a row in registers; rows of more than 16384 columns are read again
// instead.

constexpr int FEW = 8, MANY = 32;      // elements of a row that a thread holds
constexpr int ROW_THREADS = 256;       // of blocks whose warps have a row each
constexpr int LONG_ROW_THREADS = 512;  // at most, of blocks that have a row
constexpr int64_t SHORT_ROW = FEW * WARP, WARP_ROW = MANY * WARP, HELD_ROW = MANY * LONG_ROW_THREADS;

// For __launch_bounds__: the threads of a block at most, and how many blocks share a multiprocessor at least.
template <class Team> constexpr int row_threads() {
    return std::is_same<Team, WarpTeam>::value ? ROW_THREADS : LONG_ROW_THREADS;
}
template <class Team, int HELD> constexpr int row_blocks() {
    return std::is_same<Team, WarpTeam>::value ? (HELD == FEW ? 6 : 2) : 1;
}

template <int N> using Holding = std::integral_constant<int, N>;

// Rows of a multiple of WIDTH columns begin at aligned addresses if the tensor does.
template <int WIDTH> bool whole_rows(const Rows& r, std::initializer_list<const void*> streams) {
    bool whole = r.cols % WIDTH == 0;
    for (const void* at : streams) whole = whole && fits_words<WIDTH>(at, r.dtype);
    return whole;
}
template <int WIDTH> bool whole_vector(const Vector& v) { return fits_words<WIDTH>(v.at, v.dtype); }
inline int threads_for(int64_t cols, int held, int most) {
    const int64_t warps = (cols + (int64_t)held * WARP - 1) / (held * WARP) * WARP;
    return (int)(warps < most ? warps : most);
}

// f(team, elements held per thread (0: none), blocks, threads): how rows of this length are shared.
template <class F> void for_rows(int64_t rows, int64_t cols, F f) {
    constexpr int per_block = ROW_THREADS / WARP;
    const int64_t blocks = (rows + per_block - 1) / per_block;
    if (cols <= SHORT_ROW) f(WarpTeam(), Holding<FEW>(), blocks, ROW_THREADS);
    else if (cols <= WARP_ROW) f(WarpTeam(), Holding<MANY>(), blocks, ROW_THREADS);
    else if (cols <= HELD_ROW) f(BlockTeam(), Holding<MANY>(), rows, threads_for(cols, MANY, LONG_ROW_THREADS));
    else f(BlockTeam(), Holding<0>(), rows, LONG_ROW_THREADS);
}

// What make(column, n, first) gives for WIDTH columns of one row at a time: kept in registers when the row fits (HELD),
// else asked for again at every visit; `first` says whether it is the first one.
template <class Team, int HELD, int WIDTH, class Make> struct RowValues {
    static constexpr int GROUPS = HELD / WIDTH;
    typedef decltype(std::declval<Make>()(int64_t(), int(), bool())) Value;
    const Make& make;
    int64_t cols;
    bool first = true;
    Value kept[HELD > 0 ? GROUPS : 1];

    __device__ __forceinline__ RowValues(const Make& make_, int64_t cols_) : make(make_), cols(cols_) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int64_t c = WIDTH * ((int64_t)k * Team::size() + Team::rank());
                if (c < cols) kept[k] = make(c, count_of<WIDTH>(cols, c), true);
            }
        }
    }
    // f(column, n, value)
    template <class F> __device__ __forceinline__ void each(const F& f) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int64_t c = WIDTH * ((int64_t)k * Team::size() + Team::rank());
                if (c < cols) f(c, count_of<WIDTH>(cols, c), kept[k]);
            }
        } else {
            for (int64_t c = WIDTH * Team::rank(); c < cols; c += WIDTH * Team::size()) {
                const int n = count_of<WIDTH>(cols, c);
                Value v = make(c, n, first);
                f(c, n, v);
            }
            first = false;
        }
    }
};
template <class Team, int HELD, int WIDTH, class Make>
__device__ __forceinline__ RowValues<Team, HELD, WIDTH, Make> row_values(const Make& make, int64_t cols) {
    return RowValues<Team, HELD, WIDTH, Make>(make, cols);
}

// ---- column sums ------------------------------------------------------------------------------------
//
// Two kernels and no atomics: the rows of every slab are summed per column, then the slabs. Which rows make a slab, and
// in which order all is added, depends on the tensor's shape and dtype only: every run on every GPU gives the same
// bits.

constexpr int COLUMN_THREADS = 256;
constexpr int COLUMN_WARPS = COLUMN_THREADS / WARP;
constexpr int ROWS_AT_ONCE = 2;  // of a warp: their loads are in flight together

struct Tiling {
    int64_t tiles, slabs;
};
// Blocks of column_sums: a warp's width of columns each, times slabs. About 1024 blocks fill the largest GPUs; more
// slabs would be more partial sums to write and to read again.
inline Tiling tiling_of(const Rows& r) {
    const int64_t tile = WARP * width_of(r.dtype), tiles = (r.cols + tile - 1) / tile,
                  step = COLUMN_WARPS * ROWS_AT_ONCE;
    const int64_t wanted = tiles >= 16 ? 64 : tiles <= 2 ? 512 : 1024 / tiles, found = (r.rows + step - 1) / step;
    return {tiles, found < 1 ? 1 : found < wanted ? found : wanted};
}

struct Slab {
    int64_t begin, end;
};
__device__ __forceinline__ Slab slab_of(int64_t slab, int64_t slabs, int64_t rows) {
    return {rows * slab / slabs, rows * (slab + 1) / slabs};
}

// Adds up what the warps of a block have for the same WARP * WIDTH columns, and stores it. sums: one per vector.
template <int WIDTH, int VECTORS>
__device__ __forceinline__ void store_block_sums(const Floats<WIDTH> (&sums)[VECTORS], int64_t column, int64_t cols,
                                                 int64_t slab, int64_t slabs, float* shared, float* partials) {
    constexpr int ACROSS = WARP * WIDTH;
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        __syncthreads();  // the shared memory may still be read
                          // Element k of lane l lies at k * WARP + l: the lanes of a warp write to different banks.
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) shared[warp * ACROSS + k * WARP + lane] = sums[v].x[k];
        __syncthreads();
        for (int i = (int)threadIdx.x; i < ACROSS; i += (int)blockDim.x) {
            float sum = shared[i % WIDTH * WARP + i / WIDTH];
            for (int w = 1; w < warps; ++w) sum = sum + shared[w * ACROSS + i % WIDTH * WARP + i / WIDTH];
            if (column + i < cols) put(partials + (v * slabs + slab) * cols + column + i, sum);
        }
    }
}

// The sums of one slab down the columns of one tile; all threads of a block take part. `walk` has
//   Loaded load(row, column, n): only loads, and
//   use(loaded, row, column, n, sums): the rest, which adds to the thread's Floats<WIDTH> sums[VECTORS].
// partials: [VECTORS, slabs, cols], or null: then nothing is summed.
template <int WIDTH, int VECTORS, class Walk>
__device__ __forceinline__ void column_sums(const Rows& r, const Tiling& t, const Walk& walk, float* partials) {
    __shared__ float shared[COLUMN_WARPS * WARP * WIDTH];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const int64_t slab_index = blockIdx.x / t.tiles, column = blockIdx.x % t.tiles * (WARP * WIDTH);
    const int64_t c = column + WIDTH * lane;
    const int n = count_of<WIDTH>(r.cols, c);
    const Slab slab = slab_of(slab_index, t.slabs, r.rows);
    Floats<WIDTH> sums[VECTORS] = {};
    for (int64_t row = slab.begin + warp; row < slab.end && n > 0; row += ROWS_AT_ONCE * COLUMN_WARPS) {
        typename Walk::Loaded loaded[ROWS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; ++k)
            if (row + k * COLUMN_WARPS < slab.end) loaded[k] = walk.load(row + k * COLUMN_WARPS, c, n);
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; ++k)
            if (row + k * COLUMN_WARPS < slab.end) walk.use(loaded[k], row + k * COLUMN_WARPS, c, n, sums);
    }
    if (partials == nullptr) return;
    store_block_sums<WIDTH, VECTORS>(sums, column, r.cols, slab_index, t.slabs, shared, partials);
}

struct Targets {
    Vector first, second;
};
// out[c] = sum over slabs of partials[vector, slab, c]. A block has 32 columns of one vector; its warps share the
// slabs, and have eight loads in flight.
static __global__ void __launch_bounds__(THREADS)
    add_slabs(const float* partials, int64_t slabs, int64_t cols, int64_t tiles, const Targets out) {
    constexpr int WARPS = THREADS / WARP, AT_ONCE = 8;
    __shared__ float shared[WARPS * WARP];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const int64_t vector = blockIdx.x / tiles, c = blockIdx.x % tiles * WARP + lane;
    const float* mine = partials + vector * slabs * cols + c;
    float sum = 0;
    for (int64_t s = warp; s < slabs && c < cols; s += AT_ONCE * WARPS) {
        float loaded[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            loaded[k] = s + k * WARPS < slabs ? fetch(mine + (s + k * WARPS) * cols) : 0.0f;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) sum = sum + loaded[k];
    }
    shared[warp * WARP + lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= cols) return;
    for (int w = 1; w < WARPS; ++w) sum = sum + shared[w * WARP + lane];
    const Vector to = vector == 0 ? out.first : out.second;
    store1(to.dtype, const_cast<char*>(to.at), c, sum);
}
inline void start_add_slabs(const Where& where, const float* partials, int64_t slabs, int64_t cols, int vectors,
                            const Targets& out) {
    const int64_t tiles = (cols + WARP - 1) / WARP;
    launch(where, add_slabs, vectors * tiles, THREADS, partials, slabs, cols, tiles, out);
}

}  // namespace cuda
}  // namespace dsx
