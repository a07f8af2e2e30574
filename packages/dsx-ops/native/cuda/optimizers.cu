// One pass over parameter, gradient and states per optimizer; the arithmetic of native/cpu/optimizers.cpp, operation by
// operation, so that both give the same bits (compiled without contraction).
//
// Bound by memory: a thread takes four neighbours of every stream (eight where all streams have 16 bits), all loads
// before the first use. The dtypes are a type argument for the common combinations and numbers at run time for the
// rest; the branches are the same for a whole block.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

// ---- rules for one element --------------------------------------------------------------------------

__device__ __forceinline__ float gradient(const Hyper& h, float g) {
    if (h.flags & UNSCALE) g = g * h.grad_mul;
    return h.flags & MAXIMIZE ? -g : g;
}
__device__ __forceinline__ void moments(const Hyper& h, float g, float& m, float& v) {
    m = h.beta1 * m + h.one_minus_beta1 * g;
    v = h.beta2 * v + (h.one_minus_beta2 * g) * g;
}

struct Adam {
    static constexpr int STATES = 2;
    static __device__ __forceinline__ void apply(const Hyper& h, float& p, float g, float& m, float& v) {
        if (h.flags & L2) g = g + h.l2 * p;
        moments(h, g, m, v);
        if (h.flags & DECOUPLED) p = p * h.decay;
        p = p - h.step_size * (m / (sqrtf(v) * h.inv_denom + h.eps));
    }
};
struct Adagrad {
    static constexpr int STATES = 1;
    static __device__ __forceinline__ void apply(const Hyper& h, float& p, float g, float& sum, float&) {
        if (h.flags & L2) g = g + h.l2 * p;
        sum = sum + g * g;
        p = p - h.step_size * (g / (sqrtf(sum) + h.eps));
    }
};
struct Lion {
    static constexpr int STATES = 1;
    static __device__ __forceinline__ void apply(const Hyper& h, float& p, float g, float& m, float&) {
        const float c = h.beta1 * m + h.one_minus_beta1 * g;
        const float sign = 0.0f < c ? 1.0f : c < 0.0f ? -1.0f : 0.0f;
        if (h.flags & DECOUPLED) p = p * h.decay;
        p = p - h.step_size * sign;
        m = h.beta2 * m + h.one_minus_beta2 * g;
    }
};
struct Sgd {
    static constexpr int STATES = 1;
    static __device__ __forceinline__ void apply(const Hyper& h, float& p, float g, float& buffer, float&) {
        if (h.flags & L2) g = g + h.l2 * p;
        if (h.flags & MOMENTUM) {
            buffer = h.beta1 * buffer + h.damp * g;
            g = h.flags & NESTEROV ? g + h.beta2 * buffer : buffer;
        }
        p = p - h.step_size * g;
    }
};

__device__ __forceinline__ float lamb_direction(const Hyper& h, float p, float m, float v) {
    const float u = m / (h.flags & EPS_INSIDE ? sqrtf(v + h.eps) : sqrtf(v) + h.eps);
    return h.flags & L2 ? u + h.l2 * p : u;
}

// ---- dtypes of the streams --------------------------------------------------------------------------

struct AnyTypes {
    DType param, grad, state, copy;
    static constexpr int WIDTH = 4;   // elements that a thread takes at a time
    static constexpr int BLOCKS = 3;  // that share a multiprocessor at least: as many as do without spilling registers
};
template <DType P, DType G, DType S, DType C> struct Types {
    static constexpr DType param = P, grad = G, state = S, copy = C;
    static constexpr int WIDTH = P != F32 && G != F32 && S != F32 && C != F32 ? 8 : 4;
    static constexpr int BLOCKS = WIDTH == 8 || P == SPLIT || (G == F32 && C != NONE) ? 2 : 3;
    static bool match(const Step& s) { return s.param == P && s.grad == G && s.state == S && s.copy == C; }
};

// The factors of an update: on the host, or where `prepare` has computed them on the device.
struct HyperSource {
    Hyper host;
    const Hyper* device;
    __device__ __forceinline__ Hyper get() const { return device ? *device : host; }
};

