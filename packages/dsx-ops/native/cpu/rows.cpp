// Layer norm and softmax, a row at a time, and functions of x + bias; compiled once per instruction set.
//
// A row is read from memory once: the passes after the first find it in cache. Sums go over four sets of sixteen lanes
// and are then folded, in the same order everywhere; sums over rows go over blocks of rows that the caller cuts the
// same way for any thread count.
#include "dsx_ops/kernels.h"
#include "dsx_ops/math.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr int64_t UNROLL = 4 * LANES;

// f(set, column, count) for all columns, four sets of lanes in turn; count is how many of the sixteen are there. Sums
// kept per set do not wait for each other, and the sets are constants to the compiler, so that they stay in registers.
template <class Body> DSX_INLINE void columns_in_sets(int64_t cols, const Body& f) {
    int64_t c = 0;
    for (; c + UNROLL <= cols; c += UNROLL)
        for (int k = 0; k < 4; ++k) f(k, c + k * LANES, LANES);
    for (int k = 0; c < cols; c += LANES, ++k) f(k, c, cols - c);
}
struct Sums {
    F set[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    DSX_INLINE void add(int k, F a) { set[k] = set[k] + a; }
    DSX_INLINE float total() const { return sum_lanes((set[0] + set[1]) + (set[2] + set[3])); }
};

// Sum over columns of f(column, count).
template <class Body> DSX_INLINE float row_sum(int64_t cols, const Body& f) {
    Sums sums;
    columns_in_sets(cols,
                    [&](int k, int64_t c, int64_t count) __attribute__((always_inline)) { sums.add(k, f(c, count)); });
    return sums.total();
}

#define DSX_LAMBDA __attribute__((always_inline))

// All ones in the lanes below count.
DSX_INLINE U present(int64_t count) { return lane_mask(count >= LANES ? 0xffffu : (1u << count) - 1u); }

template <DType T> DSX_INLINE void put(char* base, int64_t i, int64_t count, F a, bool stream) {
    if (stream) Padded<T>::stream(base, i, count, a);
    else Padded<T>::store(base, i, count, a);
}
// Asks for sixteen elements of the next row, in a loop that reads nothing from memory: else memory would rest
// meanwhile. Beyond the last row this is a hint that leads nowhere.
template <DType T> DSX_INLINE void ask_for_next(const char* row, int64_t cols, int64_t i) {
    __builtin_prefetch(row + (cols + i) * Access<T>::SIZE);
}
DSX_INLINE bool on_line(const char* at) { return ((uintptr_t)at & 63) == 0; }

// ---- layer norm -------------------------------------------------------------------------------------

template <DType T> void layer_norm_of(const NormRows& n, int64_t begin, int64_t end) {
    const int64_t cols = n.cols;
    const float share = 1.0f / (float)cols;
    for (int64_t row = begin; row < end; ++row) {
        const char* x = n.x + row * cols * Access<T>::SIZE;
        char* y = n.y + row * cols * Access<T>::SIZE;
        if (n.residual) {
            char* total = n.total + row * cols * Access<T>::SIZE;
            const char* r = n.residual + row * cols * Access<T>::SIZE;
            columns(cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
                Padded<T>::store(total, c, count, Padded<T>::load(x, c, count) + Padded<T>::load(r, c, count));
            });
            x = total;
        }
        const float mean =
            row_sum(cols, [&](int64_t c, int64_t count) DSX_LAMBDA { return Padded<T>::load(x, c, count); }) * share;
        const F centre = splat(mean);
        const float variance = row_sum(cols,
                                       [&](int64_t c, int64_t count) DSX_LAMBDA {
                                           F d = Padded<T>::load(x, c, count) - centre;
                                           if (count < LANES) d = floats(bits(d) & present(count));
                                           return d * d;
                                       }) *
                               share;
        const float rstd = 1.0f / __builtin_sqrtf(variance + n.eps);
        const F scale = splat(rstd);
        const bool stream = n.stream && on_line(y);
        columns(cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
            F xhat = (Padded<T>::load(x, c, count) - centre) * scale;
            put<T>(y, c, count,
                   xhat * Padded<F32>::load((const char*)n.weight, c, count) +
                       Padded<F32>::load((const char*)n.bias, c, count),
                   stream);
        });
        n.mean[row] = mean;
        n.rstd[row] = rstd;
    }
    if (n.stream) fence();
}

