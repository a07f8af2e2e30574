// One pass over parameter, gradient and states per optimizer; compiled once per instruction set.
//
// A kernel reads sixteen elements of every stream, works in fp32, and writes them back. What is left at the end of a
// row goes through the same code on a padded copy, so an element's result depends neither on its place nor on how the
// row was cut into ranges. The bytes moved are the floor of each algorithm (fp32 Adam: 28 per parameter).
#include "dsx_ops/kernels.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {

void adam8(const Step& step, const Row& row, int64_t begin, int64_t end);  // adam8.cpp

namespace {

// The numbers in all lanes. What is switched off multiplies by one, which changes no bit and costs less than asking.
struct H {
    F beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, l2, step_size, inv_denom, grad_mul, damp;
    int32_t flags;
    explicit DSX_INLINE H(const Hyper& h)
        : beta1(splat(h.beta1)), one_minus_beta1(splat(h.one_minus_beta1)), beta2(splat(h.beta2)),
          one_minus_beta2(splat(h.one_minus_beta2)), eps(splat(h.eps)),
          decay(splat(h.flags & DECOUPLED ? h.decay : 1.0f)), l2(splat(h.l2)), step_size(splat(h.step_size)),
          inv_denom(splat(h.inv_denom)),
          grad_mul(splat((h.flags & MAXIMIZE ? -1.0f : 1.0f) * (h.flags & UNSCALE ? h.grad_mul : 1.0f))),
          damp(splat(h.damp)), flags(h.flags) {}
    bool DSX_INLINE on(Flag f) const { return flags & f; }
};

DSX_INLINE F gradient(const H& h, F g) { return g * h.grad_mul; }

DSX_INLINE void moments(const H& h, F g, F& m, F& v) {
    m = h.beta1 * m + h.one_minus_beta1 * g;
    v = h.beta2 * v + (h.one_minus_beta2 * g) * g;
}

struct Adam {
    static constexpr int STATES = 2;
    static DSX_INLINE void apply(const H& h, F& p, F g, F& m, F& v) {
        if (h.on(L2)) g = g + h.l2 * p;
        moments(h, g, m, v);
        p = p * h.decay;
        p = p - h.step_size * (m / (root(v) * h.inv_denom + h.eps));
    }
};

// Adam's traffic without its arithmetic: the ceiling that the bench compares with.
struct Touch {
    static constexpr int STATES = 2;
    static DSX_INLINE void apply(const H&, F& p, F g, F& m, F& v) {
        p = p + g;
        m = m + g;
        v = v + g;
    }
};

struct Adagrad {
    static constexpr int STATES = 1;
    static DSX_INLINE void apply(const H& h, F& p, F g, F& sum, F&) {
        if (h.on(L2)) g = g + h.l2 * p;
        sum = sum + g * g;
        p = p - h.step_size * (g / (root(sum) + h.eps));
    }
};

struct Lion {
    static constexpr int STATES = 1;
    static DSX_INLINE void apply(const H& h, F& p, F g, F& m, F&) {
        F c = h.beta1 * m + h.one_minus_beta1 * g;
        U one = bits(splat(1.0f));
        F sign = floats((less(splat(0.0f), c) & one) | (less(c, splat(0.0f)) & (one | splatu(0x80000000u))));
        p = p * h.decay;
        p = p - h.step_size * sign;
        m = h.beta2 * m + h.one_minus_beta2 * g;
    }
};

struct Sgd {
    static constexpr int STATES = 1;
    static DSX_INLINE void apply(const H& h, F& p, F g, F& buffer, F&) {
        if (h.on(L2)) g = g + h.l2 * p;
        if (h.on(MOMENTUM)) {
            buffer = h.beta1 * buffer + h.damp * g;
            g = h.on(NESTEROV) ? g + h.beta2 * buffer : buffer;
        }
        p = p - h.step_size * g;
    }
};

template <class A> void core(const H& h, float* p, const float* g, float* s0, float* s1, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        F x = load32(p + i), a = s0 ? load32(s0 + i) : splat(0.0f), b = splat(0.0f);
        if (A::STATES > 1) b = load32(s1 + i);
        A::apply(h, x, gradient(h, load32(g + i)), a, b);
        store32(p + i, x);
        if (s0) store32(s0 + i, a);
        if (A::STATES > 1) store32(s1 + i, b);
    }
}