template <int N, class T>
__device__ __forceinline__ Floats<N> param_of(const T& t, const Raw<N>& raw, const Raw<N>& low) {
    return t.param == SPLIT ? join(raw, low) : decode(t.param, raw);
}
template <int N, class T>
__device__ __forceinline__ void store_param(const T& t, const Row& row, int64_t i, int n, bool whole,
                                            const Floats<N>& p) {
    if (t.param == SPLIT) {
        Raw<N> weight, low;
        split(p, weight, low);
        store_raw(BF16, row.param, i, n, whole, weight);
        store_raw(BF16, row.low_bits, i, n, whole, low);
    } else {
        store(t.param, row.param, i, n, whole, p);
    }
    if (t.copy != NONE) store(t.copy, row.copy, i, n, whole, p);
}

// ---- elementwise ------------------------------------------------------------------------------------

template <class Rule, class T>
__global__ void __launch_bounds__(THREADS, T::BLOCKS)
    elementwise(const __grid_constant__ Table<Row> table, const T t, const HyperSource numbers) {
    const Hyper h = numbers.get();
    if (h.flags & SKIP) return;
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Row& row = table.rows[piece.row];
    const bool stateful = Rule::STATES > 1 || row.state0 != nullptr;
    constexpr int N = T::WIDTH;
    for (int64_t i = piece.begin + N * threadIdx.x; i < piece.end; i += N * blockDim.x) {
        const int n = count_of<N>(piece.end, i);
        const bool whole = n == N && table.aligned[piece.row];
        const Raw<N> raw_p = load_raw<N>(t.param, row.param, i, n, whole),
                     raw_g = load_raw<N>(t.grad, row.grad, i, n, whole);
        Raw<N> low = {}, raw_a = {}, raw_b = {};
        if (t.param == SPLIT) low = load_raw<N>(BF16, row.low_bits, i, n, whole);
        if (stateful) raw_a = load_raw<N>(t.state, row.state0, i, n, whole);
        if (Rule::STATES > 1) raw_b = load_raw<N>(t.state, row.state1, i, n, whole);
        Floats<N> p = param_of(t, raw_p, low), g = decode(t.grad, raw_g), a = decode(t.state, raw_a);
        Floats<N> b = decode(t.state, raw_b);
        for (int k = 0; k < N; ++k) Rule::apply(h, p.x[k], gradient(h, g.x[k]), a.x[k], b.x[k]);
        store_param(t, row, i, n, whole, p);
        if (stateful) store(t.state, row.state0, i, n, whole, a);
        if (Rule::STATES > 1) store(t.state, row.state1, i, n, whole, b);
    }
}

// ---- Lamb -------------------------------------------------------------------------------------------

// Phase 1: moments, and per chunk the squared norms of parameter and direction.
__global__ void __launch_bounds__(THREADS) lamb_update(const __grid_constant__ Table<Row> table, const AnyTypes t,
                                                       const HyperSource numbers, double* partials) {
    __shared__ double scratch[THREADS / WARP];
    const Hyper h = numbers.get();
    const bool skip = h.flags & SKIP;
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Row& row = table.rows[piece.row];
    double p_sum = 0, u_sum = 0;
    for (int64_t i = piece.begin + 4 * threadIdx.x; i < piece.end && !skip; i += 4 * blockDim.x) {
        const int n = count_of<4>(piece.end, i);
        const bool whole = n == 4 && table.aligned[piece.row];
        Raw<4> low = {};
        const Raw<4> raw_p = load_raw<4>(t.param, row.param, i, n, whole),
                     raw_g = load_raw<4>(t.grad, row.grad, i, n, whole);
        const Raw<4> raw_m = load_raw<4>(t.state, row.state0, i, n, whole),
                     raw_v = load_raw<4>(t.state, row.state1, i, n, whole);
        if (t.param == SPLIT) low = load_raw<4>(BF16, row.low_bits, i, n, whole);
        const Floats<4> p = param_of(t, raw_p, low), g = decode(t.grad, raw_g);
        Floats<4> m = decode(t.state, raw_m), v = decode(t.state, raw_v);
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;  // what is missing would be 0/0 when eps is 0
            moments(h, gradient(h, g.x[k]), m.x[k], v.x[k]);
            const double x = p.x[k], u = lamb_direction(h, p.x[k], m.x[k], v.x[k]);
            p_sum = p_sum + x * x;
            u_sum = u_sum + u * u;
        }
        store(t.state, row.state0, i, n, whole, m);
        store(t.state, row.state1, i, n, whole, v);
    }
    p_sum = over_block(p_sum, Sum(), scratch);
    u_sum = over_block(u_sum, Sum(), scratch);
    if (threadIdx.x == 0) {
        partials[2 * (int64_t)blockIdx.x] = p_sum;
        partials[2 * (int64_t)blockIdx.x + 1] = u_sum;
    }
}

