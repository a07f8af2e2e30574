// Groupwise int8, int4 and fp8, swizzled and reduced: the bits of native/cpu/quantize.cpp.
//
// What is quantised is a tensor, or the sum of what several ranks' codes stand for; the second never exists in memory.
// A warp (groups of more than 512: a block) holds its group in registers between the range and the codes, so that it is
// read once; groups of more than 8192 are read again. The other direction goes element by element, eight or four
// neighbours per thread. The format is a number at run time: the branch on it is the same for a whole launch, and is
// taken once per group of neighbours.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t MAGIC_BITS = 0x4b400000u;
constexpr float UNIT24 = 5.9604644775390625e-8f;  // 2^-24

// Up with the probability of the fraction; `random` has 24 bits.
__device__ __forceinline__ float round_random(float t, uint32_t random) {
    t = t + (float)(int32_t)random * UNIT24;
    const float nearest = (t + MAGIC) - MAGIC;
    return t < nearest ? nearest - 1.0f : nearest;
}

// ---- formats; see the CPU's file for what they are --------------------------------------------------

template <int BITS_, bool SYMMETRIC_> struct Integer {
    static constexpr bool SYMMETRIC = SYMMETRIC_;
    static constexpr float RANGE = (float)((1 << (SYMMETRIC_ ? BITS_ - 1 : BITS_)) - 1);

    static __device__ __forceinline__ uint32_t encode(float t, bool stochastic, uint32_t random) {
        if (stochastic) t = round_random(t, random);
        const float low = SYMMETRIC ? -RANGE : 0.0f;
        t = RANGE < t ? RANGE : t;
        t = t < low ? low : t;
        return (__float_as_uint(t + MAGIC) - MAGIC_BITS) & ((1u << BITS_) - 1);
    }
    static __device__ __forceinline__ float decode(uint32_t code) {
        const int32_t sign = SYMMETRIC ? 1 << (BITS_ - 1) : 0;
        return (float)(((int32_t)code ^ sign) - sign);
    }
};

template <int MANTISSA, int BIAS, uint32_t TOP, uint32_t INFINITE> struct Float8 {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t REBIAS = (uint32_t)(127 - BIAS) << MANTISSA;
    static constexpr uint32_t SMALLEST = (uint32_t)(128 - BIAS) << 23;
    static constexpr float RANGE = MANTISSA == 3 ? 448.0f : 57344.0f;
    static constexpr float PER_STEP = MANTISSA == 3 ? 512.0f : 65536.0f;

    static __device__ __forceinline__ uint32_t encode(float t, bool stochastic, uint32_t random) {
        const uint32_t sign = __float_as_uint(t) >> 24 & 0x80u;
        if (t != t) return 0x7fu | sign;
        float a = fabsf(t);
        a = RANGE < a ? RANGE : a;
        const uint32_t b = __float_as_uint(a);
        if (b < SMALLEST) {
            const float scaled = a * PER_STEP, steps = stochastic ? round_random(scaled, random) : scaled;
            return (__float_as_uint(steps + MAGIC) - MAGIC_BITS) | sign;
        }
        const uint32_t extra = stochastic ? random >> (24 - SHIFT) : ((1u << (SHIFT - 1)) - 1) + (b >> SHIFT & 1);
        const uint32_t normal = ((b + extra) >> SHIFT) - REBIAS;
        return (TOP < normal ? TOP : normal) | sign;
    }
    static __device__ __forceinline__ float decode(uint32_t code) {
        const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
        uint32_t b;
        if (magnitude < (1u << MANTISSA)) b = __float_as_uint((float)(int32_t)magnitude * (1.0f / PER_STEP));
        else if (magnitude <= TOP) b = (magnitude + REBIAS) << SHIFT;
        else b = magnitude == INFINITE && INFINITE < 0x7fu ? 0x7f800000u : 0x7fc00000u;
        return __uint_as_float(b | sign);
    }
};
typedef Float8<3, 7, 0x7e, 0x7f> FloatE4M3;
typedef Float8<2, 15, 0x7b, 0x7c> FloatE5M2;

// f(format) with the format as a type.
template <class F> __host__ __device__ __forceinline__ void by_format(Format format, const F& f) {
    switch (format) {
        case INT8: return f(Integer<8, true>());
        case INT4: return f(Integer<4, true>());
        case INT8_ASYM: return f(Integer<8, false>());
        case INT4_ASYM: return f(Integer<4, false>());
        case E4M3: return f(FloatE4M3());
        default: return f(FloatE5M2());
    }
}
__host__ __device__ __forceinline__ bool halves(Format f) { return f == INT4 || f == INT4_ASYM; }
__host__ __device__ __forceinline__ bool has_zero(Format f) { return f == INT8_ASYM || f == INT4_ASYM; }
__device__ __forceinline__ float range_of(Format f) {
    float range = 0;
    by_format(f, [&](auto format) { range = decltype(format)::RANGE; });
    return range;
}

