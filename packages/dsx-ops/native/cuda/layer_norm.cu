// Layer norm over the last dimension, forward (with or without a residual addition) and backward.
//
// Forward: the threads of a row hold it in registers; input and output cross memory once.
//
// Backward: grad and input cross memory once too. Blocks walk over the rows; the threads keep their columns' parts of
// dweight and dbias in registers, 16 columns each, and a second kernel adds the blocks' parts. Up to 512 columns a warp
// has a row, and the loop over rows has no barrier; up to 8192 columns a block has a row, with one barrier per row. (32
// columns per thread need more registers than there are, or leave one block per multiprocessor.) Longer rows leave no
// registers for the sums: dx comes first, and the column sums read grad and input once more.
#include "rows.cuh"

namespace dsx {
namespace cuda {
namespace {

struct Forward {
    const char *x, *residual;
    char* total;
    Vector weight, bias;
    float eps;
    char* y;
    float *mean, *rstd;
};

template <class Team, int HELD, int WIDTH>
__global__ void __launch_bounds__(row_threads<Team>(), row_blocks<Team, HELD>())
    norm_rows(const Rows r, const Forward f, bool whole_rows, bool whole_vectors) {
    __shared__ float scratch[LONG_ROW_THREADS / WARP];
    const DType dtype = narrowed<WIDTH>(r.dtype);
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const auto read = [&](int64_t c, int n, bool first) {
        const bool whole = n == WIDTH && whole_rows;
        if (f.residual != nullptr && !first) return load<WIDTH>(dtype, f.total, base + c, n, whole);
        const Raw<WIDTH> raw = load_raw<WIDTH>(dtype, f.x, base + c, n, whole);
        if (f.residual == nullptr) return decode(dtype, raw);
        const Raw<WIDTH> other = load_raw<WIDTH>(dtype, f.residual, base + c, n, whole);
        Floats<WIDTH> v = decode(dtype, raw);
        const Floats<WIDTH> added = decode(dtype, other);
        for (int k = 0; k < WIDTH; ++k) v.x[k] = v.x[k] + added.x[k];
        const Raw<WIDTH> rounded = encode(dtype, v);
        store_raw(dtype, f.total, base + c, n, whole, rounded);
        return decode(dtype, rounded);
    };
    auto values = row_values<Team, HELD, WIDTH>(read, r.cols);
    float sum = 0;
    values.each([&](int64_t, int, const Floats<WIDTH>& v) {  // what is missing is zero
        for (int k = 0; k < WIDTH; ++k) sum = sum + v.x[k];
    });
    const float mean = Team::all(sum, Sum(), scratch) / (float)r.cols;
    float squares = 0;
    values.each([&](int64_t, int n, const Floats<WIDTH>& v) {
        for (int k = 0; k < WIDTH; ++k) {
            const float centred = v.x[k] - mean;
            if (k < n) squares = squares + centred * centred;
        }
    });
    const float rstd = 1.0f / sqrtf(Team::all(squares, Sum(), scratch) / (float)r.cols + f.eps);
    values.each([&](int64_t c, int n, const Floats<WIDTH>& v) {
        const Floats<WIDTH> w = load<WIDTH>(f.weight.dtype, f.weight.at, c, n, n == WIDTH && whole_vectors);
        const Floats<WIDTH> b = load<WIDTH>(f.bias.dtype, f.bias.at, c, n, n == WIDTH && whole_vectors);
        Floats<WIDTH> out;
        for (int k = 0; k < WIDTH; ++k) out.x[k] = (v.x[k] - mean) * rstd * w.x[k] + b.x[k];
        store(dtype, f.y, base + c, n, n == WIDTH && whole_rows, out);
    });
    if (Team::rank() == 0) {
        put(f.mean + row, mean);
        put(f.rstd + row, rstd);
    }
}

struct Backward {
    const char *grad, *saved;
    const float *mean, *rstd;
    Vector weight, bias;
    const char* extra;
    bool from_output;
    char* dx;
    float* partials;
    bool whole_rows, whole_vectors;
};

// The elements of one group that both passes over a row need.
template <int WIDTH> struct Group {
    Raw<WIDTH> grad, saved;
};
template <int WIDTH>
__device__ __forceinline__ Group<WIDTH> load_group(const Backward& b, DType dtype, int64_t i, int n) {
    const bool whole = n == WIDTH && b.whole_rows;
    return {load_raw<WIDTH>(dtype, b.grad, i, n, whole), load_raw<WIDTH>(dtype, b.saved, i, n, whole)};
}

// grad, the normed input and grad times weight; zero (but for the normed input) where there is no column.
template <int WIDTH> struct Terms {
    Floats<WIDTH> grad, xhat, weighted;
    __device__ __forceinline__ Terms(const Backward& b, DType dtype, const Group<WIDTH>& group, float mean, float rstd,
                                     int64_t c, int n) {
        const bool whole = n == WIDTH && b.whole_vectors;
        const Floats<WIDTH> w = load<WIDTH>(b.weight.dtype, b.weight.at, c, n, whole);
        const Floats<WIDTH> v = decode(dtype, group.saved);
        grad = decode(dtype, group.grad);
        Floats<WIDTH> shift = {};
        if (b.from_output) shift = load<WIDTH>(b.bias.dtype, b.bias.at, c, n, whole);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            if (b.from_output) xhat.x[k] = w.x[k] == 0.0f ? 0.0f : (v.x[k] - shift.x[k]) / w.x[k];
            else xhat.x[k] = (v.x[k] - mean) * rstd;
            weighted.x[k] = grad.x[k] * w.x[k];
        }
    }
    __device__ __forceinline__ void add_to(float& sum, float& product) const {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            sum = sum + weighted.x[k];
            product = product + weighted.x[k] * xhat.x[k];
        }
    }
    // sum and product: over the row, divided by its length.
    __device__ __forceinline__ void store_dx(const Backward& b, DType dtype, float sum, float product, float rstd,
                                             int64_t i, int n) const {
        const bool whole = n == WIDTH && b.whole_rows;
        Floats<WIDTH> out;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) out.x[k] = (weighted.x[k] - sum - xhat.x[k] * product) * rstd;
        if (b.extra != nullptr) {
            const Floats<WIDTH> extra = load<WIDTH>(dtype, b.extra, i, n, whole);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) out.x[k] = out.x[k] + extra.x[k];
        }
        store(dtype, b.dx, i, n, whole, out);
    }
};

