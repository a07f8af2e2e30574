// Elements in memory and in registers: four neighbours at a time, in any of the dtypes, computed with in fp32.
//
// Loads come first and conversions after, so that a thread has all its loads in flight at once. Conversions give the bits of the CPU
// kernels (NaN becomes the quiet NaN).
#pragma once
#include "dsx_ops/kernels.h"
#include "launch.cuh"
#ifndef DSX_CUDA_EMULATED
#include <cuda_fp16.h>
#endif

namespace dsx {
namespace cuda {

struct alignas(16) Words4 { uint32_t w[4]; };
struct alignas(8) Words2 { uint32_t w[2]; };
struct Float4 { float x[4]; };
// Four elements as they lie in memory; 16-bit ones in the first two words.
struct Raw { uint32_t w[4]; };

__host__ __device__ __forceinline__ constexpr int size_of(DType t) { return t == NONE ? 0 : t == F32 ? 4 : 2; }

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
__device__ __forceinline__ uint16_t float_to_bits16(DType t, float f) { return t == F16 ? float_to_half_bits(f) : float_to_bf16_bits(f); }

__device__ __forceinline__ float load1(DType t, const char* base, int64_t i) {
    if (t == F32) return reinterpret_cast<const float*>(base)[i];
    return bits16_to_float(t, reinterpret_cast<const uint16_t*>(base)[i]);
}
__device__ __forceinline__ void store1(DType t, char* base, int64_t i, float value) {
    if (t == F32) reinterpret_cast<float*>(base)[i] = value;
    else reinterpret_cast<uint16_t*>(base)[i] = float_to_bits16(t, value);
}

// `n` (1 to 4) elements from `i` on; the rest is zero. `whole`: four of them, at an aligned address.
__device__ __forceinline__ Raw load_raw(DType t, const char* base, int64_t i, int n, bool whole) {
    Raw raw = {};
    if (t == F32) {
        if (whole) {
            const Words4 v = *reinterpret_cast<const Words4*>(base + 4 * i);
            for (int k = 0; k < 4; ++k) raw.w[k] = v.w[k];
        } else {
            for (int k = 0; k < 4; ++k)
                if (k < n) raw.w[k] = reinterpret_cast<const uint32_t*>(base)[i + k];
        }
    } else if (whole) {
        const Words2 v = *reinterpret_cast<const Words2*>(base + 2 * i);
        raw.w[0] = v.w[0];
        raw.w[1] = v.w[1];
    } else {
        for (int k = 0; k < 4; ++k)
            if (k < n) raw.w[k / 2] |= (uint32_t)reinterpret_cast<const uint16_t*>(base)[i + k] << 16 * (k % 2);
    }
    return raw;
}
__device__ __forceinline__ void store_raw(DType t, char* base, int64_t i, int n, bool whole, const Raw& raw) {
    if (t == F32) {
        if (whole) {
            Words4 v;
            for (int k = 0; k < 4; ++k) v.w[k] = raw.w[k];
            *reinterpret_cast<Words4*>(base + 4 * i) = v;
        } else {
            for (int k = 0; k < 4; ++k)
                if (k < n) reinterpret_cast<uint32_t*>(base)[i + k] = raw.w[k];
        }
    } else if (whole) {
        *reinterpret_cast<Words2*>(base + 2 * i) = {{raw.w[0], raw.w[1]}};
    } else {
        for (int k = 0; k < 4; ++k)
            if (k < n) reinterpret_cast<uint16_t*>(base)[i + k] = (uint16_t)(raw.w[k / 2] >> 16 * (k % 2));
    }
}

__device__ __forceinline__ uint16_t half_of(const Raw& raw, int k) { return (uint16_t)(raw.w[k / 2] >> 16 * (k % 2)); }

__device__ __forceinline__ Float4 decode(DType t, const Raw& raw) {
    Float4 f;
    for (int k = 0; k < 4; ++k) f.x[k] = t == F32 ? __uint_as_float(raw.w[k]) : bits16_to_float(t, half_of(raw, k));
    return f;
}
__device__ __forceinline__ Raw encode(DType t, const Float4& f) {
    Raw raw = {};
    for (int k = 0; k < 4; ++k) {
        if (t == F32) raw.w[k] = __float_as_uint(f.x[k]);
        else raw.w[k / 2] |= (uint32_t)float_to_bits16(t, f.x[k]) << 16 * (k % 2);
    }
    return raw;
}
__device__ __forceinline__ Float4 load4(DType t, const char* base, int64_t i, int n, bool whole) { return decode(t, load_raw(t, base, i, n, whole)); }
__device__ __forceinline__ void store4(DType t, char* base, int64_t i, int n, bool whole, const Float4& f) {
    store_raw(t, base, i, n, whole, encode(t, f));
}

// Four bytes.
__device__ __forceinline__ uint32_t load_bytes(const char* base, int64_t i, int n, bool whole) {
    if (whole) return *reinterpret_cast<const uint32_t*>(base + i);
    uint32_t word = 0;
    for (int k = 0; k < 4; ++k)
        if (k < n) word |= (uint32_t)reinterpret_cast<const uint8_t*>(base)[i + k] << 8 * k;
    return word;
}
__device__ __forceinline__ void store_bytes(char* base, int64_t i, int n, bool whole, uint32_t word) {
    if (whole) {
        *reinterpret_cast<uint32_t*>(base + i) = word;
        return;
    }
    for (int k = 0; k < 4; ++k)
        if (k < n) reinterpret_cast<uint8_t*>(base)[i + k] = (uint8_t)(word >> 8 * k);
}

inline bool fits(const void* at, int alignment) { return (reinterpret_cast<uintptr_t>(at) & (uintptr_t)(alignment - 1)) == 0; }

// bf16 weights completed to fp32 masters by 16 low bits; see native/include/dsx_ops/tiles.h.
__device__ __forceinline__ Float4 join(const Raw& weight, const Raw& low) {
    Float4 f;
    for (int k = 0; k < 4; ++k) f.x[k] = __uint_as_float(((uint32_t)half_of(weight, k) << 16) + (uint32_t)(int32_t)(int16_t)half_of(low, k));
    return f;
}
__device__ __forceinline__ void split(const Float4& master, Raw& weight, Raw& low) {
    weight = low = Raw{};
    for (int k = 0; k < 4; ++k) {
        const uint32_t b = master.x[k] != master.x[k] ? 0x7fc00000u : __float_as_uint(master.x[k]);
        weight.w[k / 2] |= (b + 0x8000u) >> 16 << 16 * (k % 2);
        low.w[k / 2] |= (b & 0xffffu) << 16 * (k % 2);
    }
}

// ---- noise: a hash of seed and element index, the same on every device ------------------------------------------------------

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