template <DType T, bool INVERSE, bool EXTRA>
void layer_norm_back_as(const NormBackRows& n, int64_t begin, int64_t end, float* dweight, float* dbias) {
    const int64_t cols = n.cols;
    const float share = 1.0f / (float)cols;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * cols * Access<T>::SIZE;
        const char *grad = n.grad + at, *saved = n.saved + at;
        const F rstd = splat(n.rstd[row]), mean = splat(n.mean[row]);
        auto xhat_at = [&](int64_t c, int64_t count) DSX_LAMBDA {
            F s = Padded<T>::load(saved, c, count);
            if (!INVERSE) return (s - mean) * rstd;
            return (s - Padded<F32>::load((const char*)n.bias, c, count)) *
                   Padded<F32>::load((const char*)n.inverse, c, count);
        };
        Sums first, second;
        columns_in_sets(cols, [&](int k, int64_t c, int64_t count) DSX_LAMBDA {
            F g = Padded<T>::load(grad, c, count), xhat = xhat_at(c, count);
            F gw = g * Padded<F32>::load((const char*)n.weight, c, count);  // zero beyond the row's end
            first.add(k, gw);
            second.add(k, gw * (count < LANES ? floats(bits(xhat) & present(count)) : xhat));
            Padded<F32>::store((char*)dweight, c, count, Padded<F32>::load((const char*)dweight, c, count) + g * xhat);
            Padded<F32>::store((char*)dbias, c, count, Padded<F32>::load((const char*)dbias, c, count) + g);
        });
        const F a = splat(first.total() * share), b = splat(second.total() * share);
        char* dx = n.dx + at;
        const bool stream = n.stream && on_line(dx);
        columns(cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
            F gw = Padded<T>::load(grad, c, count) * Padded<F32>::load((const char*)n.weight, c, count);
            F d = ((gw - a) - xhat_at(c, count) * b) * rstd;
            if (EXTRA) d = d + Padded<T>::load(n.extra + at, c, count);
            ask_for_next<T>(grad, cols, c);
            ask_for_next<T>(saved, cols, c);
            put<T>(dx, c, count, d, stream);
        });
    }
    if (n.stream) fence();
}
template <DType T>
void layer_norm_back_of(const NormBackRows& n, int64_t begin, int64_t end, float* dweight, float* dbias) {
    if (n.inverse)
        return n.extra ? layer_norm_back_as<T, true, true>(n, begin, end, dweight, dbias)
                       : layer_norm_back_as<T, true, false>(n, begin, end, dweight, dbias);
    return n.extra ? layer_norm_back_as<T, false, true>(n, begin, end, dweight, dbias)
                   : layer_norm_back_as<T, false, false>(n, begin, end, dweight, dbias);
}

// ---- softmax ----------------------------------------------------------------------------------------

constexpr uint32_t LOWEST = 0xff800000u;  // -inf

DSX_INLINE U hidden(const char* mask, int64_t i, int64_t count) {
    char raw[16] = {};
    __builtin_memcpy(raw, mask + i, count < LANES ? count : LANES);
    return equalu(load8(raw), splatu(0));
}

struct Mask {
    MaskKind kind;
    const char* at;
    F one;           // an added mask that does not change along the row
    bool hides_row;  // a boolean mask that does not change along the row

    // A boolean mask replaces scores instead of adding to them: what lies in a hidden position may be NaN or infinite.
    template <MaskKind KIND> DSX_INLINE F masked(F score, int64_t c, int64_t count) const {
        switch (KIND) {
            case MASK_F32: return score + Padded<F32>::load(at, c, count);
            case MASK_BF16: return score + Padded<BF16>::load(at, c, count);
            case MASK_F16: return score + Padded<F16>::load(at, c, count);
            case MASK_BOOL: return select(hidden(at, c, count), floats(splatu(LOWEST)), score);
            default: return score + one;
        }
    }
    DSX_INLINE F first() const {
        const F zero = splat(0.0f);
        switch (kind) {
            case MASK_F32: return masked<MASK_F32>(zero, 0, 1);
            case MASK_BF16: return masked<MASK_BF16>(zero, 0, 1);
            default: return masked<MASK_F16>(zero, 0, 1);
        }
    }
    DSX_INLINE Mask(const SoftmaxRows& s, int64_t row)
        : kind(s.mask_kind), at(s.mask), one(splat(0.0f)), hides_row(false) {
        if (kind == MASK_NONE) return;
        at += s.mask_start[row] * (kind == MASK_F32 ? 4 : kind == MASK_BOOL ? 1 : 2);
        if (s.column_step) return;
        if (kind == MASK_BOOL) {
            hides_row = *at == 0;
        } else {
            const F lanes = first();
            float value;
            __builtin_memcpy(&value, &lanes, 4);
            one = splat(value);
        }
        kind = MASK_NONE;
    }
};

