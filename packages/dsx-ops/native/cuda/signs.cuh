// One bit per element, with error feedback (what the arithmetic is: native/cpu/signs.cpp): what the kernels for one
// tensor and for the runs of a flat buffer share. A thread takes eight neighbours, which make one byte, and has the
// loads of two such octets in flight.
//
// Per element: compress reads value and error twice, since the scale depends on all of them, and writes error and bit;
// unpack reads a bit and writes the value; mean reads a bit per rank and writes four bytes.
#pragma once
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {

constexpr int OCTET = 8;  // elements of a byte
constexpr int SIGN_THREADS = 256;

// Which elements a block has. Piece number b of one tensor, whose bits begin at byte 0:
struct WholeTensor {
    int64_t numel;
    __device__ __forceinline__ SignPiece piece(int64_t block) const {
        const int64_t begin = block * SIGN_PIECE, left = numel - begin;
        return {begin, begin + (left < SIGN_PIECE ? left : SIGN_PIECE), begin / OCTET, 0};
    }
    int64_t count() const { return (numel + SIGN_PIECE - 1) / SIGN_PIECE; }
};
// Pieces of runs, as a table on the device says.
struct RunTable {
    const SignPiece* pieces;
    int64_t number;
    __device__ __forceinline__ SignPiece piece(int64_t block) const { return fetch(pieces + block); }
    int64_t count() const { return number; }
};

struct Values {
    DType dtype;
    const char* at;
    bool whole;  // octets are aligned words; every piece begins at a multiple of eight elements
    __device__ __forceinline__ Raw<OCTET> read(int64_t i, int n) const {
        return load_raw<OCTET>(dtype, at, i, n, whole && n == OCTET);
    }
};

// f(first element, elements, byte, loaded) for the octets of a piece; `read(i, n)` loads what f needs of memory.
template <class Read, class F>
__device__ __forceinline__ void octets(const SignPiece& piece, const Read& read, const F& f) {
    constexpr int AT_ONCE = 2;
    const int64_t stride = OCTET * (int64_t)blockDim.x;
    for (int64_t i = piece.begin + OCTET * (int64_t)threadIdx.x; i < piece.end; i += AT_ONCE * stride) {
        decltype(read(i, 0)) loaded[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) loaded[t] = read(i + t * stride, count_of<OCTET>(piece.end, i + t * stride));
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const int64_t at = i + t * stride;
            const int n = count_of<OCTET>(piece.end, at);
            if (n > 0) f(at, n, piece.byte + (at - piece.begin) / OCTET, loaded[t]);
        }
    }
}

struct ValueAndError {
    Raw<OCTET> value, error;
};
__device__ __forceinline__ Floats<OCTET> corrected(const Values& x, const ValueAndError& loaded) {
    Floats<OCTET> t = decode(x.dtype, loaded.value);
    for (int k = 0; k < OCTET; ++k) t.x[k] = t.x[k] + __uint_as_float(loaded.error.w[k]);
    return t;
}

// partials[piece]: the sum of squares of x + error.
template <class Pieces>
__global__ void __launch_bounds__(SIGN_THREADS)
    square_pieces(const Pieces pieces, const Values x, const Values error, double* partials) {
    __shared__ double scratch[SIGN_THREADS / WARP];
    double sum = 0;
    const auto read = [&](int64_t i, int n) { return ValueAndError{x.read(i, n), error.read(i, n)}; };
    octets(pieces.piece(blockIdx.x), read, [&](int64_t, int, int64_t, const ValueAndError& loaded) {
        const Floats<OCTET> t = corrected(x, loaded);
        for (int k = 0; k < OCTET; ++k) sum = sum + (double)t.x[k] * (double)t.x[k];  // what is missing is zero
    });
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) put(partials + blockIdx.x, sum);
}

template <class Pieces>
__global__ void __launch_bounds__(SIGN_THREADS)
    compress_pieces(const Pieces pieces, const Values x, const Values error, const float* scales, char* bits) {
    const SignPiece piece = pieces.piece(blockIdx.x);
    const float magnitude = fetch(scales + piece.scale);
    const auto read = [&](int64_t i, int n) { return ValueAndError{x.read(i, n), error.read(i, n)}; };
    octets(piece, read, [&](int64_t i, int n, int64_t byte, const ValueAndError& loaded) {
        Floats<OCTET> t = corrected(x, loaded);
        uint32_t signs = 0;
        for (int k = 0; k < OCTET; ++k) {
            const bool up = t.x[k] >= 0.0f;  // NaN: no
            t.x[k] = t.x[k] - (up ? magnitude : -magnitude);
            if (up && k < n) signs |= 1u << k;
        }
        store(F32, const_cast<char*>(error.at), i, n, error.whole && n == OCTET, t);
        put(bits + byte, (char)(uint8_t)signs);
    });
}

template <class Pieces>
__global__ void __launch_bounds__(SIGN_THREADS)
    mean_pieces(const Pieces pieces, const char* bits, int64_t bit_stride, const float* scales, int64_t scale_stride,
                int64_t ranks, float factor, bool whole, float* out) {
    const SignPiece piece = pieces.piece(blockIdx.x);
    for (int64_t i = piece.begin + OCTET * (int64_t)threadIdx.x; i < piece.end; i += OCTET * (int64_t)blockDim.x) {
        const int n = count_of<OCTET>(piece.end, i);
        const char* mine = bits + piece.byte + (i - piece.begin) / OCTET;
        Floats<OCTET> sum = {};
#pragma unroll 4
        for (int64_t r = 0; r < ranks; ++r) {
            const uint32_t signs = (uint8_t)fetch(mine + r * bit_stride);
            const float magnitude = fetch(scales + r * scale_stride + piece.scale);
            for (int k = 0; k < OCTET; ++k) sum.x[k] = sum.x[k] + (signs >> k & 1 ? magnitude : -magnitude);
        }
        for (int k = 0; k < OCTET; ++k) sum.x[k] = sum.x[k] * factor;
        store(F32, reinterpret_cast<char*>(out), i, n, whole && n == OCTET, sum);
    }
}

__device__ __forceinline__ Floats<OCTET> signed_values(uint32_t signs, float magnitude) {
    Floats<OCTET> values;
    for (int k = 0; k < OCTET; ++k) values.x[k] = signs >> k & 1 ? magnitude : -magnitude;
    return values;
}

}  // namespace cuda
}  // namespace dsx