// Adds the chunks of one row, always in the same order.
__global__ void __launch_bounds__(THREADS)
    lamb_norms(const __grid_constant__ Table<Row> table, const double* partials, double* squares) {
    __shared__ double scratch[THREADS / WARP];
    const int row = (int)blockIdx.x;
    double p_sum = 0, u_sum = 0;
    for (int64_t c = table.start[row] + (int64_t)threadIdx.x; c < table.start[row + 1]; c += blockDim.x) {
        p_sum = p_sum + partials[2 * c];
        u_sum = u_sum + partials[2 * c + 1];
    }
    p_sum = over_block(p_sum, Sum(), scratch);
    u_sum = over_block(u_sum, Sum(), scratch);
    if (threadIdx.x == 0) {
        squares[2 * (int64_t)table.index[row]] = p_sum;
        squares[2 * (int64_t)table.index[row] + 1] = u_sum;
    }
}

// Phase 2: the direction again from the moments just written, times the row's coefficient.
__global__ void __launch_bounds__(THREADS) lamb_apply(const __grid_constant__ Table<Row> table, const AnyTypes t,
                                                      const HyperSource numbers, const float* coefficients) {
    const Hyper h = numbers.get();
    if (h.flags & SKIP) return;
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Row& row = table.rows[piece.row];
    const float coefficient = coefficients[table.index[piece.row]];
    for (int64_t i = piece.begin + 4 * threadIdx.x; i < piece.end; i += 4 * blockDim.x) {
        const int n = count_of<4>(piece.end, i);
        const bool whole = n == 4 && table.aligned[piece.row];
        Raw<4> low = {};
        const Raw<4> raw_p = load_raw<4>(t.param, row.param, i, n, whole);
        const Raw<4> raw_m = load_raw<4>(t.state, row.state0, i, n, whole),
                     raw_v = load_raw<4>(t.state, row.state1, i, n, whole);
        if (t.param == SPLIT) low = load_raw<4>(BF16, row.low_bits, i, n, whole);
        Floats<4> p = param_of(t, raw_p, low);
        const Floats<4> m = decode(t.state, raw_m), v = decode(t.state, raw_v);
        for (int k = 0; k < 4; ++k) p.x[k] = p.x[k] - coefficient * lamb_direction(h, p.x[k], m.x[k], v.x[k]);
        store_param(t, row, i, n, whole, p);
    }
}

// ---- 8-bit states -----------------------------------------------------------------------------------
//
// Codes, scales and folded numbers are explained in native/cpu/adam8.cpp. A warp takes a block of 256 elements, eight
// per lane.

constexpr float LARGEST_CODE = 1.875f, BELOW_LARGEST = LARGEST_CODE * 0.99999905f;
constexpr float SMALLEST_NORMAL = 1.1754944e-38f, LARGEST = 3.4028235e38f;

struct First {
    static constexpr float UNIT = 5.192296858534828e33f, INVERSE = 1.925929944387236e-34f,
                           LIMIT = 8192.0f;  // 2^112, 2^-112, 2^13
};
struct Second {
    static constexpr float UNIT = 7.922816251426434e28f, INVERSE = 1.262177448353619e-29f,
                           LIMIT = 536870912.0f;  // 2^96, 2^-96, 2^29
};

// Second moments are counted in units of (1 - beta2) / (1 - beta1)^2.
struct Numbers8 {
    float beta1, beta2, decode0, decode1, from_units, grad_mul, l2, eps, step_size;
    __device__ __forceinline__ explicit Numbers8(const Hyper& h) {
        const float units = h.one_minus_beta1 * h.one_minus_beta1 / h.one_minus_beta2,
                    root = sqrtf(units) / h.inv_denom;
        beta1 = h.beta1;
        beta2 = h.beta2 * units;
        decode0 = beta1 / LARGEST_CODE;
        decode1 = beta2 / LARGEST_CODE;
        from_units = 1.0f / units;
        grad_mul = h.one_minus_beta1 * ((h.flags & MAXIMIZE ? -1.0f : 1.0f) * (h.flags & UNSCALE ? h.grad_mul : 1.0f));
        l2 = h.one_minus_beta1 * h.l2;
        eps = h.eps * root;
        step_size = h.step_size * root;
    }
};

