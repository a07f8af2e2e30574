// Compiled once per instruction set (namespace DSX_ISA). Plain loops that the compiler vectorises; blocks stay in the
// L1 cache.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "dsx_comm/kernels.h"
#include "dsx_native/half.h"
#if defined(DSX_ISA_AVX2) || defined(DSX_ISA_AVX512)
#include <immintrin.h>
#define DSX_WIDE 1
#elif defined(DSX_X86)
#include <emmintrin.h>
#endif

namespace dsx {
namespace DSX_ISA {
namespace {

using namespace dsx_native;

constexpr int64_t BLOCK = 1024;  // elements

void copy(void* dst, const void* src, size_t bytes, bool stream) {
#if defined(DSX_X86)
    if (stream && bytes >= 512) {
        auto* d = static_cast<char*>(dst);
        auto* s = static_cast<const char*>(src);
        size_t head = (64 - (reinterpret_cast<uintptr_t>(d) & 63)) & 63;
        std::memcpy(d, s, head);
        d += head, s += head, bytes -= head;
        size_t body = bytes & ~size_t{63};
        for (size_t i = 0; i < body; i += 64) {
            _mm_prefetch(s + i + 1024, _MM_HINT_T0);
#if defined(DSX_WIDE)
            __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i));
            __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i + 32));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(d + i), a);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(d + i + 32), b);
#else
            for (int k = 0; k < 64; k += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(d + i + k),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i + k)));
#endif
        }
        std::memcpy(d + body, s + body, bytes - body);
        return;
    }
#else
    (void)stream;
#endif
    if (bytes != 0) std::memcpy(dst, src, bytes);
}

// 16-bit floats
struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

void widen(const Bf16* in, float* out, int64_t n) { widen_row<BFLOAT16>(&in->bits, out, n); }
void widen(const F16* in, float* out, int64_t n) { widen_row<FLOAT16>(&in->bits, out, n); }
void narrow(const float* in, Bf16* out, int64_t n) { narrow_row<BFLOAT16>(in, &out->bits, n); }
void narrow(const float* in, F16* out, int64_t n) { narrow_row<FLOAT16>(in, &out->bits, n); }

struct Sum {
    template <class T> static T apply(T a, T b) { return add(a, b, std::is_integral<T>{}); }
    // unsigned arithmetic: integers wrap around, as torch's do
    template <class T> static T add(T a, T b, std::true_type) {
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    }
    template <class T> static T add(T a, T b, std::false_type) { return a + b; }
};
struct Product {
    template <class T> static T apply(T a, T b) { return mul(a, b, std::is_integral<T>{}); }
    template <class T> static T mul(T a, T b, std::true_type) {
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    }
    template <class T> static T mul(T a, T b, std::false_type) { return a * b; }
};
// NaN wins, as in torch.minimum and torch.maximum
struct Min {
    template <class T> static T apply(T a, T b) { return ((a < b) | (a != a)) ? a : b; }
};
struct Max {
    template <class T> static T apply(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
};
struct And {
    template <class T> static T apply(T a, T b) { return static_cast<T>(a & b); }
};
struct Or {
    template <class T> static T apply(T a, T b) { return static_cast<T>(a | b); }
};
struct Xor {
    template <class T> static T apply(T a, T b) { return static_cast<T>(a ^ b); }
};

template <class T> void divide(T* values, double by, int64_t n) {
    if (by == 1.0) return;
    const auto whole = static_cast<int64_t>(by);
    const bool exact =
        static_cast<double>(whole) == by && (whole & (whole - 1)) == 0;  // by a power of two: the same bits
    if (exact && !std::is_integral<T>::value) {
        const T factor = static_cast<T>(1.0 / by);
        for (int64_t i = 0; i < n; i++) values[i] = static_cast<T>(values[i] * factor);
    } else {
        const T divisor = static_cast<T>(by);
        for (int64_t i = 0; i < n; i++) values[i] = static_cast<T>(values[i] / divisor);
    }
}

// to[i] = x[i] op y[i]; `to` may be x or y. What the compiler is told not to fear would cost half of the speed.
template <class Op, class T> void pair(T* to, const T* x, const T* y, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) to[i] = Op::apply(x[i], y[i]);
}

