// Adam with both moments in 8 bits; compiled once per instruction set.
//
// Codes are small floats, each moment's relative to a scale per block of 256 elements: 3 bits of mantissa, and an
// exponent of 4 bits beside a sign (first moments) or of 5 bits (second moments). A code shifted left by 20 is the bits
// of a fp32 number, 2^-112 (2^-96) times what it stands for: one multiplication decodes, one encodes, and below the
// smallest exponent codes are denormal, down to zero, because those numbers are. Rounding is stochastic (an EMA that
// changes by less than half a code per step would stand still otherwise): noise is added to the bits before the lowest
// 20 are dropped.
//
// A scale is not the largest moment but what bounds it: the same EMA of the block's largest gradient. Known from the
// gradients alone, it lets one loop do everything; codes are floats, so that a scale some octaves too large costs
// nothing but range.
//
// The kernel is bound by arithmetic more than by its 10 bytes per parameter. So factors are folded, and elements go in
// pairs (words.h).
#include "dsx_ops/kernels.h"
#include "dsx_ops/words.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr int64_t STRIDE = 2 * LANES;
constexpr float LARGEST_CODE = 1.875f;
// A little less, so that no rounding takes a moment beyond it: 1 - 2^-20.
constexpr float BELOW_LARGEST = LARGEST_CODE * 0.99999905f;
constexpr float SMALLEST_NORMAL = 1.1754944e-38f, LARGEST = 3.4028235e38f;

constexpr float power_of_two(int n) {
    return n < 0 ? 0.5f * power_of_two(n + 1) : n > 0 ? 2.0f * power_of_two(n - 1) : 1.0f;
}

// What a shifted code is multiplied by, and the largest scale whose product with that (with its inverse) fp32 can hold.
struct First {
    static constexpr float UNIT = power_of_two(112), INVERSE = power_of_two(-112), LIMIT = power_of_two(13);
};
struct Second {
    static constexpr float UNIT = power_of_two(96), INVERSE = power_of_two(-96), LIMIT = power_of_two(29);
};

// The numbers of a step. Second moments are counted in units of (1 - beta2) / (1 - beta1)^2: then a gradient adds to
// them the square of what it adds to the first.
struct Numbers {
    float beta1, beta2, decode0, decode1, from_units;
    F grad_mul, l2, eps, decay, step_size;
    int32_t flags;
    explicit DSX_INLINE Numbers(const Hyper& h) : flags(h.flags) {
        const float units = h.one_minus_beta1 * h.one_minus_beta1 / h.one_minus_beta2,
                    root = __builtin_sqrtf(units) / h.inv_denom;
        beta1 = h.beta1;
        beta2 = h.beta2 * units;
        decode0 = beta1 / LARGEST_CODE;
        decode1 = beta2 / LARGEST_CODE;
        from_units = 1.0f / units;
        grad_mul =
            splat(h.one_minus_beta1 * ((h.flags & MAXIMIZE ? -1.0f : 1.0f) * (h.flags & UNSCALE ? h.grad_mul : 1.0f)));
        l2 = splat(h.one_minus_beta1 * h.l2);
        eps = splat(h.eps * root);
        decay = splat(h.decay);
        step_size = splat(h.step_size * root);
    }
    bool DSX_INLINE on(Flag f) const { return flags & f; }
};

// One block of a row.
struct Streams {
    char *param, *low_bits;
    const char* grad;
    char *first, *second, *copy;
};

// 32 random bits per pair of elements, keyed by seed and index: a Weyl sequence, mixed by one multiplication. An
// element's two moments are rounded by the same 20 of them, its parameter by 16.
struct PairNoise {
    static constexpr uint32_t WEYL = 0x9e3779b9u;
    U state;
    DSX_INLINE PairNoise(uint32_t seed, int64_t block)
        : state(mix(splatu((uint32_t)block ^ noise_key(seed, block))) + lane_numbers() * splatu(WEYL)) {}
    DSX_INLINE U next() {
        const U random = (state ^ (state >> 16)) * splatu(0x7feb352du);
        state = state + splatu(WEYL * (uint32_t)LANES);
        return random;
    }
};

// What the gradients add to the first moments.
template <DType P, DType G> DSX_INLINE Pair gradients(const Numbers& h, const Streams& s, int64_t i) {
    Pair g = Pairs<G>::load(s.grad, nullptr, i);
    g = {g.even * h.grad_mul, g.odd * h.grad_mul};
    if (h.on(L2)) {
        const Pair p = Pairs<P>::load(s.param, s.low_bits, i);
        g = {g.even + h.l2 * p.even, g.odd + h.l2 * p.odd};
    }
    return g;
}