__device__ __forceinline__ float decode8(uint32_t code, float unit, float by) {
    return (__uint_as_float(code << 20) * unit) * by;
}

// From a moment to a code: `before` is 1 unless a scale is out of the common range.
struct Encoding {
    float before, after;
    __device__ __forceinline__ Encoding(float scale, float inverse_unit, bool careful) {
        const float inverse = scale >= SMALLEST_NORMAL && scale <= LARGEST ? BELOW_LARGEST / scale : 0.0f;
        before = careful ? inverse_unit : 1.0f;
        after = careful ? inverse : inverse * inverse_unit;
    }
    __device__ __forceinline__ uint32_t operator()(float magnitude, uint32_t random) const {
        const float shifted = (magnitude * before) * after;
        return shifted == shifted ? (__float_as_uint(shifted) + random) >> 20 : 0;
    }
};

// 32 random bits for the pair of elements that `i` belongs to.
__device__ __forceinline__ uint32_t pair_noise(uint32_t seed, int64_t i) {
    const int64_t block = i / BLOCK8;
    const uint32_t start = mix((uint32_t)block ^ (seed + (uint32_t)((uint64_t)block >> 32) * 0x9e3779b9u));
    const uint32_t state = start + (uint32_t)(i % BLOCK8 / 2) * 0x9e3779b9u;
    return (state ^ (state >> 16)) * 0x7feb352du;
}

constexpr int PER_LANE = BLOCK8 / WARP / 4;  // groups of four

