// Streams of a kernel in first-level-cache tiles, conversions between dtypes, and noise; compiled per instruction set.
#pragma once
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

// ---- tiles --------------------------------------------------------------------------------------------------------
//
// A tile is a stretch of a row that stays in the first-level cache. Streams that are fp32 are worked on where they lie; others
// are converted into fp32 tiles and back. So there is one fp32 kernel per algorithm, not one per combination of dtypes.

constexpr int64_t TILE = 512;
constexpr int size_of(DType t) { return t == NONE ? 0 : t == F32 ? 4 : 2; }

template <DType FROM, DType TO>
void map(const char* in, char* out, int64_t n, F factor, bool scaled) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F x = Access<FROM>::load(in, i);
        Access<TO>::store(out, i, scaled ? x * factor : x);
    }
    if (i < n) {
        alignas(64) char from[64] = {}, to[64];
        __builtin_memcpy(from, in + i * Access<FROM>::SIZE, (n - i) * Access<FROM>::SIZE);
        F x = Access<FROM>::load(from, 0);
        Access<TO>::store(to, 0, scaled ? x * factor : x);
        __builtin_memcpy(out + i * Access<TO>::SIZE, to, (n - i) * Access<TO>::SIZE);
    }
}

template <DType FROM> void map_from(const char* in, DType to, char* out, int64_t n, F factor, bool scaled) {
    if (to == BF16) return map<FROM, BF16>(in, out, n, factor, scaled);
    if (to == F16) return map<FROM, F16>(in, out, n, factor, scaled);
    map<FROM, F32>(in, out, n, factor, scaled);
}

void convert_n(DType from, const char* in, DType to, char* out, int64_t n) {
    if (from == BF16) return map_from<BF16>(in, to, out, n, splat(1.0f), false);
    if (from == F16) return map_from<F16>(in, to, out, n, splat(1.0f), false);
    map_from<F32>(in, to, out, n, splat(1.0f), false);
}

// bf16 weights whose fp32 masters are completed by 16 low bits kept elsewhere. The weight is the master rounded to
// nearest, ties away from zero: that gives 65536 masters to every weight, so 16 bits always complete it. (With ties to
// even it would be 65537 for even weights.)
DSX_INLINE void join(const char* weight, const char* low, char* out, int64_t i) {
    U signed_low = (load16(low + 2 * i) ^ splatu(0x8000u)) - splatu(0x8000u);
    store32(out + 4 * i, floats((load16(weight + 2 * i) << 16) + signed_low));
}
DSX_INLINE void split(const char* master, char* weight, char* low, int64_t i) {
    F a = load32(master + 4 * i);
    U b = select(is_nan(a), splatu(0x7fc00000u), bits(a));
    store16(weight + 2 * i, (b + splatu(0x8000u)) >> 16);
    store16(low + 2 * i, b & splatu(0xffffu));
}
void join_n(const char* weight, const char* low, char* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) join(weight, low, out, i);
    if (i < n) {
        char w[32] = {}, l[32] = {}, o[64];
        __builtin_memcpy(w, weight + 2 * i, 2 * (n - i));
        __builtin_memcpy(l, low + 2 * i, 2 * (n - i));
        join(w, l, o, 0);
        __builtin_memcpy(out + 4 * i, o, 4 * (n - i));
    }
}
void split_n(const char* master, char* weight, char* low, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) split(master, weight, low, i);
    if (i < n) {
        char m[64] = {}, w[32], l[32];
        __builtin_memcpy(m, master + 4 * i, 4 * (n - i));
        split(m, w, l, 0);
        __builtin_memcpy(weight + 2 * i, w, 2 * (n - i));
        __builtin_memcpy(low + 2 * i, l, 2 * (n - i));
    }
}

// The low-precision copy is only written, never read: non-temporal stores save reading its lines.
template <DType T> void stream_n(const float* p, char* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        alignas(32) char packed[32];
        Access<T>::store(packed, 0, load32(p + i));
        stream16(out + 2 * i, packed);
    }
    if (i < n) convert_n(F32, (const char*)(p + i), T, out + 2 * i, n - i);
}
void write_copy(DType copy, const float* p, char* base, int64_t at, int64_t n) {
    if (copy == NONE) return;
    char* out = base + at * size_of(copy);
    const bool aligned = ((uintptr_t)out & 31) == 0;
    if (aligned && copy == BF16) return stream_n<BF16>(p, out, n);
    if (aligned && copy == F16) return stream_n<F16>(p, out, n);
    convert_n(F32, (const char*)p, copy, out, n);
}