// The largest magnitude of a block of them; NaN counts as larger than any.
template <DType P, DType G> DSX_INLINE float largest_gradient(const Numbers& h, const Streams& s) {
    F most = splat(0.0f);
    if (G == BF16 && !h.on(L2)) {  // bf16 magnitudes order as words
        U words = splatu(0);
        for (int64_t i = 0; i < BLOCK8; i += STRIDE)
            words = larger_words(words, load_words(s.grad + 2 * i) & splatu(0x7fff7fffu));
        most = absolute(larger_magnitude(floats(words << 16), floats(words & splatu(HIGH))) * h.grad_mul);
    } else {
        for (int64_t i = 0; i < BLOCK8; i += STRIDE) {
            const Pair g = gradients<P, G>(h, s, i);
            most = larger_magnitude(most, larger_magnitude(absolute(g.even), absolute(g.odd)));
        }
    }
    return largest_magnitude(most);
}

// One multiplication each; where a scale leaves the common range or is NaN (CAREFUL) two, and NaN gets code 0.
template <class C, bool CAREFUL> DSX_INLINE F decode(U code, F by) {
    return CAREFUL ? (floats(code) * splat(C::UNIT)) * by : floats(code) * by;
}
template <class C, bool CAREFUL> DSX_INLINE U encode(F x, F by, U noise) {
    if (!CAREFUL) return bits(x * by) + noise;
    const F scaled = (x * splat(C::INVERSE)) * by;
    return select(is_nan(scaled), splatu(0), bits(scaled) + noise);
}
// The sign is in bit 11 by then; it belongs into bit 7.
DSX_INLINE void store_first(char* at, U even, U odd) {
    store_words_as_bytes(at, add_bytes_times_16(shift_words(join_high(even, odd), 4)));
}
// Never below the smallest normal code: the root of a second moment is divided by.
DSX_INLINE void store_second(char* at, U even, U odd) {
    store_words_as_bytes(at, larger_words(shift_words(join_high(even, odd), 4), splatu(0x00080008u)));
}
// A bf16 parameter without a master is rounded stochastically too, so that updates below half its last bit add up.
template <bool CAREFUL> DSX_INLINE U rounded(F p, U noise) {
    const U b = bits(p) + noise;
    return CAREFUL ? select(is_nan(p), splatu(0x7fc00000u), b) : b;
}

struct Factors {
    float decode0, decode1, encode0, encode1;
};

template <DType P, DType G, bool CAREFUL>
DSX_INLINE void update(const Numbers h, const Streams s, DType copy, const Factors& by, PairNoise noise) {
    const U sign_and_code = splatu(0x87f00000u), code = splatu(0x0ff00000u);
    const F decode0 = splat(by.decode0), decode1 = splat(by.decode1), encode0 = splat(by.encode0),
            encode1 = splat(by.encode1);
    for (int64_t i = 0; i < BLOCK8; i += STRIDE) {
        const U random = noise.next(), even = random >> 12, odd = random & splatu(0xfffffu);
        const Pair g = gradients<P, G>(h, s, i);
        const U first = load_bytes_as_words<true>(s.first + i), second = load_bytes_as_words<false>(s.second + i);
        const Pair m = {decode<First, CAREFUL>((first << 20) & sign_and_code, decode0) + g.even,
                        decode<First, CAREFUL>((first << 4) & sign_and_code, decode0) + g.odd};
        const Pair v = {decode<Second, CAREFUL>(second << 20, decode1) + g.even * g.even,
                        decode<Second, CAREFUL>((second << 4) & code, decode1) + g.odd * g.odd};
        store_first(s.first + i, encode<First, CAREFUL>(m.even, encode0, even),
                    encode<First, CAREFUL>(m.odd, encode0, odd));
        store_second(s.second + i, encode<Second, CAREFUL>(v.even, encode1, even),
                     encode<Second, CAREFUL>(v.odd, encode1, odd));

        Pair p = Pairs<P>::load(s.param, s.low_bits, i);
        if (h.on(DECOUPLED)) p = {p.even * h.decay, p.odd * h.decay};
        p = {p.even - h.step_size * (m.even / (root(v.even) + h.eps)),
             p.odd - h.step_size * (m.odd / (root(v.odd) + h.eps))};
        if (P == BF16)
            store_words(s.param + 2 * i,
                        join_high(rounded<CAREFUL>(p.even, low_words(random)), rounded<CAREFUL>(p.odd, random >> 16)));
        else Pairs<P>::store(s.param, s.low_bits, i, p);
        if (copy == F32) Pairs<F32>::store(s.copy, nullptr, i, p);
        if (copy == BF16) Pairs<BF16>::store(s.copy, nullptr, i, p);
        if (copy == F16) Pairs<F16>::store(s.copy, nullptr, i, p);
    }
}

// What fp32 cannot invert is flushed to zero.
DSX_INLINE float encoding(float scale, float unit) {
    return scale >= SMALLEST_NORMAL && scale <= LARGEST ? BELOW_LARGEST / scale * unit : 0.0f;
}