// Without tiles: for the combinations of dtypes that training uses, where the way through the first-level cache and
// back costs as much as the update.
template <class A, DType P, DType G, DType S>
DSX_INLINE void direct_lanes(const H& h, const Row& row, int64_t e, int64_t count) {
    F p = Parameter<P>::load(row, e, count), g = Padded<G>::load(row.grad, e, count);
    F a = Padded<S>::load(row.state0, e, count),
      b = A::STATES > 1 ? Padded<S>::load(row.state1, e, count) : splat(0.0f);
    A::apply(h, p, gradient(h, g), a, b);
    Parameter<P>::store(row, e, count, p);
    Padded<S>::store(row.state0, e, count, a);
    if (A::STATES > 1) Padded<S>::store(row.state1, e, count, b);
}
template <class A, DType P, DType G, DType S>
void direct(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const H h(step.hyper);
    int64_t e = begin;
    for (; e + LANES <= end; e += LANES) direct_lanes<A, P, G, S>(h, row, e, LANES);
    if (e < end) direct_lanes<A, P, G, S>(h, row, e, end - e);
}

template <class A> void elementwise(const Step& step, const Row& row, int64_t begin, int64_t end) {
    if (step.grad == BF16 && step.copy == NONE && row.state0) {
        if (step.param == BF16 && step.state == F32) return direct<A, BF16, BF16, F32>(step, row, begin, end);
        if (step.param == BF16 && step.state == BF16) return direct<A, BF16, BF16, BF16>(step, row, begin, end);
        if (step.param == SPLIT && step.state == F32) return direct<A, SPLIT, BF16, F32>(step, row, begin, end);
    }
    const H h(step.hyper);
    Stream p, g, s0, s1;
    for (int64_t at = begin; at < end; at += TILE) {
        int64_t n = end - at < TILE ? end - at : TILE;
        p.open(step.param, row.param, row.low_bits, at, n);
        g.open(step.grad, row.grad, nullptr, at, n);
        if (row.state0) s0.open(step.state, row.state0, nullptr, at, n);
        if (A::STATES > 1) s1.open(step.state, row.state1, nullptr, at, n);
        core<A>(h, p.at, g.at, row.state0 ? s0.at : nullptr, s1.at, (n + LANES - 1) / LANES * LANES);
        p.close(step.param, row.param, row.low_bits, at, n);
        if (row.state0) s0.close(step.state, row.state0, nullptr, at, n);
        if (A::STATES > 1) s1.close(step.state, row.state1, nullptr, at, n);
        write_copy(step.copy, p.at, row.copy, at, n);
    }
    if (step.copy != NONE) fence();
}

// ---- Lamb: two passes, because its trust ratio needs the norm of the whole update -------------------

DSX_INLINE F lamb_direction(const H& h, F p, F m, F v) {
    F u = m / (h.on(EPS_INSIDE) ? root(v + h.eps) : root(v) + h.eps);
    return h.on(L2) ? u + h.l2 * p : u;
}

// Phase 1: moments, and the squared norms of parameter and direction. The parameter stays as it is.
void lamb_update(const Step& step, const Row& row, int64_t begin, int64_t end, double* partial) {
    const H h(step.hyper);
    D p_sum = zero_sums(), u_sum = zero_sums();
    Stream p, g, m, v;
    alignas(64) float direction[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        int64_t n = end - at < TILE ? end - at : TILE;
        p.open(step.param, row.param, row.low_bits, at, n);
        g.open(step.grad, row.grad, nullptr, at, n);
        m.open(step.state, row.state0, nullptr, at, n);
        v.open(step.state, row.state1, nullptr, at, n);
        for (int64_t i = 0; i < n; i += LANES) {
            F a = load32(m.at + i), b = load32(v.at + i), x = load32(p.at + i);
            moments(h, gradient(h, load32(g.at + i)), a, b);
            store32(m.at + i, a);
            store32(v.at + i, b);
            store32(direction + i, lamb_direction(h, x, a, b));
        }
        m.close(step.state, row.state0, nullptr, at, n);
        v.close(step.state, row.state1, nullptr, at, n);
        for (int64_t k = n; k % LANES; ++k) direction[k] = 0;  // padding is 0/0 when eps is 0
        for (int64_t i = 0; i < n; i += LANES) {
            add_squares(p_sum, load32(p.at + i));
            add_squares(u_sum, load32(direction + i));
        }
    }
    partial[0] = total(p_sum);
    partial[1] = total(u_sum);
}