// Sixteen elements from i, of which `count` are there; the others read as zero and are not written.
template <DType T> struct Padded {
    static DSX_INLINE F load(const char* base, int64_t i, int64_t count) {
        if (count >= LANES) return Access<T>::load(base, i);
        alignas(64) char padded[64] = {};
        if (count > 0) __builtin_memcpy(padded, base + i * Access<T>::SIZE, count * Access<T>::SIZE);
        return Access<T>::load(padded, 0);
    }
    static DSX_INLINE void store(char* base, int64_t i, int64_t count, F a) {
        if (count >= LANES) return Access<T>::store(base, i, a);
        alignas(64) char padded[64];
        Access<T>::store(padded, 0, a);
        if (count > 0) __builtin_memcpy(base + i * Access<T>::SIZE, padded, count * Access<T>::SIZE);
    }
    // Past the caches; base + i * SIZE is aligned to 64 bytes.
    static DSX_INLINE void stream(char* base, int64_t i, int64_t count, F a) {
        if (count < LANES) return store(base, i, count, a);
        if (T == F32) return stream32(base + 4 * i, a);
        alignas(32) char packed[32];
        Access<T>::store(packed, 0, a);
        stream16(base + 2 * i, packed);
    }
};

// One stream of a tile: a pointer into the row when that is fp32 and a multiple of sixteen long, else a converted copy.
struct Stream {
    alignas(64) float buffer[TILE];
    float* at = buffer;
    bool converted = false;

    DSX_INLINE void open(DType dtype, const char* row, const char* low, int64_t begin, int64_t n) {
        converted = dtype != F32 || n % LANES != 0;
        if (!converted) {
            at = (float*)(const_cast<char*>(row)) + begin;
            return;
        }
        at = buffer;
        for (int64_t k = n; k % LANES; ++k) buffer[k] = 0;
        if (dtype == SPLIT) join_n(row + 2 * begin, low + 2 * begin, (char*)buffer, n);
        else convert_n(dtype, row + begin * size_of(dtype), F32, (char*)buffer, n);
    }
    DSX_INLINE void close(DType dtype, char* row, char* low, int64_t begin, int64_t n) {
        if (!converted) return;
        if (dtype == SPLIT) split_n((const char*)buffer, row + 2 * begin, low + 2 * begin, n);
        else convert_n(F32, (const char*)buffer, dtype, row + begin * size_of(dtype), n);
    }
};

// ---- noise and block maxima ------------------------------------------------------------------------------------------

DSX_INLINE U mix(U x) {
    x = (x ^ (x >> 16)) * splatu(0x7feb352du);
    x = (x ^ (x >> 15)) * splatu(0x846ca68bu);
    return x ^ (x >> 16);
}

struct Noise {
    U first, second;
    DSX_INLINE Noise(uint32_t seed, int64_t index) {
        uint32_t lane[16];
        for (uint32_t k = 0; k < 16; ++k) lane[k] = k;
        U iota;
        __builtin_memcpy(&iota, lane, 64);
        const uint32_t low = (uint32_t)index, high = (uint32_t)((uint64_t)index >> 32);
        U lanes = iota + splatu(low), key = splatu(seed + high * 0x9e3779b9u);
        if (low > 0xfffffff0u) key = select(lessu(lanes, splatu(low)), splatu(seed + (high + 1) * 0x9e3779b9u), key);  // carry
        first = mix(lanes ^ key);
        second = mix(first ^ splatu(0x85ebca6bu));
    }
};

DSX_INLINE float largest(F a) {  // of numbers; NaN is the caller's concern
    float lane[16];
    __builtin_memcpy(lane, &a, 64);
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; ++k) lane[k] = lane[k] < lane[k + half] ? lane[k + half] : lane[k];
    return lane[0];
}
DSX_INLINE float largest_magnitude(F a) {
    uint32_t lane[16];
    __builtin_memcpy(lane, &a, 64);
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; ++k) lane[k] = lane[k] < lane[k + half] ? lane[k + half] : lane[k];
    float top;
    __builtin_memcpy(&top, lane, 4);
    return top;
}
// Magnitudes that fp32 cannot invert are flushed to zero.
DSX_INLINE F inverse(float scale) { return splat(scale >= 1.1754944e-38f || scale != scale ? 1.0f / scale : 0.0f); }

}  // namespace
}  // namespace DSX_ISA
}  // namespace dsx
