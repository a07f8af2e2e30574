// Bias + GELU and residual + dropout(x + bias), forward and backward: elementwise, with the sums over rows that a bias
// needs.
//
// Every element crosses memory once. Backward walks down the columns of a tile (column_sums in rows.cuh), so that the
// bias's gradient costs no further pass; without a bias the same walk sums nothing.
#include "rows.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr float GELU_A = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float GELU_B = 0.044715f;
constexpr float ROOT_HALF = 0.7071067811865476f, DENSITY = 0.3989422804014327f;  // sqrt(1/2), 1 / sqrt(2 pi)

__device__ __forceinline__ float gelu(float u, bool tanh_form) {
    const float inner = tanh_form ? tanhf(GELU_A * (u + GELU_B * u * u * u)) : erff(u * ROOT_HALF);
    return 0.5f * u * (1.0f + inner);
}
__device__ __forceinline__ float gelu_slope(float u, bool tanh_form) {
    if (!tanh_form) return 0.5f * (1.0f + erff(u * ROOT_HALF)) + u * (expf(-0.5f * u * u) * DENSITY);
    const float t = tanhf(GELU_A * (u + GELU_B * u * u * u));
    return 0.5f * (1.0f + t) + 0.5f * u * (1.0f - t * t) * GELU_A * (1.0f + 3.0f * GELU_B * u * u);
}

__device__ __forceinline__ float dropped(const Drop& d, float value, int64_t element) {
    if (!d.active) return value;
    return Noise(d.seed, d.offset + element).first >> 8 >= d.threshold ? value * d.scale : 0.0f;
}

// WIDTH elements of a vector along the columns; they may begin again at column 0. `whole`: they do not, and are
// aligned.
template <int WIDTH>
__device__ __forceinline__ Floats<WIDTH> along(const Vector& v, int64_t column, int64_t cols, int n, bool whole) {
    if (whole) return load<WIDTH>(v.dtype, v.at, column, n, true);
    Floats<WIDTH> f = {};
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        if (k >= n) continue;
        f.x[k] = load1(v.dtype, v.at, column);
        if (++column == cols) column = 0;
    }
    return f;
}

struct GeluForward {
    const char* x;
    bool tanh_form;
    static constexpr bool RESIDUAL = false;
    __device__ __forceinline__ float operator()(float u, int64_t, float) const { return gelu(u, tanh_form); }
};
struct DropForward {
    const char* x;
    Drop drop;
    static constexpr bool RESIDUAL = true;
    __device__ __forceinline__ float operator()(float u, int64_t element, float residual) const {
        return residual + dropped(drop, u, element);
    }
};

struct Shape {
    DType dtype;
    int64_t numel;
    Divisor cols;
    bool whole, whole_bias;
};
constexpr int FORWARD_THREADS = 256;

// y = op(x + bias, element, residual), 16 bytes of each stream per thread.
template <int WIDTH, class Op>
__global__ void __launch_bounds__(FORWARD_THREADS)
    forward(const Shape s, const Op op, const Vector bias, const char* residual, char* y) {
    const DType dtype = narrowed<WIDTH>(s.dtype);
    const int64_t i = WIDTH * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= s.numel) return;
    const int n = count_of<WIDTH>(s.numel, i);
    const bool whole = n == WIDTH && s.whole, add = Op::RESIDUAL && residual != nullptr;
    const Raw<WIDTH> raw = load_raw<WIDTH>(dtype, op.x, i, n, whole);
    Raw<WIDTH> other = {};
    if (add) other = load_raw<WIDTH>(dtype, residual, i, n, whole);
    Floats<WIDTH> v = decode(dtype, raw);
    const Floats<WIDTH> added = decode(dtype, other);
    if (bias.at != nullptr) {
        const int64_t column = i - s.cols.quotient(i) * s.cols.by;
        const Floats<WIDTH> b = along<WIDTH>(bias, column, s.cols.by, n, s.whole_bias);
        for (int k = 0; k < WIDTH; ++k) v.x[k] = v.x[k] + b.x[k];
    }
    // Without a residual nothing is added, so that -0 stays -0.
    for (int k = 0; k < WIDTH; ++k) v.x[k] = op(v.x[k], i + k, add ? added.x[k] : -0.0f);
    store(dtype, y, i, n, whole, v);
}

struct Streams {
    const Rows r;
    const char* grad;
    char* dx;
    bool whole_rows, whole_bias;
};

// What backward does with the gradient of WIDTH elements; `other` is what else it reads of them.
template <int WIDTH> struct GeluBackward {
    const char* x;
    Vector bias;
    bool tanh_form;
    __device__ __forceinline__ Raw<WIDTH> load_other(DType dtype, int64_t i, int n, bool whole) const {
        return load_raw<WIDTH>(dtype, x, i, n, whole);
    }
    __device__ __forceinline__ void apply(const Streams& s, DType dtype, Floats<WIDTH>& g, const Raw<WIDTH>& other,
                                          int64_t, int64_t c, int n) const {
        Floats<WIDTH> u = decode(dtype, other);
        if (bias.at != nullptr) {
            const Floats<WIDTH> b = load<WIDTH>(bias.dtype, bias.at, c, n, n == WIDTH && s.whole_bias);
            for (int k = 0; k < WIDTH; ++k) u.x[k] = u.x[k] + b.x[k];
        }
        for (int k = 0; k < WIDTH; ++k) g.x[k] = g.x[k] * gelu_slope(u.x[k], tanh_form);
    }
};
template <int WIDTH> struct DropBackward {
    Drop drop;
    __device__ __forceinline__ Raw<WIDTH> load_other(DType, int64_t, int, bool) const { return {}; }
    __device__ __forceinline__ void apply(const Streams&, DType, Floats<WIDTH>& g, const Raw<WIDTH>&, int64_t i,
                                          int64_t, int) const {
        for (int k = 0; k < WIDTH; ++k) g.x[k] = dropped(drop, g.x[k], i + k);
    }
};