// ---- codes in memory --------------------------------------------------------------------------------

// N codes (4 or 8), one per byte of the words.
template <int N> struct Bytes {
    uint32_t w[N / 4];
};

// A word whose bytes are the nibbles of 16 bits, and back.
__device__ __forceinline__ uint32_t spread_nibbles(uint32_t packed) {
    return (packed & 0xfu) | (packed & 0xf0u) << 4 | (packed & 0xf00u) << 8 | (packed & 0xf000u) << 12;
}
__device__ __forceinline__ uint32_t join_nibbles(uint32_t word) {
    return (word & 0xfu) | (word >> 4 & 0xf0u) | (word >> 8 & 0xf00u) | (word >> 12 & 0xf000u);
}

// Codes of the elements i to i + n; 4 bits: i is even. `whole`: N of them, at an aligned address.
template <int N>
__device__ __forceinline__ Bytes<N> read_codes(bool four_bits, const char* codes, int64_t i, int n, bool whole) {
    Bytes<N> found = {};
    if (four_bits) {
        const char* from = codes + i / 2;
        uint32_t packed = 0;
        if (whole && N == 8) packed = fetch(reinterpret_cast<const uint32_t*>(from));
        else if (whole) packed = fetch(reinterpret_cast<const uint16_t*>(from));
        else
            for (int k = 0; k < N / 2; ++k)
                if (2 * k < n) packed |= (uint32_t)(uint8_t)fetch(from + k) << 8 * k;
        for (int j = 0; j < N / 4; ++j) found.w[j] = spread_nibbles(packed >> 16 * j);
    } else if (whole && N == 8) {
        const Words2 v = fetch(reinterpret_cast<const Words2*>(codes + i));
        found.w[0] = v.w[0];
        found.w[N / 4 - 1] = v.w[1];
    } else {
        for (int j = 0; j < N / 4; ++j) found.w[j] = load_bytes(codes, i + 4 * j, n - 4 * j, whole);
    }
    return found;
}
template <int N>
__device__ __forceinline__ void write_codes(bool four_bits, char* codes, int64_t i, int n, bool whole,
                                            const Bytes<N>& b) {
    if (four_bits) {
        char* to = codes + i / 2;
        uint32_t packed = join_nibbles(b.w[0]);
        if (N == 8) packed |= join_nibbles(b.w[N / 4 - 1]) << 16;
        if (whole && N == 8) return put(reinterpret_cast<uint32_t*>(to), packed);
        if (whole) return put(reinterpret_cast<uint16_t*>(to), (uint16_t)packed);
        for (int k = 0; k < N / 2; ++k)
            if (2 * k < n) put(to + k, (char)(uint8_t)(packed >> 8 * k));
    } else if (whole && N == 8) {
        put(reinterpret_cast<Words2*>(codes + i), Words2{{b.w[0], b.w[N / 4 - 1]}});
    } else {
        for (int j = 0; j < N / 4; ++j) store_bytes(codes, i + 4 * j, n - 4 * j, whole, b.w[j]);
    }
}
// Whether N codes from `at` on, and from all that lie multiples of N codes further, are aligned words.
template <int N> bool fits_codes(Format f, const void* at) { return fits(at, halves(f) ? N / 2 : N); }

template <int N> __device__ __forceinline__ Floats<N> decode_codes(Format format, const Bytes<N>& codes) {
    Floats<N> v;
    by_format(format, [&](auto f) {
        for (int k = 0; k < N; ++k) v.x[k] = decltype(f)::decode(codes.w[k / 4] >> 8 * (k % 4) & 0xffu);
    });
    return v;
}
// `first`: the index of the first element, for the random numbers.
template <int N>
__device__ __forceinline__ Bytes<N> encode_codes(const Quant& q, const Floats<N>& v, int n, float low, float inverse,
                                                 int64_t first) {
    Bytes<N> codes = {};
    by_format(q.format, [&](auto f) {
        typedef decltype(f) FORMAT;
        for (int k = 0; k < N; ++k) {
            if (k >= n) continue;
            const uint32_t random = q.stochastic ? Noise(q.seed, first + k).first >> 8 : 0;
            const float t = (has_zero(q.format) ? v.x[k] - low : v.x[k]) * inverse;
            codes.w[k / 4] |= FORMAT::encode(t, q.stochastic, random) << 8 * (k % 4);
        }
    });
    return codes;
}

