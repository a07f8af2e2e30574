// Elements in memory and in registers: N neighbours at a time, in any of the dtypes, computed with in fp32.
//
// Memory is read and written in words of 16 bytes where addresses allow it: four fp32 elements, or eight of 16 bits.
// Loads come first and conversions after, so that a thread has all its loads in flight at once. Conversions give the
// bits of the CPU kernels (NaN becomes the quiet NaN).
#pragma once
#include <type_traits>

#include "dsx_ops/kernels.h"
#include "launch.cuh"
#ifndef DSX_CUDA_EMULATED
#include <cuda_fp16.h>
#endif

namespace dsx {
namespace cuda {

struct alignas(16) Words4 {
    uint32_t w[4];
};
struct alignas(8) Words2 {
    uint32_t w[2];
};
template <int N> struct Floats {
    float x[N];
};
// N elements as they lie in memory; 16-bit ones in the first N / 2 words.
template <int N> struct Raw {
    uint32_t w[N];
};

// Every access to device memory goes through these two, so that the emulator can count them.
template <class T> __device__ __forceinline__ T fetch(const T* at) {
#ifdef DSX_CUDA_EMULATED
    emu::Machine::get().note_access(at, sizeof(T), false);
#endif
    return *at;
}
template <class T> __device__ __forceinline__ void put(T* at, const T& value) {
#ifdef DSX_CUDA_EMULATED
    emu::Machine::get().note_access(at, sizeof(T), true);
#endif
    *at = value;
}

// The compiler loads again what it has loaded before: what could be loaded again cheaply, out of the cache, does not
// occupy registers in the meantime.
__device__ __forceinline__ void forget_loads() { asm volatile("" ::: "memory"); }

__host__ __device__ __forceinline__ constexpr int size_of(DType t) { return t == NONE ? 0 : t == F32 ? 4 : 2; }
// Elements that 16 bytes hold.
__host__ __device__ __forceinline__ constexpr int width_of(DType t) { return t == F32 ? 4 : 8; }
// f(width): the number of elements that 16 bytes of this dtype hold, as a type.
template <class F> void by_width(DType t, F f) {
    if (t == F32) f(std::integral_constant<int, 4>());
    else f(std::integral_constant<int, 8>());
}
// The dtype of a kernel whose width is fixed: the compiler then drops the branches of the other dtypes.
template <int WIDTH> __device__ __forceinline__ DType narrowed(DType t) {
    if constexpr (WIDTH == 4) return F32;
    return t == F16 ? F16 : BF16;
}
inline bool fits(const void* at, int alignment) {
    return (reinterpret_cast<uintptr_t>(at) & (uintptr_t)(alignment - 1)) == 0;
}
// Whether groups of N elements, counted from `at`, can be read and written as whole words.
template <int N> bool fits_words(const void* at, DType t) { return fits(at, t == F32 ? 16 : 2 * N); }

__device__ __forceinline__ float half_bits_to_float(uint16_t h) {
#ifdef DSX_CUDA_EMULATED
    return emu_half_to_float(h);
#else
    return __half2float(__ushort_as_half(h));
#endif
}
__device__ __forceinline__ uint16_t float_to_half_bits(float f) {
#ifdef DSX_CUDA_EMULATED
    return emu_float_to_half(f);
#else
    return __half_as_ushort(__float2half_rn(f));
#endif
}
__device__ __forceinline__ uint16_t float_to_bf16_bits(float f) {
    const uint32_t b = __float_as_uint(f);
    if (f != f) return 0x7fc0;
    return (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
__device__ __forceinline__ float bits16_to_float(DType t, uint16_t h) {
    return t == F16 ? half_bits_to_float(h) : __uint_as_float((uint32_t)h << 16);
}
__device__ __forceinline__ uint16_t float_to_bits16(DType t, float f) {
    return t == F16 ? float_to_half_bits(f) : float_to_bf16_bits(f);
}

__device__ __forceinline__ float load1(DType t, const char* base, int64_t i) {
    if (t == F32) return fetch(reinterpret_cast<const float*>(base) + i);
    return bits16_to_float(t, fetch(reinterpret_cast<const uint16_t*>(base) + i));
}
__device__ __forceinline__ void store1(DType t, char* base, int64_t i, float value) {
    if (t == F32) put(reinterpret_cast<float*>(base) + i, value);
    else put(reinterpret_cast<uint16_t*>(base) + i, float_to_bits16(t, value));
}

// `n` (0 to N) elements from `i` on; the rest is zero. `whole`: N of them, and the address fits (fits_words).
template <int N> __device__ __forceinline__ Raw<N> load_raw(DType t, const char* base, int64_t i, int n, bool whole) {
    static_assert(N == 4 || N == 8, "16 bytes of one dtype or another");
    Raw<N> raw = {};
    if (t == F32) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(base) + i;
        if (whole) {
#pragma unroll
            for (int j = 0; j < N / 4; ++j) {
                const Words4 v = fetch(reinterpret_cast<const Words4*>(from) + j);
                for (int k = 0; k < 4; ++k) raw.w[4 * j + k] = v.w[k];
            }
        } else {
#pragma unroll
            for (int k = 0; k < N; ++k)
                if (k < n) raw.w[k] = fetch(from + k);
        }
        return raw;
    }
    const uint16_t* from = reinterpret_cast<const uint16_t*>(base) + i;
    if (whole) {
        if constexpr (N == 8) {
            const Words4 v = fetch(reinterpret_cast<const Words4*>(from));
            for (int k = 0; k < 4; ++k) raw.w[k] = v.w[k];
        } else {
            const Words2 v = fetch(reinterpret_cast<const Words2*>(from));
            raw.w[0] = v.w[0];
            raw.w[1] = v.w[1];
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k < n) raw.w[k / 2] |= (uint32_t)fetch(from + k) << 16 * (k % 2);
    }
    return raw;
}
template <int N>
__device__ __forceinline__ void store_raw(DType t, char* base, int64_t i, int n, bool whole, const Raw<N>& raw) {
    if (t == F32) {
        uint32_t* to = reinterpret_cast<uint32_t*>(base) + i;
        if (whole) {
#pragma unroll
            for (int j = 0; j < N / 4; ++j) {
                Words4 v;
                for (int k = 0; k < 4; ++k) v.w[k] = raw.w[4 * j + k];
                put(reinterpret_cast<Words4*>(to) + j, v);
            }
        } else {
#pragma unroll
            for (int k = 0; k < N; ++k)
                if (k < n) put(to + k, raw.w[k]);
        }
        return;
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(base) + i;
    if (whole) {
        if constexpr (N == 8) put(reinterpret_cast<Words4*>(to), Words4{{raw.w[0], raw.w[1], raw.w[2], raw.w[3]}});
        else put(reinterpret_cast<Words2*>(to), Words2{{raw.w[0], raw.w[1]}});
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k < n) put(to + k, (uint16_t)(raw.w[k / 2] >> 16 * (k % 2)));
    }
}

template <int N> __device__ __forceinline__ uint16_t half_of(const Raw<N>& raw, int k) {
    return (uint16_t)(raw.w[k / 2] >> 16 * (k % 2));
}

template <int N> __device__ __forceinline__ Floats<N> decode(DType t, const Raw<N>& raw) {
    Floats<N> f;
#pragma unroll
    for (int k = 0; k < N; ++k) f.x[k] = t == F32 ? __uint_as_float(raw.w[k]) : bits16_to_float(t, half_of(raw, k));
    return f;
}
template <int N> __device__ __forceinline__ Raw<N> encode(DType t, const Floats<N>& f) {
    Raw<N> raw = {};
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if (t == F32) raw.w[k] = __float_as_uint(f.x[k]);
        else raw.w[k / 2] |= (uint32_t)float_to_bits16(t, f.x[k]) << 16 * (k % 2);
    }
    return raw;
}
template <int N> __device__ __forceinline__ Floats<N> load(DType t, const char* base, int64_t i, int n, bool whole) {
    return decode(t, load_raw<N>(t, base, i, n, whole));
}
template <int N>
__device__ __forceinline__ void store(DType t, char* base, int64_t i, int n, bool whole, const Floats<N>& f) {
    store_raw(t, base, i, n, whole, encode(t, f));
}

// Four bytes.
__device__ __forceinline__ uint32_t load_bytes(const char* base, int64_t i, int n, bool whole) {
    if (whole) return fetch(reinterpret_cast<const uint32_t*>(base + i));
    uint32_t word = 0;
    for (int k = 0; k < 4; ++k)
        if (k < n) word |= (uint32_t)fetch(reinterpret_cast<const uint8_t*>(base) + i + k) << 8 * k;
    return word;
}
__device__ __forceinline__ void store_bytes(char* base, int64_t i, int n, bool whole, uint32_t word) {
    if (whole) return put(reinterpret_cast<uint32_t*>(base + i), word);
    for (int k = 0; k < 4; ++k)
        if (k < n) put(reinterpret_cast<uint8_t*>(base) + i + k, (uint8_t)(word >> 8 * k));
}

// How many of N elements from i on lie before `end`; none when i is behind it.
template <int N> __device__ __forceinline__ int count_of(int64_t end, int64_t i) {
    return end - i >= N ? N : end > i ? (int)(end - i) : 0;
}

// bf16 weights completed to fp32 masters by 16 low bits; see native/include/dsx_ops/tiles.h.
template <int N> __device__ __forceinline__ Floats<N> join(const Raw<N>& weight, const Raw<N>& low) {
    Floats<N> f;
#pragma unroll
    for (int k = 0; k < N; ++k)
        f.x[k] = __uint_as_float(((uint32_t)half_of(weight, k) << 16) + (uint32_t)(int32_t)(int16_t)half_of(low, k));
    return f;
}
template <int N> __device__ __forceinline__ void split(const Floats<N>& master, Raw<N>& weight, Raw<N>& low) {
    weight = low = Raw<N>{};
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const uint32_t b = master.x[k] != master.x[k] ? 0x7fc00000u : __float_as_uint(master.x[k]);
        weight.w[k / 2] |= (b + 0x8000u) >> 16 << 16 * (k % 2);
        low.w[k / 2] |= (b & 0xffffu) << 16 * (k % 2);
    }
}

// ---- division by a number that is known at the launch -----------------------------------------------

// A 64-bit division costs about a hundred instructions. Numbers below 2^31 are divided by a multiplication and a shift
// (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994), larger ones as usual.
struct Divisor {
    int64_t by;
    uint32_t magic, shift;

    Divisor() : by(1), magic(1), shift(0) {}
    explicit Divisor(int64_t divisor) : by(divisor), magic(0), shift(0) {
        if (by < 1 || by > LIMIT) return;
        while (((int64_t)1 << shift) < by) ++shift;
        magic = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << shift) - (uint64_t)by)) / (uint64_t)by + 1);
    }
    __device__ __forceinline__ int64_t quotient(int64_t n) const {
        if ((n | by) > LIMIT) return n / by;
        const uint32_t high = (uint32_t)(((uint64_t)(uint32_t)n * magic) >> 32);
        return (int64_t)((high + (uint32_t)n) >> shift);
    }
    static constexpr int64_t LIMIT = 0x7fffffff;
};

// ---- noise: a hash of seed and element index, the same on every device ------------------------------

__device__ __forceinline__ uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
struct Noise {
    uint32_t first, second;
    __device__ __forceinline__ Noise(uint32_t seed, int64_t index) {
        const uint32_t high = (uint32_t)((uint64_t)index >> 32);
        first = mix((uint32_t)index ^ (seed + high * 0x9e3779b9u));
        second = first * 0x9e3779b1u;
    }
};

}  // namespace cuda
}  // namespace dsx
