// Bias + GELU and residual + dropout(x + bias), forward and backward: elementwise, with the sums over rows that a bias needs.
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

__device__ __forceinline__ int64_t column_of(int64_t element, int64_t cols) {
    if (element <= 0x7fffffff) return (uint32_t)element % (uint32_t)cols;  // 64-bit division is slow
    return element % cols;
}
// Four elements of a vector along the columns; they may begin again at column 0.
__device__ __forceinline__ Float4 along(const Vector& v, int64_t column, int64_t cols, int n) {
    Float4 f = {};
    for (int k = 0; k < 4; ++k) {
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
    __device__ __forceinline__ float operator()(float u, int64_t element, float residual) const { return residual + dropped(drop, u, element); }
};

// y = op(x + bias, element, residual), four elements per thread.
template <class Op>
__global__ void __launch_bounds__(THREADS) forward(const Rows r, const Op op, const Vector bias, const char* residual, char* y, bool whole_words) {
    const int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x), numel = r.rows * r.cols;
    if (i >= numel) return;
    const int n = left_in(numel, i);
    const bool whole = n == 4 && whole_words;
    Float4 v = load4(r.dtype, op.x, i, n, whole);
    const bool add = Op::RESIDUAL && residual != nullptr;
    Float4 other = {};
    if (add) other = load4(r.dtype, residual, i, n, whole);
    if (bias.at != nullptr) {
        const Float4 b = along(bias, column_of(i, r.cols), r.cols, n);
        for (int k = 0; k < 4; ++k) v.x[k] = v.x[k] + b.x[k];
    }
    // Without a residual nothing is added, so that -0 stays -0.
    for (int k = 0; k < 4; ++k) v.x[k] = add ? op(v.x[k], i + k, other.x[k]) : op(v.x[k], i + k, -0.0f);
    store4(r.dtype, y, i, n, whole, v);
}

struct GeluBackward {
    const char* x;
    Vector bias;
    bool tanh_form;
    __device__ __forceinline__ Float4 operator()(const Rows& r, const Float4& g, int64_t element, int64_t column, int n, bool whole) const {
        Float4 u = load4(r.dtype, x, element, n, whole), out;
        if (bias.at != nullptr) {
            const Float4 b = along(bias, column, r.cols, n);
            for (int k = 0; k < 4; ++k) u.x[k] = u.x[k] + b.x[k];
        }
        for (int k = 0; k < 4; ++k) out.x[k] = g.x[k] * gelu_slope(u.x[k], tanh_form);
        return out;
    }
};
struct DropBackward {
    Drop drop;
    __device__ __forceinline__ Float4 operator()(const Rows&, const Float4& g, int64_t element, int64_t, int, bool) const {
        Float4 out;
        for (int k = 0; k < 4; ++k) out.x[k] = dropped(drop, g.x[k], element + k);
        return out;
    }
};

constexpr int COLUMN_THREADS = 128;
constexpr int64_t TILE = 4 * COLUMN_THREADS;  // columns of a block

// dx = op(grad), and per slab of rows the sums of dx down the columns. A thread has four columns and walks down the rows.
template <class Op>
__global__ void __launch_bounds__(COLUMN_THREADS)
    backward(const Rows r, const Op op, const char* grad, char* dx, float* partials, int64_t slabs, int64_t tiles, bool whole_rows) {
    const int64_t slab_index = blockIdx.x / tiles, c = blockIdx.x % tiles * TILE + 4 * threadIdx.x;
    if (c >= r.cols) return;
    const int n = left_in(r.cols, c);
    const bool whole = n == 4 && whole_rows;
    const Slab slab = slab_of(slab_index, slabs, r.rows);
    Float4 sum = {};
    for (int64_t row = slab.begin; row < slab.end; ++row) {
        const int64_t i = row * r.cols + c;
        const Float4 out = op(r, load4(r.dtype, grad, i, n, whole), i, c, n, whole);
        store4(r.dtype, dx, i, n, whole, out);
        for (int k = 0; k < 4; ++k) sum.x[k] = sum.x[k] + out.x[k];
    }
    if (partials != nullptr) store4(F32, reinterpret_cast<char*>(partials), slab_index * r.cols + c, n, false, sum);
}

template <class Op> void start_forward(const Where& where, const Rows& r, const Op& op, const Vector& bias, const char* residual, char* y) {
    const int width = r.dtype == F32 ? 16 : 8;
    const bool whole = fits(op.x, width) && fits(residual, width) && fits(y, width);
    const int64_t per_block = 4 * THREADS;
    launch(where, forward<Op>, (r.rows * r.cols + per_block - 1) / per_block, THREADS, r, op, bias, residual, y, whole);
}

template <class Op>
void start_backward(const Where& where, const Rows& r, const Op& op, const char* grad, const void* other, char* dx, Vector dbias, float* partials) {
    const int64_t slabs = slabs_of(r.rows), tiles = (r.cols + TILE - 1) / TILE;
    float* sums = dbias.at == nullptr ? nullptr : partials;
    launch(where, backward<Op>, slabs * tiles, COLUMN_THREADS, r, op, grad, dx, sums, slabs, tiles, whole_rows(r, {grad, other, dx}));
    if (sums != nullptr) start_add_slabs(where, partials, r, const_cast<char*>(dbias.at), dbias.dtype);
}

}  // namespace

void bias_gelu(const Where& where, const Rows& r, const char* x, Vector bias, bool tanh, char* y) {
    OnDevice on(where);
    start_forward(where, r, GeluForward{x, tanh}, bias, nullptr, y);
}

void bias_gelu_backward(const Where& where, const Rows& r, const char* grad, const char* x, Vector bias, bool tanh, char* dx, char* dbias,
                        float* partials) {
    OnDevice on(where);
    start_backward(where, r, GeluBackward{x, bias, tanh}, grad, x, dx, Vector{dbias, bias.dtype}, partials);
}

void dropout(const Where& where, const Rows& r, const char* x, Vector bias, const char* residual, const Drop& drop, char* y) {
    OnDevice on(where);
    start_forward(where, r, DropForward{x, drop}, bias, residual, y);
}

void bias_grad(const Where& where, const Rows& r, const char* grad, const Drop& drop, char* dx, Vector dbias, float* partials) {
    OnDevice on(where);
    start_backward(where, r, DropBackward{drop}, grad, nullptr, dx, dbias, partials);
}

}  // namespace cuda
}  // namespace dsx
