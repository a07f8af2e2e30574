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

struct H {
    F beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, l2, step_size, inv_denom, grad_mul, damp;
    int32_t flags;
    explicit DSX_INLINE H(const Hyper& h)
        : beta1(splat(h.beta1)), one_minus_beta1(splat(h.one_minus_beta1)), beta2(splat(h.beta2)),
          one_minus_beta2(splat(h.one_minus_beta2)), eps(splat(h.eps)), decay(splat(h.decay)), l2(splat(h.l2)),
          step_size(splat(h.step_size)), inv_denom(splat(h.inv_denom)), grad_mul(splat(h.grad_mul)),
          damp(splat(h.damp)), flags(h.flags) {}
    bool DSX_INLINE on(Flag f) const { return flags & f; }
};

DSX_INLINE F gradient(const H& h, F g) {
    if (h.on(UNSCALE)) g = g * h.grad_mul;
    if (h.on(MAXIMIZE)) g = floats(bits(g) ^ splatu(0x80000000u));
    return g;
}

DSX_INLINE void moments(const H& h, F g, F& m, F& v) {
    m = h.beta1 * m + h.one_minus_beta1 * g;
    v = h.beta2 * v + (h.one_minus_beta2 * g) * g;
}

struct Adam {
    static constexpr int STATES = 2;
    static DSX_INLINE void apply(const H& h, F& p, F g, F& m, F& v) {
        if (h.on(L2)) g = g + h.l2 * p;
        moments(h, g, m, v);
        if (h.on(DECOUPLED)) p = p * h.decay;
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
        if (h.on(DECOUPLED)) p = p * h.decay;
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

template <class A>
void elementwise(const Step& step, const Row& row, int64_t begin, int64_t end) {
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
// per step would stand still otherwise), keyed by element index and step: the same on every machine and split.

template <int CODES> struct Code {
    static constexpr uint32_t BASE = 0x3f8u - CODES;         // bits of 1.0f are 0x3f8 << 20
    static constexpr uint32_t SMALLEST = (BASE + 1) << 20;
    // magnitude <= 1; random: 20 bits
    static DSX_INLINE U encode(F magnitude, U random) {
        U b = bits(magnitude);
        U code = ((b + random) >> 20) - splatu(BASE);
        code = select(lessu(splatu(CODES), code), splatu(CODES), code);
        F threshold = to_float(random) * splat(9.5367431640625e-7f);  // 2^-20
        float smallest;
        uint32_t raw = SMALLEST;
        __builtin_memcpy(&smallest, &raw, 4);
        U below = less(threshold * splat(smallest), magnitude) & splatu(1);
        return select(lessu(b, splatu(SMALLEST)), below, code);
    }
    static DSX_INLINE F decode(U code) {
        U value = (code + splatu(BASE)) << 20;
        return floats(value & (equalu(code, splatu(0)) ^ splatu(~0u)));
    }
};
typedef Code<127> First;
typedef Code<255> Second;

DSX_INLINE F decode_first(U code, F scale) {
    U sign = (code & splatu(0x80u)) << 24;
    return floats(bits(First::decode(code & splatu(0x7fu)) * scale) ^ sign);
}

// A bf16 parameter without a master is rounded stochastically too, so that updates below half its last bit add up.
DSX_INLINE void store_rounded(const float* p, char* out, int64_t n, uint32_t seed, int64_t index) {
    for (int64_t i = 0; i < n; i += LANES) {
        Noise noise(seed, index + i);
        F x = load32(p + i);
        U random = ((noise.first & splatu(0xfffu)) << 4) | (noise.second & splatu(0xfu));
        U rounded = select(is_nan(x), splatu(0x7fc0u), (bits(x) + random) >> 16);
        if (i + LANES <= n) {
            store16(out + 2 * i, rounded);
        } else {
            char last[32];
            store16(last, rounded);
            __builtin_memcpy(out + 2 * i, last, 2 * (n - i));
        }
    }
}

void decode_block(const char* codes0, const char* codes1, float* m, float* v, F scale0, F scale1, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store32(m + i, decode_first(load8(codes0 + i), scale0));
        store32(v + i, Second::decode(load8(codes1 + i)) * scale1);
    }
    if (i < n) {
        char c0[16] = {}, c1[16] = {};
        __builtin_memcpy(c0, codes0 + i, n - i);
        __builtin_memcpy(c1, codes1 + i, n - i);
        store32(m + i, decode_first(load8(c0), scale0));
        store32(v + i, Second::decode(load8(c1)) * scale1);
    }
}

void encode_block(const float* m, const float* v, const Row& row, int64_t at, int64_t n, uint32_t seed) {
    F top_m = splat(0.0f), top_v = splat(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {  // the padding is zero
        top_m = larger_magnitude(top_m, absolute(load32(m + i)));
        top_v = larger_magnitude(top_v, load32(v + i));
    }
    const float scale0 = largest_magnitude(top_m), scale1 = largest_magnitude(top_v);
    row.scale0[at / BLOCK8] = scale0;
    row.scale1[at / BLOCK8] = scale1;
    const F inv0 = inverse(scale0), inv1 = inverse(scale1), one = splat(1.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        Noise noise(seed, row.offset + at + i);
        F x = load32(m + i), first = absolute(x) * inv0, second = load32(v + i) * inv1;
        first = smaller(first, one);
        second = smaller(second, one);
        U code0 = First::encode(first, noise.first >> 12) | ((bits(x) >> 24) & splatu(0x80u));
        U code1 = Second::encode(second, noise.second >> 12);
        // A second moment above zero stays above zero: its root is divided by.
        code1 = code1 | (equalu(code1, splatu(0)) & less(splat(0.0f), second) & splatu(1));
        if (i + LANES <= n) {
            store8(row.state0 + at + i, code0);
            store8(row.state1 + at + i, code1);
            continue;
        }
        char c0[16], c1[16];
        store8(c0, code0);
        store8(c1, code1);
        __builtin_memcpy(row.state0 + at + i, c0, n - i);
        __builtin_memcpy(row.state1 + at + i, c1, n - i);
    }
}

void adam8(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const H h(step.hyper);
    Stream p, g;
    alignas(64) float m[BLOCK8], v[BLOCK8];
    for (int64_t at = begin; at < end; at += BLOCK8) {
        int64_t n = end - at < BLOCK8 ? end - at : BLOCK8, block = at / BLOCK8;
        p.open(step.param, row.param, row.low_bits, at, n);
        g.open(step.grad, row.grad, nullptr, at, n);
        decode_block(row.state0 + at, row.state1 + at, m, v, splat(row.scale0[block]), splat(row.scale1[block]), n);
        core<Adam>(h, p.at, g.at, m, v, (n + LANES - 1) / LANES * LANES);
        for (int64_t k = n; k % LANES; ++k) m[k] = v[k] = 0;
        encode_block(m, v, row, at, n, step.hyper.seed);
        if (step.param == BF16) store_rounded(p.at, row.param + 2 * at, n, step.hyper.seed, row.offset + at);
        else p.close(step.param, row.param, row.low_bits, at, n);
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