constexpr int WALKED = 16;            // columns that a thread has at most
constexpr int WALKING_WARPS = 4;      // of a block whose warps have a row each
constexpr int WALKING_THREADS = 512;  // at most, of a block that has a row
constexpr int64_t WALKED_ROW = WALKED * WALKING_THREADS;
template <bool ROW_PER_WARP> constexpr int walking_threads() {
    return ROW_PER_WARP ? WALKING_WARPS * WARP : WALKING_THREADS;
}

// Thread `rank` of `span` owns the columns WIDTH (k span + rank) on, for k below HELD / WIDTH. ROW_PER_WARP: span is
// 32, and the warps of a block have rows of their own; else the block has one row at a time.
template <int WIDTH, int HELD, bool ROW_PER_WARP>
__global__ void __launch_bounds__(walking_threads<ROW_PER_WARP>(), ROW_PER_WARP ? 4 : 1)
    norm_backward(const Rows r, const Backward b) {
    constexpr int GROUPS = HELD / WIDTH;
    __shared__ float shared[ROW_PER_WARP ? WALKING_WARPS * WARP * WIDTH : 4 * WALKING_THREADS / WARP];
    const DType dtype = narrowed<WIDTH>(r.dtype);
    const int warp = (int)threadIdx.x / WARP;
    const int span = ROW_PER_WARP ? WARP : (int)blockDim.x, rank = (int)threadIdx.x % span;
    const int64_t walkers = ROW_PER_WARP ? (int64_t)gridDim.x * WALKING_WARPS : gridDim.x;
    const int64_t first = ROW_PER_WARP ? (int64_t)blockIdx.x * WALKING_WARPS + warp : blockIdx.x;
    PairOfSums over_the_block{shared};
    Floats<WIDTH> sums[GROUPS][2] = {};  // of dweight and dbias
    for (int64_t row = first; row < r.rows; row += walkers) {
        Group<WIDTH> groups[GROUPS];
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t c = WIDTH * (int64_t)(j * span + rank);
            if (c < r.cols) groups[j] = load_group<WIDTH>(b, dtype, row * r.cols + c, count_of<WIDTH>(r.cols, c));
        }
        const float mean = fetch(b.mean + row), rstd = fetch(b.rstd + row);
        float sum = 0, product = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t c = WIDTH * (int64_t)(j * span + rank);
            if (c >= r.cols) continue;
            const Terms<WIDTH> terms(b, dtype, groups[j], mean, rstd, c, count_of<WIDTH>(r.cols, c));
            terms.add_to(sum, product);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                sums[j][0].x[k] = sums[j][0].x[k] + terms.grad.x[k] * terms.xhat.x[k];
                sums[j][1].x[k] = sums[j][1].x[k] + terms.grad.x[k];
            }
        }
        if constexpr (ROW_PER_WARP) {
            sum = over_warp(sum, Sum());
            product = over_warp(product, Sum());
        } else {
            over_the_block(sum, product);
        }
        sum = sum / (float)r.cols;
        product = product / (float)r.cols;
        forget_loads();
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t c = WIDTH * (int64_t)(j * span + rank);
            if (c >= r.cols) continue;
            const int n = count_of<WIDTH>(r.cols, c);
            const Terms<WIDTH> terms(b, dtype, groups[j], mean, rstd, c, n);
            terms.store_dx(b, dtype, sum, product, rstd, row * r.cols + c, n);
        }
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        if constexpr (ROW_PER_WARP) {
            store_block_sums<WIDTH, 2>(sums[j], j * WARP * WIDTH, r.cols, blockIdx.x, gridDim.x, shared, b.partials);
        } else {
            const int64_t c = WIDTH * (int64_t)(j * span + rank);
            char* out = reinterpret_cast<char*>(b.partials);
            const bool whole = r.cols % 4 == 0 && c + WIDTH <= r.cols;
            const int n = count_of<WIDTH>(r.cols, c);
            store(F32, out, blockIdx.x * r.cols + c, n, whole, sums[j][0]);
            store(F32, out, ((int64_t)gridDim.x + blockIdx.x) * r.cols + c, n, whole, sums[j][1]);
        }
    }
}