template <class T> void scale(T* to, const T* from, T factor, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) to[i] = Product::apply(from[i], factor);
}

// One block, T is what lies in memory and what is computed in: into = sources in order. Only the last step writes to
// `into`, which may be any of the sources.
template <class Op, class T> void accumulate(T* into, const ReduceArgs& a, int64_t at, int64_t n) {
    alignas(64) T acc[BLOCK], scaled[BLOCK];
    auto source = [&](int r, T* place) {
        const T* from = static_cast<const T*>(a.sources[r]) + at;
        if (a.premultiply == 1.0) return from;
        scale(place, from, static_cast<T>(a.premultiply), n);
        return static_cast<const T*>(place);
    };
    const T* sum = source(0, acc);
    for (int r = 1; r < a.nsources; r++) {
        T* to = r == a.nsources - 1 ? into : acc;
        pair<Op, T>(to, sum, source(r, scaled), n);
        sum = to;
    }
    if (sum != into) std::memmove(into, sum, static_cast<size_t>(n) * sizeof(T));  // one source
}

#if defined(DSX_X86)
// A register: vectors of the compiler, on which the operations above work as on numbers.
#if defined(DSX_ISA_AVX512)
constexpr int64_t WIDTH = 64;
inline void stream_one(void* to, __m512i v) { _mm512_stream_si512(static_cast<__m512i*>(to), v); }
using Register = __m512i;
#elif defined(DSX_ISA_AVX2)
constexpr int64_t WIDTH = 32;
inline void stream_one(void* to, __m256i v) { _mm256_stream_si256(static_cast<__m256i*>(to), v); }
using Register = __m256i;
#else
constexpr int64_t WIDTH = 16;
inline void stream_one(void* to, __m128i v) { _mm_stream_si128(static_cast<__m128i*>(to), v); }
using Register = __m128i;
#endif

// Two sources past the cache, from register to memory: by way of a block in the cache it takes an eighth to a third
// longer. `factor`: of floats, at the end. `to` is aligned as a T is.
template <class Op, class T> void stream_pair(T* to, const T* x, const T* y, T factor, int64_t n) {
    constexpr bool wraps =
        std::is_integral<T>::value && (std::is_same<Op, Sum>::value || std::is_same<Op, Product>::value);
    using Element = typename std::conditional<wraps, std::make_unsigned<T>, std::enable_if<true, T>>::type::type;
    typedef Element Vector __attribute__((vector_size(WIDTH)));
    constexpr auto step = WIDTH / static_cast<int64_t>(sizeof(T));
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) & (WIDTH - 1));
    const int64_t head = std::min(n, (WIDTH - misaligned) % WIDTH / static_cast<int64_t>(sizeof(T)));
    auto plainly = [&](int64_t from, int64_t until) {
        for (int64_t i = from; i < until; i++) {
            to[i] = Op::apply(x[i], y[i]);
            if (factor != T(1)) to[i] = static_cast<T>(to[i] * factor);
        }
    };
    plainly(0, head);
    int64_t i = head;
    for (; i + step <= n; i += step) {
        Vector a, b;
        std::memcpy(&a, x + i, WIDTH);
        std::memcpy(&b, y + i, WIDTH);
        Vector v = Op::apply(a, b);
        if (factor != T(1)) v = v * static_cast<Element>(factor);
        stream_one(to + i, (Register)v);
    }
    plainly(i, n);
}

// The factor that a division by a power of two is; 0: no such.
template <class T> T factor_of(double divide) {
    if (divide == 1.0) return T(1);
    return !std::is_integral<T>::value && divide == 2.0 ? static_cast<T>(0.5) : T(0);
}
#endif

