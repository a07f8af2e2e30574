// Products of a few vectors with a matrix of 8- or 4-bit codes; compiled once per instruction set.
//
// The codes are read once from memory and never written as floats: a quarter or an eighth of the bytes of fp32, which
// is what bounds such a product. Sums are taken in fp32, in four accumulators of sixteen lanes for each group, so that
// every instruction set adds in the same order; only the fused multiply-add of AVX2 and later rounds less.
#include "dsx_ops/matvec.h"

#include "dsx_ops/kernels.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr int64_t LANES16 = 16;

DSX_INLINE F signed_codes(U code, uint32_t sign) { return to_float((code ^ splatu(sign)) - splatu(sign)); }

// The values of sixteen codes in the low four bits of each lane; higher bits are left out.
struct Nibbles {
#if defined(DSX_ISA_AVX512)
    __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    DSX_INLINE F operator()(U code) const {
        F value;
        value.r[0] = (freg)_mm512_permutexvar_ps((__m512i)code.r[0], values);  // half the instructions of the other way
        return value;
    }
#else
    DSX_INLINE F operator()(U code) const { return signed_codes(code & splatu(15u), 8u); }
#endif
};

DSX_INLINE float sum_of_lanes(F a) {
    float lane[LANES16], total = 0.0f;
    store32(lane, a);
    for (float value : lane) total += value;
    return total;
}

DSX_INLINE float dot8(const uint8_t* codes, const float* x, int64_t count) {
    F sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 4 * LANES16 <= count; i += 4 * LANES16)
        for (int k = 0; k < 4; ++k) {
            const int64_t at = i + k * LANES16;
            sum[k] = multiply_add(signed_codes(load8(codes + at), 0x80u), load32(x + at), sum[k]);
        }
    float total = sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < count; ++i) total += static_cast<float>(static_cast<int8_t>(codes[i])) * x[i];
    return total;
}

// In whole blocks x has its even columns before its odd ones; the rest of a row is in order.
DSX_INLINE float dot4(const uint8_t* codes, const float* x, int64_t count) {
    const Nibbles value;
    F sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 2 * MATVEC_BLOCK <= count; i += 2 * MATVEC_BLOCK)
        for (int k = 0; k < 2; ++k) {
            const int64_t at = i + k * MATVEC_BLOCK;
            const U both = load8(codes + at / 2);
            sum[2 * k] = multiply_add(value(both), load32(x + at), sum[2 * k]);
            sum[2 * k + 1] = multiply_add(value(both >> 4), load32(x + at + LANES16), sum[2 * k + 1]);
        }
    for (; i + MATVEC_BLOCK <= count; i += MATVEC_BLOCK) {
        const U both = load8(codes + i / 2);
        sum[0] = multiply_add(value(both), load32(x + i), sum[0]);
        sum[1] = multiply_add(value(both >> 4), load32(x + i + LANES16), sum[1]);
    }
    float total = sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < count; ++i) {
        const int code = (codes[i / 2] >> (4 * (i % 2))) & 15;
        total += static_cast<float>((code ^ 8) - 8) * x[i];
    }
    return total;
}

template <int BITS>
void matvec(const PackedMatrix& m, const float* x, int64_t vectors, float* out, int64_t out_stride, int64_t begin,
            int64_t end) {
    const int64_t group = m.columns / m.groups, bytes = BITS == 8 ? m.columns : (m.columns + 1) / 2;
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t* codes = m.codes + row * bytes;
        const float* scales = m.scales + row * m.groups;
        for (int64_t v = 0; v < vectors; ++v) {
            const float* values = x + v * m.columns;
            float total = 0.0f;
            for (int64_t g = 0; g < m.groups; ++g) {
                const int64_t at = g * group;
                total += scales[g] *
                         (BITS == 8 ? dot8(codes + at, values + at, group) : dot4(codes + at / 2, values + at, group));
            }
            out[v * out_stride + row] = total;
        }
    }
}

}  // namespace

extern const MatvecKernels matvec_table;
const MatvecKernels matvec_table = {matvec<8>, matvec<4>};

}  // namespace DSX_ISA
}  // namespace dsx