// Phase 2: the direction again from the moments just written, times the row's coefficient.
void lamb_apply(const Step& step, const Row& row, F coefficient, int64_t begin, int64_t end) {
    const H h(step.hyper);
    Stream p, m, v;
    for (int64_t at = begin; at < end; at += TILE) {
        int64_t n = end - at < TILE ? end - at : TILE;
        p.open(step.param, row.param, row.low_bits, at, n);
        m.open(step.state, row.state0, nullptr, at, n);
        v.open(step.state, row.state1, nullptr, at, n);
        for (int64_t i = 0; i < n; i += LANES) {
            F x = load32(p.at + i);
            store32(p.at + i, x - coefficient * lamb_direction(h, x, load32(m.at + i), load32(v.at + i)));
        }
        p.close(step.param, row.param, row.low_bits, at, n);
        write_copy(step.copy, p.at, row.copy, at, n);
    }
    if (step.copy != NONE) fence();
}

void run_step(const Step& step, const Row& row, int64_t index, int64_t begin, int64_t end) {
    switch (step.algorithm) {
        case ADAM: return elementwise<Adam>(step, row, begin, end);
        case ADAGRAD: return elementwise<Adagrad>(step, row, begin, end);
        case LION: return elementwise<Lion>(step, row, begin, end);
        case TOUCH: return elementwise<Touch>(step, row, begin, end);
        case SGD: return elementwise<Sgd>(step, row, begin, end);
        case ADAM8: return adam8(step, row, begin, end);
        case LAMB_APPLY: return lamb_apply(step, row, splat(step.coefficients[index]), begin, end);
        case LAMB_UPDATE:
            for (int64_t at = begin; at < end; at += CHUNK) {
                double* partial = step.partials + 2 * (step.partial_start[index] + at / CHUNK);
                lamb_update(step, row, at, end - at < CHUNK ? end : at + CHUNK, partial);
            }
    }
}

// ---- norm and scale ---------------------------------------------------------------------------------

template <DType T> void squares_of(const char* data, int64_t begin, int64_t end, double* partials) {
    for (int64_t at = begin; at < end; at += CHUNK) {
        int64_t stop = at + CHUNK < end ? at + CHUNK : end, i = at;
        D sum = zero_sums();
        for (; i + LANES <= stop; i += LANES) add_squares(sum, Access<T>::load(data, i));
        if (i < stop) {
            alignas(64) char padded[64] = {};
            __builtin_memcpy(padded, data + i * Access<T>::SIZE, (stop - i) * Access<T>::SIZE);
            add_squares(sum, Access<T>::load(padded, 0));
        }
        partials[at / CHUNK] = total(sum);
    }
}

void squares(DType dtype, const char* data, int64_t begin, int64_t end, double* partials) {
    if (dtype == BF16) return squares_of<BF16>(data, begin, end, partials);
    if (dtype == F16) return squares_of<F16>(data, begin, end, partials);
    squares_of<F32>(data, begin, end, partials);
}

void scale(DType dtype, char* data, int64_t begin, int64_t end, float factor) {
    char* at = data + begin * size_of(dtype);
    if (dtype == BF16) return map<BF16, BF16>(at, at, end - begin, splat(factor), true);
    if (dtype == F16) return map<F16, F16>(at, at, end - begin, splat(factor), true);
    map<F32, F32>(at, at, end - begin, splat(factor), true);
}

void convert(DType from, const char* in, DType to, char* out, int64_t begin, int64_t end) {
    convert_n(from, in + begin * size_of(from), to, out + begin * size_of(to), end - begin);
}

#define DSX_STRING2(x) #x
#define DSX_STRING(x) DSX_STRING2(x)

}  // namespace

extern const Kernels table;
const Kernels table = {DSX_STRING(DSX_ISA), run_step, squares, scale, convert};

}  // namespace DSX_ISA
}  // namespace dsx