// Where the groups of x lie among the codes; see Quant.
struct Places {
    bool moved;
    Divisor per_chunk, slice, devices;
    int64_t device_count, nodes;
    explicit Places(const Quant& q)
        : moved(q.slice != 0), per_chunk(moved ? q.slice * q.pipeline : 1), slice(moved ? q.slice : 1),
          devices(moved ? q.devices : 1), device_count(q.devices), nodes(q.nodes) {}
    __device__ __forceinline__ int64_t of(int64_t g) const {
        if (!moved) return g;
        const int64_t chunk = per_chunk.quotient(g), within = g - chunk * per_chunk.by;
        const int64_t node = devices.quotient(chunk), device = chunk - node * device_count;
        const int64_t part = slice.quotient(within);
        return ((part * device_count + device) * nodes + node) * slice.by + (within - part * slice.by);
    }
};

// ---- what is quantised ------------------------------------------------------------------------------

// A source gives WIDTH elements at a time: what it loads is `Kept`, and `values` makes numbers of it.
template <int WIDTH_> struct Tensor {
    static constexpr int WIDTH = WIDTH_;
    typedef Raw<WIDTH> Kept;
    DType dtype;
    const char* x;
    bool whole;
    __device__ __forceinline__ Kept read(int64_t i, int n) const {
        return load_raw<WIDTH>(narrowed<WIDTH>(dtype), x, i, n, n == WIDTH && whole);
    }
    __device__ __forceinline__ Floats<WIDTH> values(const Kept& kept) const {
        return decode(narrowed<WIDTH>(dtype), kept);
    }
};

// The sum over ranks of what their codes stand for.
struct Ranks {
    static constexpr int WIDTH = 8;
    typedef Floats<8> Kept;
    Format format;
    Divisor group;
    Codes codes;
    bool whole;  // eight elements, counted from the beginning, share a group, and their codes are aligned words

    template <int N, int RANKS_AT_ONCE> __device__ __forceinline__ Floats<N> sum(int64_t i, int n, bool words) const {
        const int64_t g = group.quotient(i);
        Floats<N> total = {};
#pragma unroll RANKS_AT_ONCE
        for (int64_t r = 0; r < codes.ranks; ++r) {
            const Bytes<N> bytes = read_codes<N>(halves(format), codes.codes + r * codes.code_stride, i, n, words);
            const float step = fetch(codes.scale + r * codes.scale_stride + g);
            const float zero = has_zero(format) ? fetch(codes.zero + r * codes.scale_stride + g) : 0.0f;
            const Floats<N> v = decode_codes<N>(format, bytes);
            for (int k = 0; k < N; ++k) {
                float term = v.x[k] * step;
                if (has_zero(format)) term = term + zero;
                total.x[k] = r == 0 ? term : total.x[k] + term;
            }
        }
        for (int k = 0; k < N; ++k) total.x[k] = total.x[k] * codes.factor;
        return total;
    }
    // One element; 4 bits: the pair is read.
    __device__ __forceinline__ float one(int64_t i) const {
        const int64_t even = halves(format) ? i / 2 * 2 : i;
        const Floats<4> pair = sum<4, 1>(even, (int)(i - even) + 1, false);
        return i == even ? pair.x[0] : pair.x[1];
    }
    __device__ __forceinline__ Kept read(int64_t i, int n) const {
        if (whole && n == WIDTH && i % WIDTH == 0) return sum<WIDTH, 4>(i, n, true);
        Kept v = {};
        for (int k = 0; k < n; ++k) {
            const float x = one(i + k);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                if (j == k) v.x[j] = x;  // a register cannot be chosen by a number
        }
        return v;
    }
    __device__ __forceinline__ Floats<WIDTH> values(const Kept& kept) const { return kept; }
};

// ---- kernels ----------------------------------------------------------------------------------------

constexpr int GROUP_THREADS = 256;  // of blocks whose warps have a group each
constexpr int KEPT = 16;            // elements of a group that a thread holds
constexpr int64_t WARP_GROUP = KEPT * WARP, HELD_GROUP = KEPT * THREADS;