// A walk of column_sums: dx = op(grad), which is summed down the columns.
template <int WIDTH, class Op> struct GradientWalk {
    struct Loaded {
        Raw<WIDTH> grad, other;
    };
    const Streams& s;
    const Op& op;
    DType dtype;
    __device__ __forceinline__ Loaded load(int64_t row, int64_t c, int n) const {
        const int64_t i = row * s.r.cols + c;
        const bool whole = n == WIDTH && s.whole_rows;
        return {load_raw<WIDTH>(dtype, s.grad, i, n, whole), op.load_other(dtype, i, n, whole)};
    }
    __device__ __forceinline__ void use(const Loaded& loaded, int64_t row, int64_t c, int n,
                                        Floats<WIDTH>* sums) const {
        const int64_t i = row * s.r.cols + c;
        Floats<WIDTH> g = decode(dtype, loaded.grad);
        op.apply(s, dtype, g, loaded.other, i, c, n);
        store(dtype, s.dx, i, n, n == WIDTH && s.whole_rows, g);
        for (int k = 0; k < WIDTH; ++k) sums[0].x[k] = sums[0].x[k] + g.x[k];
    }
};
template <int WIDTH, class Op>
__global__ void __launch_bounds__(COLUMN_THREADS, WIDTH == 4 ? 4 : 3)
    backward(const Streams s, const Op op, const Tiling tiling, float* partials) {
    const GradientWalk<WIDTH, Op> walk{s, op, narrowed<WIDTH>(s.r.dtype)};
    column_sums<WIDTH, 1>(s.r, tiling, walk, partials);
}

template <class Op>
void start_forward(const Where& where, const Rows& r, const Op& op, const Vector& bias, const char* residual, char* y) {
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const bool whole =
            fits_words<WIDTH>(op.x, r.dtype) && fits_words<WIDTH>(residual, r.dtype) && fits_words<WIDTH>(y, r.dtype);
        const bool whole_bias = r.cols % WIDTH == 0 && whole_vector<WIDTH>(bias);
        const int64_t numel = r.rows * r.cols, per_block = WIDTH * FORWARD_THREADS;
        const Shape s{r.dtype, numel, Divisor(r.cols), whole, whole_bias};
        launch(where, forward<WIDTH, Op>, (numel + per_block - 1) / per_block, FORWARD_THREADS, s, op, bias, residual,
               y);
    });
}

template <int WIDTH, class Op>
void start_backward(const Where& where, const Streams& s, const Op& op, Vector dbias, float* partials) {
    const Tiling tiling = tiling_of(s.r);
    float* sums = dbias.at == nullptr ? nullptr : partials;
    launch(where, backward<WIDTH, Op>, tiling.tiles * tiling.slabs, COLUMN_THREADS, s, op, tiling, sums);
    if (sums != nullptr) start_add_slabs(where, partials, tiling.slabs, s.r.cols, 1, Targets{dbias, {}});
}

}  // namespace

int64_t column_slabs(const Rows& r) { return tiling_of(r).slabs; }

void bias_gelu(const Where& where, const Rows& r, const char* x, Vector bias, bool tanh, char* y) {
    OnDevice on(where);
    start_forward(where, r, GeluForward{x, tanh}, bias, nullptr, y);
}

void bias_gelu_backward(const Where& where, const Rows& r, const char* grad, const char* x, Vector bias, bool tanh,
                        char* dx, char* dbias, float* partials) {
    OnDevice on(where);
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const Streams s{r, grad, dx, whole_rows<WIDTH>(r, {grad, x, dx}), whole_vector<WIDTH>(bias)};
        start_backward<WIDTH>(where, s, GeluBackward<WIDTH>{x, bias, tanh}, Vector{dbias, bias.dtype}, partials);
    });
}

void dropout(const Where& where, const Rows& r, const char* x, Vector bias, const char* residual, const Drop& drop,
             char* y) {
    OnDevice on(where);
    start_forward(where, r, DropForward{x, drop}, bias, residual, y);
}

void bias_grad(const Where& where, const Rows& r, const char* grad, const Drop& drop, char* dx, Vector dbias,
               float* partials) {
    OnDevice on(where);
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const Streams s{r, grad, dx, whole_rows<WIDTH>(r, {grad, dx}), false};
        start_backward<WIDTH>(where, s, DropBackward<WIDTH>{drop}, dbias, partials);
    });
}

}  // namespace cuda
}  // namespace dsx