__global__ void __launch_bounds__(THREADS)
    adam8(const __grid_constant__ Table<Row> table, const AnyTypes t, const HyperSource numbers) {
    const Hyper hyper = numbers.get();
    if (hyper.flags & SKIP) return;
    const Numbers8 h(hyper);
    const Piece piece = piece_of(table, (int32_t)blockIdx.x);
    const Row& row = table.rows[piece.row];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    for (int64_t first = piece.begin + warp * BLOCK8; first < piece.end; first += warps * BLOCK8) {
        const float scale0 = fetch(row.scale0 + first / BLOCK8), scale1 = fetch(row.scale1 + first / BLOCK8);
        Floats<4> p[PER_LANE], g[PER_LANE];
        uint32_t c0[PER_LANE], c1[PER_LANE];
        float most = 0;
#pragma unroll
        for (int part = 0; part < PER_LANE; ++part) {
            const int64_t i = first + 4 * (part * WARP + lane);
            const int n = count_of<4>(piece.end, i);
            const bool whole = n == 4 && table.aligned[piece.row];
            Raw<4> low = {};
            const Raw<4> raw_p = load_raw<4>(t.param, row.param, i, n, whole),
                         raw_g = load_raw<4>(t.grad, row.grad, i, n, whole);
            c0[part] = load_bytes(row.state0, i, n, whole);
            c1[part] = load_bytes(row.state1, i, n, whole);
            if (t.param == SPLIT) low = load_raw<4>(BF16, row.low_bits, i, n, whole);
            p[part] = param_of(t, raw_p, low);
            g[part] = decode(t.grad, raw_g);
            for (int k = 0; k < 4; ++k) {
                float& x = g[part].x[k];
                if (k >= n) continue;
                x = x * h.grad_mul;
                if (hyper.flags & L2) x = x + h.l2 * p[part].x[k];
                most = Largest()(most, fabsf(x));
            }
        }
        most = over_warp(most, Largest());
        const float by0 = scale0 * h.decode0, by1 = scale1 * h.decode1;
        const float new0 = scale0 * h.beta1 + most, new1 = scale1 * h.beta2 + most * most;
        const bool finite = new0 <= LARGEST && new1 <= LARGEST;
        const bool careful =
            !(by0 <= First::LIMIT && new0 <= First::LIMIT && by1 <= Second::LIMIT && new1 <= Second::LIMIT);
        const Encoding encode0(new0, First::INVERSE, careful), encode1(new1, Second::INVERSE, careful);
        if (lane == 0) {
            put(row.scale0 + first / BLOCK8, finite ? new0 : nanf(""));
            put(row.scale1 + first / BLOCK8, finite ? new1 * h.from_units : nanf(""));
        }
#pragma unroll
        for (int part = 0; part < PER_LANE; ++part) {
            const int64_t i = first + 4 * (part * WARP + lane);
            const int n = count_of<4>(piece.end, i);
            const bool whole = n == 4 && table.aligned[piece.row];
            uint32_t new_c0 = 0, new_c1 = 0;
            Raw<4> rounded = {};
            for (int k = 0; k < 4; ++k) {
                if (k >= n) continue;
                const uint32_t random = pair_noise(hyper.seed, row.offset + i + k),
                               noise = k % 2 ? random & 0xfffffu : random >> 12;
                const uint32_t old0 = c0[part] >> 8 * k & 0xffu, old1 = c1[part] >> 8 * k & 0xffu;
                const float x = g[part].x[k], magnitude = decode8(old0 & 0x7fu, First::UNIT, by0);
                const float m = (old0 & 0x80u ? -magnitude : magnitude) + x,
                            v = decode8(old1, Second::UNIT, by1) + x * x;
                const uint32_t sign = finite ? __float_as_uint(m) >> 24 & 0x80u : 0;
                const uint32_t code1 = encode1(v, noise);
                new_c0 |= (encode0(fabsf(m), noise) | sign) << 8 * k;
                new_c1 |= (code1 < 8 ? 8 : code1) << 8 * k;  // its root is divided by
                float& y = p[part].x[k];
                if (hyper.flags & DECOUPLED) y = y * hyper.decay;
                y = y - h.step_size * (m / (sqrtf(v) + h.eps));
                // A bf16 parameter without a master is rounded stochastically too.
                const uint32_t bits = __float_as_uint(y) + (k % 2 ? random >> 16 : random & 0xffffu);
                rounded.w[k / 2] |= (y != y ? 0x7fc0u : bits >> 16) << 16 * (k % 2);
            }
            store_bytes(row.state0, i, n, whole, new_c0);
            store_bytes(row.state1, i, n, whole, new_c1);
            if (t.param == BF16) {
                store_raw(BF16, row.param, i, n, whole, rounded);
                if (t.copy != NONE) store(t.copy, row.copy, i, n, whole, p[part]);
            } else {
                store_param(t, row, i, n, whole, p[part]);
            }
        }
    }
}

// ---- numbers that lie on the device -----------------------------------------------------------------

__device__ double read(const Scalar& s) {
    if (s.at == nullptr) return s.value;
    if (s.type == SCALAR_F64) return *static_cast<const double*>(s.at);
    if (s.type == SCALAR_I64) return (double)*static_cast<const int64_t*>(s.at);
    return *static_cast<const float*>(s.at);
}
// The formulas of dsx_ops.spec.Hyper.lowered, in fp64.
__global__ void __launch_bounds__(WARP) lower(const Recipe r, Hyper* out) {
    if (threadIdx.x != 0) return;
    Hyper h = r.host;
    const double lr = read(r.lr), scale = read(r.grad_scale), step = read(r.step);
    if (read(r.found_inf) != 0.0) {
        h.flags |= SKIP;
        *out = h;
        return;
    }
    double step_size = lr, inv_denom = 1.0;
    if ((r.algorithm == ADAM || r.algorithm == ADAM8) && r.bias_correction) {
        step_size = lr / (1.0 - pow(r.beta1, step));
        inv_denom = 1.0 / sqrt(1.0 - pow(r.beta2, step));
    }
    if ((r.algorithm == LAMB_UPDATE || r.algorithm == LAMB_APPLY) && r.bias_correction)
        step_size = lr * sqrt(1.0 - pow(r.beta2, step)) / (1.0 - pow(r.beta1, step));
    if (r.algorithm == SGD && step <= 1.0) {  // the buffer begins as the gradient
        h.beta1 = 0.0f;
        h.damp = 1.0f;
    }
    h.step_size = (float)step_size;
    h.inv_denom = (float)inv_denom;
    h.decay = (float)(1.0 - lr * r.weight_decay);
    h.grad_mul = (float)(1.0 / scale);
    if (r.grad_scale.at != nullptr || r.grad_scale.value != 1.0) h.flags |= UNSCALE;
    *out = h;
}