template <class Team, int HELD, class Source>
__global__ void __launch_bounds__(THREADS, 1)
    quantize_groups(const Quant q, const Places places, const Source source, int64_t numel, char* codes, float* scale,
                    float* zero, bool whole_codes) {
    constexpr int WIDTH = Source::WIDTH, GROUPS = HELD / WIDTH;
    __shared__ float scratch[THREADS / WARP];
    const int64_t group = Team::first(), from = group * q.group;
    if (from >= numel) return;  // the whole team
    const int64_t to = numel - from < q.group ? numel : from + q.group, g = places.of(group),
                  shift = g * q.group - from;
    const int64_t own = from + WIDTH * Team::rank(), stride = WIDTH * Team::size();
    const bool symmetric = !has_zero(q.format);
    typename Source::Kept kept[HELD > 0 ? GROUPS : 1];
    float high = 0.0f, low = 0.0f;
    if (!symmetric) high = low = source.values(source.read(from, 1)).x[0];
    const auto widen = [&](const Floats<WIDTH>& v, int n) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            if (k >= n) continue;
            high = Largest()(high, symmetric ? fabsf(v.x[k]) : v.x[k]);
            if (!symmetric) low = Smallest()(low, v.x[k]);
        }
    };
    if constexpr (HELD > 0) {
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            if (own + j * stride < to) kept[j] = source.read(own + j * stride, count_of<WIDTH>(to, own + j * stride));
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            if (own + j * stride < to) widen(source.values(kept[j]), count_of<WIDTH>(to, own + j * stride));
    } else {
        for (int64_t i = own; i < to; i += stride) {
            const int n = count_of<WIDTH>(to, i);
            widen(source.values(source.read(i, n)), n);
        }
    }
    high = Team::all(high, Largest(), scratch);
    if (!symmetric) low = Team::all(low, Smallest(), scratch);
    const float step = (high - low) / range_of(q.format);
    if (Team::rank() == 0) {
        put(scale + g, step);
        if (!symmetric) put(zero + g, low);
    }
    const float inverse = step >= 1.1754944e-38f || step != step ? 1.0f / step : 0.0f;
    const auto write = [&](int64_t i, const typename Source::Kept& what) {
        const int n = count_of<WIDTH>(to, i);
        const Bytes<WIDTH> made = encode_codes<WIDTH>(q, source.values(what), n, low, inverse, q.offset + i);
        write_codes<WIDTH>(halves(q.format), codes, i + shift, n, n == WIDTH && whole_codes, made);
    };
    if constexpr (HELD > 0) {
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            if (own + j * stride < to) write(own + j * stride, kept[j]);
    } else {
        for (int64_t i = own; i < to; i += stride) write(i, source.read(i, count_of<WIDTH>(to, i)));
    }
}

constexpr int FLAT_THREADS = 256, TURNS = 4;  // a thread's loads of four turns are in flight together

struct Dequant {
    Format format;
    DType dtype;
    Divisor group;
    Places places;
    bool whole;  // WIDTH neighbours share a group, and all addresses are aligned
};
template <int WIDTH>
__global__ void __launch_bounds__(FLAT_THREADS, 4)
    dequantize_elements(const Dequant d, const char* codes, const float* scale, const float* zero, char* x,
                        int64_t numel) {
    const DType dtype = narrowed<WIDTH>(d.dtype);
    const int64_t first = WIDTH * ((int64_t)blockIdx.x * TURNS * FLAT_THREADS + threadIdx.x);
    Bytes<WIDTH> bytes[TURNS];
    float step[TURNS], base[TURNS];
    if (d.whole && first + WIDTH * ((TURNS - 1) * FLAT_THREADS + 1) <= numel) {
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const int64_t i = first + t * WIDTH * FLAT_THREADS, from = d.group.quotient(i), g = d.places.of(from);
            bytes[t] = read_codes<WIDTH>(halves(d.format), codes, i + (g - from) * d.group.by, WIDTH, true);
            step[t] = fetch(scale + g);
            base[t] = has_zero(d.format) ? fetch(zero + g) : 0.0f;
        }
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            Floats<WIDTH> v = decode_codes<WIDTH>(d.format, bytes[t]);
            for (int k = 0; k < WIDTH; ++k) {
                v.x[k] = v.x[k] * step[t];
                if (has_zero(d.format)) v.x[k] = v.x[k] + base[t];
            }
            store(dtype, x, first + t * WIDTH * FLAT_THREADS, WIDTH, true, v);
        }
        return;
    }
    // The end of the tensor, and groups that no word fits: one element after the other.
    for (int t = 0; t < TURNS; ++t) {
        const int64_t start = first + t * WIDTH * FLAT_THREADS;
        for (int64_t i = start; i < start + WIDTH && i < numel; ++i) {
            const int64_t from = d.group.quotient(i), g = d.places.of(from), at = i + (g - from) * d.group.by;
            uint32_t code = (uint8_t)fetch(codes + (halves(d.format) ? at / 2 : at));
            if (halves(d.format)) code = code >> 4 * (at % 2) & 0xfu;
            float v = decode_codes<4>(d.format, Bytes<4>{{code}}).x[0] * fetch(scale + g);
            if (has_zero(d.format)) v = v + fetch(zero + g);
            store1(dtype, x, i, v);
        }
    }
}

