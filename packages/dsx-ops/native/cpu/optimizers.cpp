// One pass over parameter, gradient and states per optimizer; compiled once per instruction set.
//
// A kernel reads sixteen elements of every stream, works in fp32, and writes them back. What is left at the end of a row goes
// through the same code on a padded copy, so an element's result depends neither on its place nor on how the row was
// cut into ranges. The bytes moved are the floor of each algorithm (fp32 Adam: 28 per parameter).
#include "dsx_ops/kernels.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

// The numbers in all lanes. What is switched off multiplies by one, which changes no bit and costs less than asking.
struct H {
    F beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, l2, step_size, inv_denom, grad_mul, damp;
    int32_t flags;
    explicit DSX_INLINE H(const Hyper& h)
        : beta1(splat(h.beta1)), one_minus_beta1(splat(h.one_minus_beta1)), beta2(splat(h.beta2)),
          one_minus_beta2(splat(h.one_minus_beta2)), eps(splat(h.eps)), decay(splat(h.flags & DECOUPLED ? h.decay : 1.0f)), l2(splat(h.l2)),
          step_size(splat(h.step_size)), inv_denom(splat(h.inv_denom)), grad_mul(splat((h.flags & MAXIMIZE ? -1.0f : 1.0f) * (h.flags & UNSCALE ? h.grad_mul : 1.0f))),
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
        move(h, p, m, v);
    }
    static DSX_INLINE void move(const H& h, F& p, F m, F v) {
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

template <class A>
void core(const H& h, float* p, const float* g, float* s0, float* s1, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        F x = load32(p + i), a = s0 ? load32(s0 + i) : splat(0.0f), b = splat(0.0f);
        if (A::STATES > 1) b = load32(s1 + i);
        A::apply(h, x, gradient(h, load32(g + i)), a, b);
        store32(p + i, x);
        if (s0) store32(s0 + i, a);
        if (A::STATES > 1) store32(s1 + i, b);
    }
}

// Without tiles: for the combinations of dtypes that training uses, where the way through the first-level cache and back costs as much as the update.
template <class A, DType P, DType G, DType S>
DSX_INLINE void direct_lanes(const H& h, const Row& row, int64_t e, int64_t count) {
    F p = Parameter<P>::load(row, e, count), g = Padded<G>::load(row.grad, e, count);
    F a = Padded<S>::load(row.state0, e, count), b = A::STATES > 1 ? Padded<S>::load(row.state1, e, count) : splat(0.0f);
    A::apply(h, p, gradient(h, g), a, b);
    Parameter<P>::store(row, e, count, p);
    Padded<S>::store(row.state0, e, count, a);
    if (A::STATES > 1) Padded<S>::store(row.state1, e, count, b);
}
template <class A, DType P, DType G, DType S> void direct(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const H h(step.hyper);
    int64_t e = begin;
    for (; e + LANES <= end; e += LANES) direct_lanes<A, P, G, S>(h, row, e, LANES);
    if (e < end) direct_lanes<A, P, G, S>(h, row, e, end - e);
}

