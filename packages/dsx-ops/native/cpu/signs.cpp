// One bit per element, with error feedback; compiled once per instruction set.
//
// Packing is a comparison and a move of its mask. Compression needs its scale first, so it reads x and the error twice:
// 20 bytes per element in all, against the seven passes of separate operations.
#include "dsx_ops/kernels.h"
#include "dsx_ops/tiles.h"
#include "dsx_ops/vec.h"

namespace dsx {
namespace DSX_ISA {
namespace {

constexpr int64_t GROUP = 64;  // elements per step: eight bytes of bits

DSX_INLINE U bits_of_scale(float scale) { return bits(splat(scale)); }
DSX_INLINE uint32_t sign_bits(F a) { return lane_bits((less(a, splat(0.0f)) | is_nan(a)) ^ splatu(~0u)); }
// scale where the bit is set, -scale elsewhere
DSX_INLINE F signed_scale(U mask, U scale) { return floats(scale ^ ((mask ^ splatu(~0u)) & splatu(0x80000000u))); }

// Calls f(element, count) for steps of GROUP elements, then for what is left; count is GROUP except in the last call.
template <class Body> DSX_INLINE void groups(int64_t begin, int64_t end, const Body& body) {
    int64_t i = begin;
    for (; i + GROUP <= end; i += GROUP) body(i, GROUP);
    if (i < end) body(i, end - i);
}

DSX_INLINE void write_word(char* bits, int64_t i, int64_t count, uint64_t word) {
    if (count < GROUP) word &= (1ull << count) - 1;
    __builtin_memcpy(bits + i / 8, &word, (count + 7) / 8);
}
DSX_INLINE uint64_t read_word(const char* bits, int64_t i, int64_t count) {
    uint64_t word = 0;
    __builtin_memcpy(&word, bits + i / 8, (count + 7) / 8);
    return word;
}

template <DType T> void pack_of(const char* x, char* bits, int64_t begin, int64_t end) {
    groups(begin, end, [&](int64_t i, int64_t count) {
        uint64_t word = 0;
        for (int64_t k = 0; k < GROUP; k += LANES)
            word |= (uint64_t)sign_bits(Padded<T>::load(x, i + k, count - k)) << k;
        write_word(bits, i, count, word);
    });
}

void pack(DType dtype, const char* x, char* bits, int64_t begin, int64_t end) {
    if (dtype == BF16) return pack_of<BF16>(x, bits, begin, end);
    if (dtype == F16) return pack_of<F16>(x, bits, begin, end);
    pack_of<F32>(x, bits, begin, end);
}

template <DType T> void unpack_of(const char* bits, float scale, char* out, int64_t begin, int64_t end, bool stream) {
    const U magnitude = bits_of_scale(scale);
    stream = stream && T == F32 && ((uintptr_t)out & 63) == 0;
    groups(begin, end, [&](int64_t i, int64_t count) {
        const uint64_t word = read_word(bits, i, count);
        for (int64_t k = 0; k < GROUP && k < count; k += LANES) {
            F value = signed_scale(lane_mask((uint32_t)(word >> k) & 0xffffu), magnitude);
            if (stream && count == GROUP) stream32(out + 4 * (i + k), value);
            else Padded<T>::store(out, i + k, count - k, value);
        }
    });
    if (stream) fence();
}

void unpack(const char* bits, float scale, DType dtype, char* out, int64_t begin, int64_t end, bool stream) {
    if (dtype == BF16) return unpack_of<BF16>(bits, scale, out, begin, end, stream);
    if (dtype == F16) return unpack_of<F16>(bits, scale, out, begin, end, stream);
    unpack_of<F32>(bits, scale, out, begin, end, stream);
}

template <DType T> void squares_of(const char* x, const char* error, int64_t begin, int64_t end, double* partials) {
    for (int64_t at = begin; at < end; at += CHUNK) {
        const int64_t stop = at + CHUNK < end ? at + CHUNK : end;
        D sum = zero_sums();
        for (int64_t i = at; i < stop; i += LANES)
            add_squares(sum, Padded<T>::load(x, i, stop - i) + Padded<F32>::load(error, i, stop - i));
        partials[at / CHUNK] = total(sum);
    }
}

void squares(DType dtype, const char* x, const char* error, int64_t begin, int64_t end, double* partials) {
    if (dtype == BF16) return squares_of<BF16>(x, error, begin, end, partials);
    if (dtype == F16) return squares_of<F16>(x, error, begin, end, partials);
    squares_of<F32>(x, error, begin, end, partials);
}

template <DType T> void compress_of(const char* x, char* error, float scale, char* bits, int64_t begin, int64_t end) {
    const U magnitude = bits_of_scale(scale);
    groups(begin, end, [&](int64_t i, int64_t count) {
        uint64_t word = 0;
        for (int64_t k = 0; k < GROUP; k += LANES) {
            F t = Padded<T>::load(x, i + k, count - k) + Padded<F32>::load(error, i + k, count - k);
            const uint32_t found = sign_bits(t);
            word |= (uint64_t)found << k;
            Padded<F32>::store(error, i + k, count - k, t - signed_scale(lane_mask(found), magnitude));
        }
        write_word(bits, i, count, word);
    });
}

void compress(DType dtype, const char* x, char* error, float scale, char* bits, int64_t begin, int64_t end) {
    if (dtype == BF16) return compress_of<BF16>(x, error, scale, bits, begin, end);
    if (dtype == F16) return compress_of<F16>(x, error, scale, bits, begin, end);
    compress_of<F32>(x, error, scale, bits, begin, end);
}

void mean(const char* bits, int64_t stride, const float* scales, int64_t ranks, float factor, char* out, int64_t begin,
          int64_t end) {
    const F times = splat(factor);
    groups(begin, end, [&](int64_t i, int64_t count) {
        F sum[GROUP / LANES];
        for (F& s : sum) s = splat(0.0f);
        for (int64_t r = 0; r < ranks; ++r) {
            const uint64_t word = read_word(bits + r * stride, i, count);
            const U magnitude = bits_of_scale(scales[r]);
            for (int64_t k = 0; k < GROUP / LANES; ++k)
                sum[k] = sum[k] + signed_scale(lane_mask((uint32_t)(word >> (k * LANES)) & 0xffffu), magnitude);
        }
        for (int64_t k = 0; k < GROUP / LANES; ++k)
            Padded<F32>::store(out, i + k * LANES, count - k * LANES, sum[k] * times);
    });
}

}  // namespace

extern const SignKernels sign_table;
const SignKernels sign_table = {pack, unpack, squares, compress, mean};

}  // namespace DSX_ISA
}  // namespace dsx