// The row's scores into scratch; returns the largest.
template <DType T, MaskKind KIND>
DSX_INLINE F scores_with(const SoftmaxRows& s, const Mask& mask, const char* x, float* scratch) {
    const F scale = splat(s.scale), lowest = floats(splatu(LOWEST));
    F top = lowest;
    columns(s.cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
        F score = mask.masked<KIND>(Padded<T>::load(x, c, count) * scale, c, count);
        if (count < LANES) score = select(present(count), score, lowest);
        top = larger(top, score);  // a NaN shows in the sum
        store32(scratch + c, score);
    });
    return splat(largest(top));
}
template <DType T> DSX_INLINE F row_scores(const SoftmaxRows& s, const Mask& mask, const char* x, float* scratch) {
    switch (mask.kind) {
        case MASK_F32: return scores_with<T, MASK_F32>(s, mask, x, scratch);
        case MASK_BF16: return scores_with<T, MASK_BF16>(s, mask, x, scratch);
        case MASK_F16: return scores_with<T, MASK_F16>(s, mask, x, scratch);
        case MASK_BOOL: return scores_with<T, MASK_BOOL>(s, mask, x, scratch);
        default: return scores_with<T, MASK_NONE>(s, mask, x, scratch);
    }
}

template <DType T> void softmax_of(const SoftmaxRows& s, int64_t begin, int64_t end, float* scratch) {
    const int64_t padded = (s.cols + LANES - 1) / LANES * LANES;
    for (int64_t row = begin; row < end; ++row) {
        const char* x = s.x + row * s.cols * Access<T>::SIZE;
        char* out = s.out + row * s.cols * Access<T>::SIZE;
        const Mask mask(s, row);
        if (mask.hides_row) {
            __builtin_memset(out, 0, (size_t)(s.cols * Access<T>::SIZE));
            continue;
        }
        F top = row_scores<T>(s, mask, x, scratch);
        const U none = equalu(bits(top), splatu(LOWEST));
        top = select(none, splat(0.0f), top);
        const float total = row_sum(padded, [&](int64_t c, int64_t) DSX_LAMBDA {
            ask_for_next<T>(x, s.cols, c);
            F w = exponential(load32(scratch + c) - top);
            store32(scratch + c, w);
            return w;
        });
        const F share = splat(total == 0.0f ? 0.0f : 1.0f / total);
        const bool stream = s.stream && on_line(out);
        columns(s.cols, [&](int64_t c, int64_t count)
                            DSX_LAMBDA { put<T>(out, c, count, load32(scratch + c) * share, stream); });
    }
    if (s.stream) fence();
}

template <DType T> void softmax_back_of(const SoftmaxRows& s, int64_t begin, int64_t end) {
    const F scale = splat(s.scale);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * s.cols * Access<T>::SIZE;
        const char *y = s.x + at, *grad = s.grad + at;
        const F dot = splat(row_sum(s.cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
            return Padded<T>::load(grad, c, count) * Padded<T>::load(y, c, count);
        }));
        char* out = s.out + at;
        const bool stream = s.stream && on_line(out);
        columns(s.cols, [&](int64_t c, int64_t count) DSX_LAMBDA {
            put<T>(out, c, count, (scale * Padded<T>::load(y, c, count)) * (Padded<T>::load(grad, c, count) - dot),
                   stream);
        });
    }
    if (s.stream) fence();
}

// ---- functions of x + bias --------------------------------------------------------------------------

constexpr float GELU_A = 0.7978845608f, GELU_B = 0.044715f;

// 1 / (1 + exp(-2 z)) with z of the tanh form, so that GELU(u) = u times it; |u| <= FAR, where it is 0 or 1 to 1e-38.
constexpr float FAR = 10.0f;
DSX_INLINE F tanh_gate(F u) {
    F z = u * multiply_add(splat(-2.0f * GELU_A * GELU_B), u * u, splat(-2.0f * GELU_A));
    return inverse_of(splat(1.0f) + exponential(z));
}
// (1 + erf(u / sqrt 2)) / 2; density receives exp(-u^2 / 2).
DSX_INLINE F erf_gate(F u, F& density) {
    density = exponential(splat(-0.5f) * (u * u));
    F c = half_complement(u, density);
    return select(less(u, splat(0.0f)), c, splat(1.0f) - c);
}

template <BiasForm FORM> DSX_INLINE F function(const BiasRows& b, F u, F other, int64_t index) {
    if (FORM == GELU_TANH || FORM == GELU_TANH_BACK) {
        u = larger(u, splat(-FAR));
        const F near = smaller(u, splat(FAR)), s = tanh_gate(near);
        if (FORM == GELU_TANH) return u * s;
        F slope = s + ((near * s) * (splat(1.0f) - s)) *
                          (splat(2.0f * GELU_A) * (splat(1.0f) + splat(3.0f * GELU_B) * (near * near)));
        return other * slope;
    }
    F density;
    if (FORM == GELU_ERF) return u * erf_gate(u, density);
    if (FORM == GELU_ERF_BACK) {
        F gate = erf_gate(u, density);
        return other * (gate + (u * density) * splat(0.3989422804f));
    }
    U dropped = lessu(Noise(b.seed, b.offset + index).first >> 8, splatu(b.threshold));
    F kept = floats(bits(u * splat(b.keep_scale)) & (dropped ^ splatu(~0u)));
    return FORM == DROPOUT_RESIDUAL ? other + kept : kept;
}