__global__ void __launch_bounds__(FLAT_THREADS) add_ranks(const Ranks ranks, float* out, int64_t numel, bool whole) {
    const int64_t i = Ranks::WIDTH * ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x);
    if (i >= numel) return;
    const int n = count_of<Ranks::WIDTH>(numel, i);
    store(F32, reinterpret_cast<char*>(out), i, n, whole && n == Ranks::WIDTH, ranks.read(i, n));
}

// ---- start ------------------------------------------------------------------------------------------

// f(team, elements held per thread (0: none), blocks, threads)
template <class F> void by_group(const Quant& q, int64_t numel, const F& f) {
    const int64_t groups = (numel + q.group - 1) / q.group, per_block = GROUP_THREADS / WARP;
    const int64_t blocks = (groups + per_block - 1) / per_block;
    const int fitting = (int)((q.group < HELD_GROUP ? q.group : HELD_GROUP) + WARP_GROUP - 1) / WARP_GROUP * WARP;
    if (q.group <= WARP_GROUP) f(WarpTeam(), std::integral_constant<int, KEPT>(), blocks, GROUP_THREADS);
    else if (q.group <= HELD_GROUP) f(BlockTeam(), std::integral_constant<int, KEPT>(), groups, fitting);
    else f(BlockTeam(), std::integral_constant<int, 0>(), groups, THREADS);
}

template <class Source>
void start_quantize(const Where& where, const Quant& q, const Source& source, int64_t numel, char* codes, float* scale,
                    float* zero) {
    const bool whole = q.group % Source::WIDTH == 0 && fits_codes<Source::WIDTH>(q.format, codes);
    by_group(q, numel, [&](auto team, auto held, int64_t blocks, int threads) {
        launch(where, quantize_groups<decltype(team), decltype(held)::value, Source>, blocks, threads, q, Places(q),
               source, numel, codes, scale, zero, whole);
    });
}
Ranks ranks_of(const Quant& q, const Codes& from) {
    const int64_t words = halves(q.format) ? Ranks::WIDTH / 2 : Ranks::WIDTH;
    const bool whole =
        q.group % Ranks::WIDTH == 0 && fits_codes<Ranks::WIDTH>(q.format, from.codes) && from.code_stride % words == 0;
    return {q.format, Divisor(q.group), from, whole};
}
int64_t blocks_for(int64_t numel, int64_t per_block) { return (numel + per_block - 1) / per_block; }

}  // namespace

void quantize(const Where& where, const Quant& q, const char* x, int64_t numel, char* codes, float* scale,
              float* zero) {
    OnDevice on(where);
    by_width(q.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const bool whole = q.group % WIDTH == 0 && fits_words<WIDTH>(x, q.dtype);
        start_quantize(where, q, Tensor<WIDTH>{q.dtype, x, whole}, numel, codes, scale, zero);
    });
}

void dequantize(const Where& where, const Quant& q, const char* codes, const float* scale, const float* zero, char* x,
                int64_t numel) {
    OnDevice on(where);
    by_width(q.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const bool whole = q.group % WIDTH == 0 && fits_words<WIDTH>(x, q.dtype) && fits_codes<WIDTH>(q.format, codes);
        const Dequant d{q.format, q.dtype, Divisor(q.group), Places(q), whole};
        launch(where, dequantize_elements<WIDTH>, blocks_for(numel, WIDTH * TURNS * FLAT_THREADS), FLAT_THREADS, d,
               codes, scale, zero, x, numel);
    });
}

void reduce_codes(const Where& where, const Quant& q, const Codes& from, int64_t numel, float* out) {
    OnDevice on(where);
    launch(where, add_ranks, blocks_for(numel, Ranks::WIDTH * FLAT_THREADS), FLAT_THREADS, ranks_of(q, from), out,
           numel, fits(out, 16));
}

void requantize(const Where& where, const Quant& q, const Codes& from, int64_t numel, const Quant& to, char* codes,
                float* scale, float* zero) {
    OnDevice on(where);
    start_quantize(where, to, ranks_of(q, from), numel, codes, scale, zero);
}

}  // namespace cuda
}  // namespace dsx
