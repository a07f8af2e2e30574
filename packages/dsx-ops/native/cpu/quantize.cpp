// Groupwise int8 and int4: two passes over a group that stays in cache (range, then codes); compiled once per instruction set.
#include "dsx_ops/kernels.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t MAGIC_BITS = 0x4b400000u;

DSX_INLINE F minimum(F a, F b) { return select(less(b, a) | is_nan(b), b, a); }
DSX_INLINE float smallest(F a) {
    float lane[16];
    __builtin_memcpy(lane, &a, 64);
    float low = lane[0];
    for (int k = 1; k < 16; ++k) low = (lane[k] < low || lane[k] != lane[k]) ? lane[k] : low;
    return low;
}

// Eight bytes whose low halves count <-> four bytes.
DSX_INLINE uint32_t squeeze(uint64_t w) {
    w = (w | (w >> 4)) & 0x00ff00ff00ff00ffull;
    w = (w | (w >> 8)) & 0x0000ffff0000ffffull;
    return (uint32_t)(w | (w >> 16));
}
DSX_INLINE uint64_t spread(uint32_t packed) {
    uint64_t w = packed;
    w = (w | (w << 16)) & 0x0000ffff0000ffffull;
    w = (w | (w << 8)) & 0x00ff00ff00ff00ffull;
    return (w | (w << 4)) & 0x0f0f0f0f0f0f0f0full;
}

DSX_INLINE int64_t bytes_of(int bits, int64_t elements) { return bits == 8 ? elements : (elements + 1) / 2; }

void write_codes(const Quant& q, U code, char* codes, int64_t i, int64_t count) {
    char raw[16];
    store8(raw, code);
    if (q.bits == 4) {
        uint64_t w[2];
        __builtin_memcpy(w, raw, 16);
        for (int64_t k = count; k < 16; ++k) raw[k] = 0;
        if (count < 16) __builtin_memcpy(w, raw, 16);
        uint32_t packed[2] = {squeeze(w[0]), squeeze(w[1])};
        __builtin_memcpy(codes + i / 2, packed, bytes_of(4, count));
        return;
    }
    __builtin_memcpy(codes + i, raw, count);
}

DSX_INLINE U read_codes(const Quant& q, const char* codes, int64_t i, int64_t count) {
    char raw[16] = {};
    if (q.bits == 4) {
        uint32_t packed[2] = {};
        __builtin_memcpy(packed, codes + i / 2, bytes_of(4, count));
        uint64_t w[2] = {spread(packed[0]), spread(packed[1])};
        __builtin_memcpy(raw, w, 16);
    } else {
        __builtin_memcpy(raw, codes + i, count);
    }
    return load8(raw);
}

struct Rounding {
    F low, high;
    uint32_t mask;
    explicit DSX_INLINE Rounding(const Quant& q)
        : low(splat(q.symmetric ? -(float)((1 << (q.bits - 1)) - 1) : 0.0f)),
          high(splat((float)((1 << (q.symmetric ? q.bits - 1 : q.bits)) - 1))), mask((1u << q.bits) - 1) {}
    DSX_INLINE F clamp(F t) const {
        t = select(less(high, t), high, t);
        return select(less(t, low), low, t);
    }
    DSX_INLINE U code(const Quant& q, F t, int64_t index) const {
        if (q.stochastic) {
            F r = to_float(Noise(q.seed, index).first >> 8) * splat(5.9604644775390625e-8f);  // 24 bits in [0, 1)
            t = t + r;
            F nearest = (t + splat(MAGIC)) - splat(MAGIC);
            t = select(less(t, nearest), nearest - splat(1.0f), nearest);
        }
        return (bits(clamp(t) + splat(MAGIC)) - splatu(MAGIC_BITS)) & splatu(mask);
    }
};

void quantize(const Quant& q, const char* x, char* codes, float* scale, float* zero, int64_t begin, int64_t end) {
    const Rounding rounding(q);
    const float levels = (float)((1 << (q.symmetric ? q.bits - 1 : q.bits)) - 1);
    Stream in;
    for (int64_t from = begin; from < end; from += q.group) {
        const int64_t to = end - from < q.group ? end : from + q.group, g = from / q.group;
        F high = splat(0.0f), low = splat(0.0f);
        for (int64_t at = from; at < to; at += TILE) {
            int64_t n = to - at < TILE ? to - at : TILE;
            in.open(q.dtype, x, nullptr, at, n);
            for (int64_t k = n; k % LANES; ++k) in.buffer[k] = in.buffer[n - 1];
            if (at == from && !q.symmetric) high = low = splat(in.at[0]);
            for (int64_t i = 0; i < n; i += LANES) {
                F v = load32(in.at + i);
                high = maximum(high, q.symmetric ? absolute(v) : v);
                if (!q.symmetric) low = minimum(low, v);
            }
        }
        const float base = q.symmetric ? 0.0f : smallest(low);
        const float step = (largest(high) - base) / levels;
        scale[g] = step;
        if (!q.symmetric) zero[g] = base;
        const F inv = inverse(step), shift = splat(base);
        for (int64_t at = from; at < to; at += TILE) {
            int64_t n = to - at < TILE ? to - at : TILE;
            in.open(q.dtype, x, nullptr, at, n);
            for (int64_t i = 0; i < n; i += LANES) {
                F v = load32(in.at + i);
                F t = (q.symmetric ? v : v - shift) * inv;
                write_codes(q, rounding.code(q, t, q.offset + at + i), codes, at + i, n - i < LANES ? n - i : LANES);
            }
        }
    }
}

void dequantize(const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t begin, int64_t end) {
    const U sign = splatu(q.symmetric ? 1u << (q.bits - 1) : 0u);
    const int size = size_of(q.dtype);
    alignas(64) float out[TILE];
    for (int64_t from = begin; from < end; from += q.group) {
        const int64_t to = end - from < q.group ? end : from + q.group, g = from / q.group;
        const F step = splat(scale[g]), base = splat(q.symmetric ? 0.0f : zero[g]);
        for (int64_t at = from; at < to; at += TILE) {
            int64_t n = to - at < TILE ? to - at : TILE;
            for (int64_t i = 0; i < n; i += LANES) {
                U code = read_codes(q, codes, at + i, n - i < LANES ? n - i : LANES);
                F v = to_float((code ^ sign) - sign) * step;
                store32(out + i, q.symmetric ? v : v + base);
            }
            convert_n(F32, (const char*)out, q.dtype, x + at * size, n);
        }
    }
}

}  // namespace

extern const QuantKernels quant_table;
const QuantKernels quant_table = {quantize, dequantize};

}  // namespace DSX_ISA
}  // namespace dsx