template <BiasForm FORM, DType T> void bias_function_of(const BiasRows& b, int64_t begin, int64_t end, float* sums) {
    constexpr bool two = FORM == GELU_TANH_BACK || FORM == GELU_ERF_BACK || FORM == DROPOUT_RESIDUAL;
    for (int64_t at = begin; at < end;) {
        const int64_t col = at % b.cols, left = b.cols - col, n = end - at < left ? end - at : left;
        const bool stream = b.stream && on_line(b.out + at * Access<T>::SIZE);
        columns(n, [&](int64_t i, int64_t count) DSX_LAMBDA {
            F u = Padded<T>::load(b.x, at + i, count), other = splat(0.0f);
            if (b.bias) u = u + Padded<F32>::load((const char*)b.bias, col + i, count);
            if (two) other = Padded<T>::load(b.other, at + i, count);
            F out = function<FORM>(b, u, other, at + i);
            put<T>(b.out, at + i, count, out, stream);
            if (sums)
                Padded<F32>::store((char*)sums, col + i, count,
                                   Padded<F32>::load((const char*)sums, col + i, count) + out);
        });
        at += n;
    }
    if (b.stream) fence();
}

template <BiasForm FORM> void bias_function_any(const BiasRows& b, int64_t begin, int64_t end, float* sums) {
    if (b.dtype == BF16) return bias_function_of<FORM, BF16>(b, begin, end, sums);
    if (b.dtype == F16) return bias_function_of<FORM, F16>(b, begin, end, sums);
    bias_function_of<FORM, F32>(b, begin, end, sums);
}

void bias_function(const BiasRows& b, int64_t begin, int64_t end, float* sums) {
    switch (b.form) {
        case GELU_TANH: return bias_function_any<GELU_TANH>(b, begin, end, sums);
        case GELU_ERF: return bias_function_any<GELU_ERF>(b, begin, end, sums);
        case GELU_TANH_BACK: return bias_function_any<GELU_TANH_BACK>(b, begin, end, sums);
        case GELU_ERF_BACK: return bias_function_any<GELU_ERF_BACK>(b, begin, end, sums);
        case DROPOUT: return bias_function_any<DROPOUT>(b, begin, end, sums);
        case DROPOUT_RESIDUAL: return bias_function_any<DROPOUT_RESIDUAL>(b, begin, end, sums);
    }
}

// ---- dtypes -----------------------------------------------------------------------------------------

void layer_norm(const NormRows& n, int64_t begin, int64_t end) {
    if (n.dtype == BF16) return layer_norm_of<BF16>(n, begin, end);
    if (n.dtype == F16) return layer_norm_of<F16>(n, begin, end);
    layer_norm_of<F32>(n, begin, end);
}
void layer_norm_backward(const NormBackRows& n, int64_t begin, int64_t end, float* dweight, float* dbias) {
    if (n.dtype == BF16) return layer_norm_back_of<BF16>(n, begin, end, dweight, dbias);
    if (n.dtype == F16) return layer_norm_back_of<F16>(n, begin, end, dweight, dbias);
    layer_norm_back_of<F32>(n, begin, end, dweight, dbias);
}
void softmax(const SoftmaxRows& s, int64_t begin, int64_t end, float* scratch) {
    if (s.dtype == BF16) return softmax_of<BF16>(s, begin, end, scratch);
    if (s.dtype == F16) return softmax_of<F16>(s, begin, end, scratch);
    softmax_of<F32>(s, begin, end, scratch);
}
void softmax_backward(const SoftmaxRows& s, int64_t begin, int64_t end) {
    if (s.dtype == BF16) return softmax_back_of<BF16>(s, begin, end);
    if (s.dtype == F16) return softmax_back_of<F16>(s, begin, end);
    softmax_back_of<F32>(s, begin, end);
}

void add_rows(const float* parts, int64_t rows, int64_t cols, float* out, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += LANES) {
        F sum = splat(0.0f);
        for (int64_t r = 0; r < rows; ++r) sum = sum + Padded<F32>::load((const char*)(parts + r * cols), c, end - c);
        Padded<F32>::store((char*)out, c, end - c, sum);
    }
}

}  // namespace

extern const RowKernels row_table;
const RowKernels row_table = {layer_norm, layer_norm_backward, softmax, softmax_backward, bias_function, add_rows};

}  // namespace DSX_ISA
}  // namespace dsx