// ---- start ------------------------------------------------------------------------------------------

// Every stream may be read in words: of 16 bytes, or of four codes.
bool aligned(const Step& s, const Row& r) {
    const int state = s.algorithm == ADAM8 ? 4 : 16;
    return fits(r.param, 16) && fits(r.grad, 16) && fits(r.state0, state) && fits(r.state1, state) &&
           fits(r.low_bits, 16) && fits(r.copy, 16);
}

template <class Rule, class T>
void start_as(const Where& where, const Table<Row>& table, const T& t, const HyperSource& numbers) {
    launch(where, elementwise<Rule, T>, table.chunks(), THREADS, table, t, numbers);
}
template <class Rule>
void start(const Where& where, const Table<Row>& table, const Step& s, const HyperSource& numbers) {
    if (Types<F32, F32, F32, NONE>::match(s))
        return start_as<Rule>(where, table, Types<F32, F32, F32, NONE>(), numbers);
    start_as<Rule>(where, table, AnyTypes{s.param, s.grad, s.state, s.copy}, numbers);
}
// Adam is where the time goes in practice.
template <> void start<Adam>(const Where& where, const Table<Row>& table, const Step& s, const HyperSource& numbers) {
    if (Types<F32, F32, F32, NONE>::match(s))
        return start_as<Adam>(where, table, Types<F32, F32, F32, NONE>(), numbers);
    if (Types<F32, F32, F32, BF16>::match(s))
        return start_as<Adam>(where, table, Types<F32, F32, F32, BF16>(), numbers);
    if (Types<F32, BF16, F32, BF16>::match(s))
        return start_as<Adam>(where, table, Types<F32, BF16, F32, BF16>(), numbers);
    if (Types<BF16, BF16, F32, NONE>::match(s))
        return start_as<Adam>(where, table, Types<BF16, BF16, F32, NONE>(), numbers);
    if (Types<BF16, BF16, BF16, NONE>::match(s))
        return start_as<Adam>(where, table, Types<BF16, BF16, BF16, NONE>(), numbers);
    if (Types<SPLIT, BF16, F32, NONE>::match(s))
        return start_as<Adam>(where, table, Types<SPLIT, BF16, F32, NONE>(), numbers);
    start_as<Adam>(where, table, AnyTypes{s.param, s.grad, s.state, s.copy}, numbers);
}

void start_table(const Where& where, const Table<Row>& table, const Step& s, const HyperSource& numbers,
                 double* squares, double* partials, const float* coefficients) {
    const AnyTypes any{s.param, s.grad, s.state, s.copy};
    switch (s.algorithm) {
        case ADAM: return start<Adam>(where, table, s, numbers);
        case ADAGRAD: return start<Adagrad>(where, table, s, numbers);
        case LION: return start<Lion>(where, table, s, numbers);
        case SGD: return start<Sgd>(where, table, s, numbers);
        case ADAM8: return launch(where, adam8, table.chunks(), THREADS, table, any, numbers);
        case LAMB_UPDATE:
            launch(where, lamb_update, table.chunks(), THREADS, table, any, numbers, partials);
            return launch(where, lamb_norms, table.count, THREADS, table, (const double*)partials, squares);
        case LAMB_APPLY: return launch(where, lamb_apply, table.chunks(), THREADS, table, any, numbers, coefficients);
        default: throw std::runtime_error("unknown algorithm");
    }
}

}  // namespace

void prepare(const Where& where, const Recipe& recipe, Hyper* out) {
    OnDevice on(where);
    launch(where, lower, 1, WARP, recipe, out);
}

void step(const Where& where, const Step& s, const Row* rows, size_t count, const Hyper* hyper_at, double* squares,
          double* partials, const float* coefficients) {
    OnDevice on(where);
    const HyperSource numbers{s.hyper, hyper_at};
    for_tables(
        rows, count, [&](const Row& r) { return aligned(s, r); },
        [&](const Table<Row>& table) {
            start_table(where, table, s, numbers, squares, partials, coefficients);
            if (partials) partials += 2 * table.chunks();
        });
}

}  // namespace cuda
}  // namespace dsx
