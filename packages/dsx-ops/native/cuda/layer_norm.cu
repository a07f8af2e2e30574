// Layer norm over the last dimension, forward (with or without a residual addition) and backward.
//
// Forward: a warp (long rows: a block) holds its row in registers. Backward: a block walks over a slab of rows; its threads keep their
// columns' sums of dweight and dbias in registers, so grad and input are read once.
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

template <class Team, bool HELD> __global__ void __launch_bounds__(THREADS) norm_rows(const Rows r, const Forward f, bool whole_rows, bool whole_vectors) {
    __shared__ float scratch[THREADS / WARP];
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const auto load = [&](int64_t c, int n) {
        const bool whole = n == 4 && whole_rows;
        Float4 v = load4(r.dtype, f.x, base + c, n, whole);
        if (f.residual == nullptr) return v;
        const Float4 other = load4(r.dtype, f.residual, base + c, n, whole);
        for (int k = 0; k < 4; ++k) v.x[k] = v.x[k] + other.x[k];
        const Raw rounded = encode(r.dtype, v);
        store_raw(r.dtype, f.total, base + c, n, whole, rounded);
        return decode(r.dtype, rounded);
    };
    auto values = row_values<Team, HELD>(load, r.cols);
    float sum = 0;
    values.each([&](int64_t, int, const Float4& v) {  // what is missing is zero
        for (int k = 0; k < 4; ++k) sum = sum + v.x[k];
    });
    const float mean = Team::all(sum, Sum(), scratch) / (float)r.cols;
    float squares = 0;
    values.each([&](int64_t, int n, const Float4& v) {
        for (int k = 0; k < 4; ++k) {
            const float centred = v.x[k] - mean;
            if (k < n) squares = squares + centred * centred;
        }
    });
    const float rstd = 1.0f / sqrtf(Team::all(squares, Sum(), scratch) / (float)r.cols + f.eps);
    values.each([&](int64_t c, int n, const Float4& v) {
        const Float4 w = load4(f.weight.dtype, f.weight.at, c, n, n == 4 && whole_vectors);
        const Float4 b = load4(f.bias.dtype, f.bias.at, c, n, n == 4 && whole_vectors);
        Float4 out;
        for (int k = 0; k < 4; ++k) out.x[k] = (v.x[k] - mean) * rstd * w.x[k] + b.x[k];
        store4(r.dtype, f.y, base + c, n, n == 4 && whole_rows, out);
    });
    if (Team::rank() == 0) {
        f.mean[row] = mean;
        f.rstd[row] = rstd;
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
};

// Threads own columns: group k of thread t is columns 4 (k blockDim + t) on.
template <int GROUPS> __global__ void __launch_bounds__(THREADS) norm_backward(const Rows r, const Backward b, int64_t slabs, bool whole_rows) {
    __shared__ float scratch[THREADS / WARP];
    Float4 dweight[GROUPS] = {}, dbias[GROUPS] = {};
    const Slab slab = slab_of(blockIdx.x, slabs, r.rows);
    for (int64_t row = slab.begin; row < slab.end; ++row) {
        const float mean = b.mean[row], rstd = b.rstd[row];
        Float4 xhat[GROUPS], gw[GROUPS];
        float sum = 0, product = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t c = 4 * ((int64_t)j * blockDim.x + threadIdx.x);
            if (c >= r.cols) continue;
            const int n = left_in(r.cols, c);
            const bool whole = n == 4 && whole_rows;
            const Float4 g = load4(r.dtype, b.grad, row * r.cols + c, n, whole), v = load4(r.dtype, b.saved, row * r.cols + c, n, whole);
            const Float4 w = load4(b.weight.dtype, b.weight.at, c, n, false), shift = load4(b.bias.dtype, b.bias.at, c, n, false);
            for (int k = 0; k < 4; ++k) {
                const float x = b.from_output ? (w.x[k] == 0.0f ? 0.0f : (v.x[k] - shift.x[k]) / w.x[k]) : (v.x[k] - mean) * rstd;
                xhat[j].x[k] = x;
                gw[j].x[k] = g.x[k] * w.x[k];  // zero where there is no column
                sum = sum + gw[j].x[k];
                product = product + gw[j].x[k] * x;
                dweight[j].x[k] = dweight[j].x[k] + g.x[k] * x;
                dbias[j].x[k] = dbias[j].x[k] + g.x[k];
            }
        }
        sum = over_block(sum, Sum(), scratch) / (float)r.cols;
        product = over_block(product, Sum(), scratch) / (float)r.cols;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t c = 4 * ((int64_t)j * blockDim.x + threadIdx.x);
            if (c >= r.cols) continue;
            const int n = left_in(r.cols, c);
            const bool whole = n == 4 && whole_rows;
            Float4 out;
            for (int k = 0; k < 4; ++k) out.x[k] = (gw[j].x[k] - sum - xhat[j].x[k] * product) * rstd;
            if (b.extra != nullptr) {
                const Float4 extra = load4(r.dtype, b.extra, row * r.cols + c, n, whole);
                for (int k = 0; k < 4; ++k) out.x[k] = out.x[k] + extra.x[k];
            }
            store4(r.dtype, b.dx, row * r.cols + c, n, whole, out);
        }
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        const int64_t c = 4 * ((int64_t)j * blockDim.x + threadIdx.x);
        if (c >= r.cols) continue;
        const int n = left_in(r.cols, c);
        char* out = reinterpret_cast<char*>(b.partials);
        store4(F32, out, blockIdx.x * r.cols + c, n, false, dweight[j]);
        store4(F32, out, (slabs + blockIdx.x) * r.cols + c, n, false, dbias[j]);
    }
}

}  // namespace

void layer_norm(const Where& where, const Rows& r, const char* x, const char* residual, char* total, Vector weight, Vector bias, float eps,
                char* y, float* mean, float* rstd) {
    OnDevice on(where);
    const Forward f{x, residual, total, weight, bias, eps, y, mean, rstd};
    const bool rows = whole_rows(r, {x, y, residual, total}), vectors = whole_vector(weight) && whole_vector(bias);
    for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks) {
        launch(where, norm_rows<decltype(team), decltype(held)::value>, blocks, THREADS, r, f, rows, vectors);
    });
}

void layer_norm_backward(const Where& where, const Rows& r, const char* grad, const char* saved, const float* mean, const float* rstd,
                         Vector weight, Vector bias, const char* extra, bool from_output, char* dx, char* dweight, char* dbias, float* partials) {
    OnDevice on(where);
    if (r.cols > MAX_COLUMNS) throw std::runtime_error("layer norm's backward takes rows of at most 16384 columns");
    const Backward b{grad, saved, mean, rstd, weight, bias, extra, from_output, dx, partials};
    const int64_t slabs = slabs_of(r.rows), groups = (r.cols + 4 * THREADS - 1) / (4 * THREADS);
    const int fitting = (int)(((r.cols + 3) / 4 + WARP - 1) / WARP * WARP), threads = fitting < THREADS ? fitting : THREADS;
    const bool whole = whole_rows(r, {grad, saved, dx, extra});
    const auto start = [&](auto kernel) { launch(where, kernel, slabs, threads, r, b, slabs, whole); };
    if (groups <= 1) start(norm_backward<1>);
    else if (groups <= 2) start(norm_backward<2>);
    else if (groups <= 4) start(norm_backward<4>);
    else start(norm_backward<8>);
    start_add_slabs(where, partials, r, dweight, weight.dtype);
    start_add_slabs(where, partials + slabs * r.cols, r, dbias, bias.dtype);
}

}  // namespace cuda
}  // namespace dsx