template <class A>
void elementwise(const Step& step, const Row& row, int64_t begin, int64_t end) {
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

// ---- Lamb: two passes, because its trust ratio needs the norm of the whole update -------------------------------------

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

// ---- 8-bit states -----------------------------------------------------------------------------------------------
//
// A code is a small float relative to its block's largest magnitude: 3 mantissa bits, code CODES stands for 1. First
// moments have a sign and 16 octaves below 1, second moments 32. Rounding is stochastic (an EMA that changes by less than half a code
// per step would stand still otherwise), keyed by element index and step: the same on every machine and split. One hash per
// element serves both moments and the parameter.

template <int CODES> struct Code {
    static constexpr uint32_t BASE = 0x3f8u - CODES;         // bits of 1.0f are 0x3f8 << 20
    static constexpr uint32_t SMALLEST = (BASE + 1) << 20;   // bits of what code 1 stands for
    // magnitude <= 1; random: 20 bits. What is below the smallest code comes out negative, or 0 or 1.
    static DSX_INLINE U encode(F magnitude, U random) { return ((bits(magnitude) + random) >> 20) - splatu(BASE); }
    // `code` in the highest bits but one of a magnitude, as decode_first puts it.
    static DSX_INLINE F decode_shifted(U code) {
        return floats(select(equalu(code, splatu(0)), splatu(0), code + splatu(BASE << 20)));
    }
    static DSX_INLINE F decode(U code) { return decode_shifted(code << 20); }
};
typedef Code<127> First;
typedef Code<255> Second;

// Below the smallest code: that code with the probability of the ratio to it, so that nothing is lost on average. `random` is large where
// Code::encode rounds up, and so it is here.
DSX_INLINE U encode_first(F x, F scaled, U random) {
    uint32_t raw = First::SMALLEST;
    float one;
    __builtin_memcpy(&one, &raw, 4);
    const F smallest = splat(one);
    U code = First::encode(scaled, random);
    if (any_less(scaled, smallest))
        code = larger_signed(code, less(smallest, scaled + to_float(random) * splat(one * 9.5367431640625e-7f)) & splatu(1));  // 2^-20
    return code | ((bits(x) >> 24) & splatu(0x80u));
}
// A second moment above zero stays above zero: its root is divided by.
DSX_INLINE U encode_second(F scaled, U random) {
    return larger_signed(Second::encode(scaled, random), less(splat(0.0f), scaled) & splatu(1));
}
// `code`: a signed byte.
DSX_INLINE F decode_first(U code, F scale) {
    return floats(bits(First::decode_shifted((code << 20) & splatu(0x7fu << 20)) * scale) ^ (code & splatu(0x80000000u)));
}

template <bool SIGNED> DSX_INLINE U load_codes(const char* at, int64_t count) {
    char raw[16] = {};
    if (count < LANES) __builtin_memcpy(raw, at, count);
    const char* from = count < LANES ? raw : at;
    return SIGNED ? load8_signed(from) : load8(from);
}
DSX_INLINE void store_codes(char* at, int64_t count, U codes) {
    if (count >= LANES) return store8(at, codes);
    char raw[16];
    store8(raw, codes);
    __builtin_memcpy(at, raw, count);
}

// One block in three short loops. In one long loop the processor could not look ahead far enough to overlap the roots and divisions.
template <DType P, DType G> struct Block8 {
    const Step& step;
    const H& h;
    const Row& row;
    int64_t at, n;
    alignas(64) float m[BLOCK8], v[BLOCK8];
    U noise[BLOCK8 / LANES];

    DSX_INLINE Block8(const Step& step_, const H& h_, const Row& row_, int64_t at_, int64_t end)
        : step(step_), h(h_), row(row_), at(at_), n(end - at_ < BLOCK8 ? end - at_ : BLOCK8) {}

    // New moments, zero beyond the row's end; their largest magnitudes become the scales.
    DSX_INLINE void moments_and_scales() {
        float &kept0 = row.scale0[at / BLOCK8], &kept1 = row.scale1[at / BLOCK8];
        const F scale0 = splat(kept0), scale1 = splat(kept1);
        F top_m = splat(0.0f), top_v = splat(0.0f);
        // Blocks begin at multiples of their size: the low half of an index does not overflow within one.
        const U key = splatu(noise_key(step.hyper.seed, row.offset + at));
        U lanes = lane_numbers() + splatu((uint32_t)(row.offset + at));
        columns(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
            const int64_t e = at + i;
            F g = gradient(h, Padded<G>::load(row.grad, e, count));
            if (h.on(L2)) g = g + h.l2 * Parameter<P>::load(row, e, count);
            F a = decode_first(load_codes<true>(row.state0 + e, count), scale0), b = Second::decode(load_codes<false>(row.state1 + e, count)) * scale1;
            moments(h, g, a, b);
            if (count < LANES) {
                const U there = lane_mask((1u << count) - 1u);
                a = floats(bits(a) & there);
                b = floats(bits(b) & there);
            }
            store32(m + i, a);
            store32(v + i, b);
            noise[i / LANES] = mix(lanes ^ key);
            lanes = lanes + splatu(LANES);
            top_m = larger_magnitude(top_m, absolute(a));
            top_v = larger_magnitude(top_v, b);
        });
        kept0 = largest_magnitude(top_m);
        kept1 = largest_magnitude(top_v);
    }

    // A bf16 parameter without a master is rounded stochastically too, so that updates below half its last bit add up.
    DSX_INLINE void parameters() {
        columns(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
            const int64_t e = at + i;
            F p = Parameter<P>::load(row, e, count);
            Adam::move(h, p, load32(m + i), load32(v + i));
            const U random = noise[i / LANES] & splatu(0xffffu);
            if (P == BF16) store_codes16(row.param + 2 * e, count, select(is_nan(p), splatu(0x7fc0u), (bits(p) + random) >> 16));
            else Parameter<P>::store(row, e, count, p);
            if (step.copy != NONE) store_any(step.copy, row.copy, e, count, p);
        });
    }

    DSX_INLINE void encode() {
        const F inv0 = inverse(row.scale0[at / BLOCK8]), inv1 = inverse(row.scale1[at / BLOCK8]), one = splat(1.0f);
        columns(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
            const U random = noise[i / LANES];
            const F x = load32(m + i);
            // NaN becomes one too: its block has a NaN for a scale.
            const F first = smaller(one, absolute(x) * inv0), second = smaller(one, load32(v + i) * inv1);
            store_codes(row.state0 + at + i, count, encode_first(x, first, random >> 12));
            store_codes(row.state1 + at + i, count, encode_second(second, second_noise(random) >> 12));
        });
    }
};

template <DType P, DType G> void adam8_of(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const H h(step.hyper);
    for (int64_t at = begin; at < end; at += BLOCK8) {
        Block8<P, G> block(step, h, row, at, end);
        block.moments_and_scales();
        block.parameters();
        block.encode();
    }
}

template <DType P> void adam8_by_grad(const Step& step, const Row& row, int64_t begin, int64_t end) {
    if (step.grad == BF16) return adam8_of<P, BF16>(step, row, begin, end);
    if (step.grad == F16) return adam8_of<P, F16>(step, row, begin, end);
    adam8_of<P, F32>(step, row, begin, end);
}
void adam8(const Step& step, const Row& row, int64_t begin, int64_t end) {
    if (step.param == BF16) return adam8_by_grad<BF16>(step, row, begin, end);
    if (step.param == F16) return adam8_by_grad<F16>(step, row, begin, end);
    if (step.param == SPLIT) return adam8_by_grad<SPLIT>(step, row, begin, end);
    adam8_by_grad<F32>(step, row, begin, end);
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

// ---- norm and scale ---------------------------------------------------------------------------------------------------

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