// dx of rows that are too long for norm_backward: read twice, the second time out of the cache.
template <int WIDTH>
__global__ void __launch_bounds__(LONG_ROW_THREADS) norm_backward_long(const Rows r, const Backward b) {
    __shared__ float scratch[LONG_ROW_THREADS / WARP];
    const DType dtype = narrowed<WIDTH>(r.dtype);
    const int64_t row = blockIdx.x, base = row * r.cols;
    const float mean = fetch(b.mean + row), rstd = fetch(b.rstd + row);
    const auto read = [&](int64_t c, int n, bool) { return load_group<WIDTH>(b, dtype, base + c, n); };
    auto values = row_values<BlockTeam, 0, WIDTH>(read, r.cols);
    float sum = 0, product = 0;
    values.each([&](int64_t c, int n, const Group<WIDTH>& group) {
        Terms<WIDTH>(b, dtype, group, mean, rstd, c, n).add_to(sum, product);
    });
    sum = over_block(sum, Sum(), scratch) / (float)r.cols;
    product = over_block(product, Sum(), scratch) / (float)r.cols;
    values.each([&](int64_t c, int n, const Group<WIDTH>& group) {
        Terms<WIDTH>(b, dtype, group, mean, rstd, c, n).store_dx(b, dtype, sum, product, rstd, base + c, n);
    });
}