template <class Op, class T> void reduce(const ReduceArgs& a) {
#if defined(DSX_X86)
    const T factor = factor_of<T>(a.divide);
    const bool aligned = reinterpret_cast<uintptr_t>(a.dst) % sizeof(T) == 0;
    if (a.stream && aligned && a.nsources == 2 && a.premultiply == 1.0 && factor != T(0)) {
        auto source = [&](int r) { return static_cast<const T*>(a.sources[r]); };
        return stream_pair<Op, T>(static_cast<T*>(a.dst), source(0), source(1), factor, a.count);
    }
#endif
    alignas(64) T block[BLOCK];
    for (int64_t at = 0; at < a.count; at += BLOCK) {
        const int64_t n = a.count - at < BLOCK ? a.count - at : BLOCK;
        T* dst = static_cast<T*>(a.dst) + at;
        T* into = a.stream ? block : dst;  // in the L1 cache either way
        accumulate<Op, T>(into, a, at, n);
        divide(into, a.divide, n);
        if (a.stream) copy(dst, block, static_cast<size_t>(n) * sizeof(T), true);
    }
}

template <class Op, class T> void reduce16(const ReduceArgs& a) {
    alignas(64) float acc[BLOCK], next[BLOCK];
    alignas(64) T out[BLOCK];
    const float premultiply = static_cast<float>(a.premultiply);
    for (int64_t at = 0; at < a.count; at += BLOCK) {
        int64_t n = a.count - at < BLOCK ? a.count - at : BLOCK;
        for (int r = 0; r < a.nsources; r++) {
            float* into = r == 0 ? acc : next;
            widen(static_cast<const T*>(a.sources[r]) + at, into, n);
            if (a.premultiply != 1.0)
                for (int64_t i = 0; i < n; i++) into[i] *= premultiply;
            if (r > 0)
                for (int64_t i = 0; i < n; i++) acc[i] = Op::apply(acc[i], next[i]);
        }
        divide(acc, a.divide, n);
        narrow(acc, out, n);
        copy(static_cast<T*>(a.dst) + at, out, static_cast<size_t>(n) * sizeof(T), a.stream);
    }
}

template <class T> void fill_integers(ReduceFn* row) {
    row[0] = reduce<Sum, T>, row[1] = reduce<Product, T>, row[2] = reduce<Min, T>, row[3] = reduce<Max, T>;
    row[4] = reduce<And, T>, row[5] = reduce<Or, T>, row[6] = reduce<Xor, T>;
}
template <class T> void fill_floats(ReduceFn* row) {
    row[0] = reduce<Sum, T>, row[1] = reduce<Product, T>, row[2] = reduce<Min, T>, row[3] = reduce<Max, T>;
}
template <class T> void fill_short_floats(ReduceFn* row) {
    row[0] = reduce16<Sum, T>, row[1] = reduce16<Product, T>, row[2] = reduce16<Min, T>, row[3] = reduce16<Max, T>;
}

Kernels make() {
    Kernels k{};
#define DSX_TEXT2(x) #x
#define DSX_TEXT(x) DSX_TEXT2(x)
    k.name = DSX_TEXT(DSX_ISA);
    k.copy = copy;
    fill_floats<float>(k.reduce[0]);
    fill_floats<double>(k.reduce[1]);
    fill_short_floats<Bf16>(k.reduce[2]);
    fill_short_floats<F16>(k.reduce[3]);
    fill_integers<int8_t>(k.reduce[4]);
    fill_integers<uint8_t>(k.reduce[5]);
    fill_integers<int16_t>(k.reduce[6]);
    fill_integers<int32_t>(k.reduce[7]);
    fill_integers<int64_t>(k.reduce[8]);
    return k;
}

}  // namespace

extern const Kernels table;
const Kernels table = make();

}  // namespace DSX_ISA
}  // namespace dsx