// A block with a gradient that is no finite number is NaN from then on.
template <DType P, DType G>
DSX_INLINE void block(const Numbers& h, const Streams& s, DType copy, float& scale0, float& scale1,
                      const PairNoise& noise) {
    const float most = largest_gradient<P, G>(h, s), decode0 = scale0 * h.decode0, decode1 = scale1 * h.decode1;
    const float new0 = scale0 * h.beta1 + most, new1 = scale1 * h.beta2 + most * most;
    const bool finite = new0 <= LARGEST && new1 <= LARGEST;
    scale0 = finite ? new0 : __builtin_nanf("");
    scale1 = finite ? new1 * h.from_units : __builtin_nanf("");
    if (decode0 <= First::LIMIT && new0 <= First::LIMIT && decode1 <= Second::LIMIT && new1 <= Second::LIMIT)
        return update<P, G, false>(h, s, copy,
                                   {decode0 * First::UNIT, decode1 * Second::UNIT, encoding(new0, First::INVERSE),
                                    encoding(new1, Second::INVERSE)},
                                   noise);
    update<P, G, true>(h, s, copy, {decode0, decode1, encoding(new0, 1.0f), encoding(new1, 1.0f)}, noise);
}

// The block at a row's end, on a copy filled up with zeros, which are never the largest.
struct Copied {
    alignas(64) char param[4 * BLOCK8] = {}, low_bits[2 * BLOCK8] = {}, grad[4 * BLOCK8] = {}, first[BLOCK8] = {},
                               second[BLOCK8] = {}, copy[4 * BLOCK8];

    template <class Body>
    DSX_INLINE void run(const Streams& s, int64_t param_bytes, int64_t grad_bytes, int64_t copy_bytes, int64_t n,
                        const Body& body) {
        __builtin_memcpy(param, s.param, param_bytes);
        if (s.low_bits) __builtin_memcpy(low_bits, s.low_bits, 2 * n);
        __builtin_memcpy(grad, s.grad, grad_bytes);
        __builtin_memcpy(first, s.first, n);
        __builtin_memcpy(second, s.second, n);
        body(Streams{param, low_bits, grad, first, second, copy});
        __builtin_memcpy(s.param, param, param_bytes);
        if (s.low_bits) __builtin_memcpy(s.low_bits, low_bits, 2 * n);
        __builtin_memcpy(s.first, first, n);
        __builtin_memcpy(s.second, second, n);
        if (copy_bytes) __builtin_memcpy(s.copy, copy, copy_bytes);
    }
};

template <DType P, DType G> void blocks(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const Numbers h(step.hyper);
    constexpr int PARAM = P == F32 ? 4 : 2, GRAD = size_of(G);
    const int copied = size_of(step.copy);
    for (int64_t at = begin; at < end; at += BLOCK8) {
        const int64_t n = end - at, k = at / BLOCK8;
        const Streams s{row.param + PARAM * at, row.low_bits ? row.low_bits + 2 * at : nullptr,
                        row.grad + GRAD * at,   row.state0 + at,
                        row.state1 + at,        copied ? row.copy + copied * at : nullptr};
        const PairNoise noise(step.hyper.seed, (row.offset + at) / BLOCK8);
        // A function of its own, since it is called from two places: one copy of the loops instead of two.
        const auto run = [&](const Streams& whole) __attribute__((noinline)) {
            block<P, G>(h, whole, step.copy, row.scale0[k], row.scale1[k], noise);
        };
        if (n >= BLOCK8) run(s);
        else Copied().run(s, PARAM * n, GRAD * n, copied * n, n, run);
    }
}

// Shifted codes are denormal numbers at times. Who flushes those (`torch.set_flush_denormal`, thread by thread) must
// not lose moments by it. What runs under it must not be inlined: the compiler takes arithmetic past a change of the
// mode.
class KeepDenormals {
  public:
#if defined(__SSE2__)
    KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~FLUSH); }
    ~KeepDenormals() { _mm_setcsr(before_); }

  private:
    static constexpr unsigned FLUSH = 0x8040;  // results and operands
    unsigned before_;
#else
    ~KeepDenormals() {}  // other processors: as the process has it
#endif
};

template <DType P>
__attribute__((noinline)) void by_grad(const Step& step, const Row& row, int64_t begin, int64_t end) {
    if (step.grad == BF16) return blocks<P, BF16>(step, row, begin, end);
    if (step.grad == F16) return blocks<P, F16>(step, row, begin, end);
    blocks<P, F32>(step, row, begin, end);
}

}  // namespace

void adam8(const Step& step, const Row& row, int64_t begin, int64_t end) {
    const KeepDenormals keep;
    if (step.param == BF16) return by_grad<BF16>(step, row, begin, end);
    if (step.param == F16) return by_grad<F16>(step, row, begin, end);
    if (step.param == SPLIT) return by_grad<SPLIT>(step, row, begin, end);
    by_grad<F32>(step, row, begin, end);
}

}  // namespace DSX_ISA
}  // namespace dsx