// dweight and dbias of these rows.
template <int WIDTH> struct NormColumns {
    typedef Group<WIDTH> Loaded;
    const Rows& r;
    const Backward& b;
    DType dtype;
    __device__ __forceinline__ Loaded load(int64_t row, int64_t c, int n) const {
        return load_group<WIDTH>(b, dtype, row * r.cols + c, n);
    }
    __device__ __forceinline__ void use(const Loaded& group, int64_t row, int64_t c, int n, Floats<WIDTH>* sums) const {
        const Terms<WIDTH> terms(b, dtype, group, fetch(b.mean + row), fetch(b.rstd + row), c, n);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            sums[0].x[k] = sums[0].x[k] + terms.grad.x[k] * terms.xhat.x[k];
            sums[1].x[k] = sums[1].x[k] + terms.grad.x[k];
        }
    }
};
template <int WIDTH>
__global__ void __launch_bounds__(COLUMN_THREADS) norm_columns(const Rows r, const Backward b, const Tiling tiling) {
    const NormColumns<WIDTH> walk{r, b, narrowed<WIDTH>(r.dtype)};
    column_sums<WIDTH, 2>(r, tiling, walk, b.partials);
}

// f(elements held, a row per warp, threads): for rows that norm_backward takes.
template <class F> void for_walked_rows(int64_t cols, F f) {
    constexpr int few = WALKING_WARPS * WARP;
    if (cols <= FEW * WARP) f(Holding<FEW>(), std::true_type(), few);
    else if (cols <= WALKED * WARP) f(Holding<WALKED>(), std::true_type(), few);
    else f(Holding<WALKED>(), std::false_type(), threads_for(cols, WALKED, WALKING_THREADS));
}
// Blocks of norm_backward: 65536 threads, about what the largest GPUs hold of them at once. Each block leaves two
// partial sums per column.
int64_t walking_blocks(const Rows& r) {
    int64_t found = 0;
    for_walked_rows(r.cols, [&](auto, auto row_per_warp, int threads) {
        const int64_t rows_each = row_per_warp ? WALKING_WARPS : 1, most = 65536 / threads;
        found = (r.rows + rows_each - 1) / rows_each;
        found = found < 1 ? 1 : found < most ? found : most;
    });
    return found;
}

template <int WIDTH> void start_backward(const Where& where, const Rows& r, const Backward& b) {
    if (r.cols <= WALKED_ROW) {
        for_walked_rows(r.cols, [&](auto held, auto row_per_warp, int threads) {
            launch(where, norm_backward<WIDTH, decltype(held)::value, decltype(row_per_warp)::value>, walking_blocks(r),
                   threads, r, b);
        });
        return;
    }
    launch(where, norm_backward_long<WIDTH>, r.rows, LONG_ROW_THREADS, r, b);
    const Tiling tiling = tiling_of(r);
    launch(where, norm_columns<WIDTH>, tiling.tiles * tiling.slabs, COLUMN_THREADS, r, b, tiling);
}

}  // namespace

int64_t norm_slabs(const Rows& r) { return r.cols <= WALKED_ROW ? walking_blocks(r) : tiling_of(r).slabs; }

void layer_norm(const Where& where, const Rows& r, const char* x, const char* residual, char* total, Vector weight,
                Vector bias, float eps, char* y, float* mean, float* rstd) {
    OnDevice on(where);
    const Forward f{x, residual, total, weight, bias, eps, y, mean, rstd};
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const bool rows = whole_rows<WIDTH>(r, {x, y, residual, total});
        const bool vectors = whole_vector<WIDTH>(weight) && whole_vector<WIDTH>(bias);
        for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks, int threads) {
            launch(where, norm_rows<decltype(team), decltype(held)::value, WIDTH>, blocks, threads, r, f, rows,
                   vectors);
        });
    });
}

void layer_norm_backward(const Where& where, const Rows& r, const char* grad, const char* saved, const float* mean,
                         const float* rstd, Vector weight, Vector bias, const char* extra, bool from_output, char* dx,
                         char* dweight, char* dbias, float* partials) {
    OnDevice on(where);
    Backward b{grad, saved, mean, rstd, weight, bias, extra, from_output, dx, partials, false, false};
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        b.whole_rows = whole_rows<WIDTH>(r, {grad, saved, dx, extra});
        b.whole_vectors = whole_vector<WIDTH>(weight) && whole_vector<WIDTH>(bias);
        start_backward<WIDTH>(where, r, b);
    });
    const Targets out{{dweight, weight.dtype}, {dbias, bias.dtype}};
    start_add_slabs(where, partials, norm_slabs(r), r.cols, 2, out);
}

}  // namespace cuda
}  // namespace dsx
