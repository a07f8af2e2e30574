// softmax(scale x + mask) over the last dimension, and its backward. A warp (long rows: a block) holds its row in registers.
#include "rows.cuh"

namespace dsx {
namespace cuda {
namespace {

// Where the mask's row for this row of scores begins.
__device__ __forceinline__ int64_t mask_row(const MaskView& m, int64_t row) {
    int64_t at = 0;
    for (int d = MASK_DIMS - 1; d >= 0; --d) {
        if (m.sizes[d] == 1) continue;
        at += row % m.sizes[d] * m.strides[d];
        row /= m.sizes[d];
    }
    return at;
}

template <class Team, bool HELD>
__global__ void __launch_bounds__(THREADS) softmax_rows(const Rows r, const char* x, const MaskView mask, float scale, char* y, bool whole_rows) {
    __shared__ float scratch[THREADS / WARP];
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const int64_t mask_base = mask.kind == NO_MASK ? 0 : mask_row(mask, row);
    const auto scores = [&](int64_t c, int n) {
        Float4 v = load4(r.dtype, x, base + c, n, n == 4 && whole_rows);
        for (int k = 0; k < 4; ++k) {
            v.x[k] = v.x[k] * scale;
            if (mask.kind == NO_MASK || k >= n) continue;
            const int64_t at = mask_base + (c + k) * mask.column_stride;
            if (mask.kind == ADDED) v.x[k] = v.x[k] + load1(mask.dtype, mask.at, at);
            else if (mask.at[at] == 0) v.x[k] = -INFINITY;
        }
        return v;
    };
    auto values = row_values<Team, HELD>(scores, r.cols);
    float top = -INFINITY;
    values.each([&](int64_t, int n, const Float4& v) {
        for (int k = 0; k < 4; ++k)
            if (k < n) top = Largest()(top, v.x[k]);
    });
    top = Team::all(top, Largest(), scratch);
    if (top == -INFINITY) top = 0.0f;  // nothing takes part: every weight is zero
    float total = 0;
    values.each([&](int64_t, int n, Float4& v) {
        for (int k = 0; k < 4; ++k) {
            v.x[k] = expf(v.x[k] - top);  // kept, when the row is held
            if (k < n) total = total + v.x[k];
        }
    });
    total = Team::all(total, Sum(), scratch);
    if (total == 0.0f) total = 1.0f;
    values.each([&](int64_t c, int n, const Float4& v) {
        Float4 out;
        for (int k = 0; k < 4; ++k) out.x[k] = (HELD ? v.x[k] : expf(v.x[k] - top)) / total;
        store4(r.dtype, y, base + c, n, n == 4 && whole_rows, out);
    });
}

template <class Team, bool HELD>
__global__ void __launch_bounds__(THREADS) softmax_rows_backward(const Rows r, const char* grad, const char* y, float scale, char* dx, bool whole_rows) {
    __shared__ float scratch[THREADS / WARP];
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const auto gradients = [&](int64_t c, int n) { return load4(r.dtype, grad, base + c, n, n == 4 && whole_rows); };
    const auto weights = [&](int64_t c, int n) { return load4(r.dtype, y, base + c, n, n == 4 && whole_rows); };
    auto g = row_values<Team, HELD>(gradients, r.cols);
    float dot = 0;
    g.each([&](int64_t c, int n, const Float4& v) {
        const Float4 w = weights(c, n);
        for (int k = 0; k < 4; ++k) dot = dot + v.x[k] * w.x[k];  // what is missing is zero
    });
    dot = Team::all(dot, Sum(), scratch);
    g.each([&](int64_t c, int n, const Float4& v) {
        const Float4 w = weights(c, n);
        Float4 out;
        for (int k = 0; k < 4; ++k) out.x[k] = scale * w.x[k] * (v.x[k] - dot);
        store4(r.dtype, dx, base + c, n, n == 4 && whole_rows, out);
    });
}

}  // namespace

void masked_softmax(const Where& where, const Rows& r, const char* x, const MaskView& mask, float scale, char* y) {
    OnDevice on(where);
    const bool whole = whole_rows(r, {x, y});
    for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks) {
        launch(where, softmax_rows<decltype(team), decltype(held)::value>, blocks, THREADS, r, x, mask, scale, y, whole);
    });
}

void softmax_backward(const Where& where, const Rows& r, const char* grad, const char* y, float scale, char* dx) {
    OnDevice on(where);
    const bool whole = whole_rows(r, {grad, y, dx});
    for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks) {
        launch(where, softmax_rows_backward<decltype(team), decltype(held)::value>, blocks, THREADS, r, grad, y, scale, dx, whole);
    });
}

}  // namespace cuda
}  // namespace dsx
