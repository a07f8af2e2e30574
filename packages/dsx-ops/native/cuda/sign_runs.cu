// Signs and scales of many runs of one flat buffer in one launch (what the arithmetic is: native/cpu/signs.cpp). A
// block takes one piece of a run, as the caller's table on the device says; a thread takes eight neighbours, which make
// one byte.
//
// Per element: compress reads value and error twice and writes the error (20 bytes, 1/8 byte of signs), unpack writes 4
// bytes, mean reads 1/8 byte per rank and writes 4. Loads of a thread are issued before anything is computed from them.
#include "memory.cuh"
#include "reduce.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr int OCTET = 8;  // elements of a byte

struct Octet { float x[OCTET]; };

// Elements [i, i + n) of a float buffer, n at most 8; zeros beyond. `whole`: two aligned words of 16 bytes.
__device__ __forceinline__ Octet load_octet(const float* base, int64_t i, int n, bool whole) {
    Octet found = {};
    if (whole && n == OCTET) {
        const Words4* words = reinterpret_cast<const Words4*>(base + i);
        const Words4 low = words[0], high = words[1];
        for (int k = 0; k < 4; ++k) {
            found.x[k] = __uint_as_float(low.w[k]);
            found.x[4 + k] = __uint_as_float(high.w[k]);
        }
    } else {
        for (int k = 0; k < OCTET; ++k)
            if (k < n) found.x[k] = base[i + k];
    }
    return found;
}
__device__ __forceinline__ void store_octet(float* base, int64_t i, int n, bool whole, const Octet& values) {
    if (whole && n == OCTET) {
        Words4 low, high;
        for (int k = 0; k < 4; ++k) {
            low.w[k] = __float_as_uint(values.x[k]);
            high.w[k] = __float_as_uint(values.x[4 + k]);
        }
        reinterpret_cast<Words4*>(base + i)[0] = low;
        reinterpret_cast<Words4*>(base + i)[1] = high;
    } else {
        for (int k = 0; k < OCTET; ++k)
            if (k < n) base[i + k] = values.x[k];
    }
}

// Calls f(first element, elements, byte) for the octets of this block's piece.
template <class F> __device__ __forceinline__ void octets(const SignPiece& piece, const F& f) {
    for (int64_t i = piece.begin + OCTET * (int64_t)threadIdx.x; i < piece.end; i += OCTET * (int64_t)blockDim.x) {
        const int n = piece.end - i < OCTET ? (int)(piece.end - i) : OCTET;
        f(i, n, piece.byte + (i - piece.begin) / OCTET);
    }
}

// partials[piece]: the sum of squares of x + error.
__global__ void __launch_bounds__(THREADS)
    square_pieces(const SignPiece* pieces, const float* x, const float* error, bool whole, double* partials) {
    __shared__ double scratch[THREADS / WARP];
    double sum = 0;
    octets(pieces[blockIdx.x], [&](int64_t i, int n, int64_t) {
        const Octet a = load_octet(x, i, n, whole), b = load_octet(error, i, n, whole);
        for (int k = 0; k < OCTET; ++k) {
            const double t = a.x[k] + b.x[k];
            sum = sum + t * t;
        }
    });
    sum = over_block(sum, Sum(), scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// A block per run: its pieces are first[run] to first[run + 1].
__global__ void __launch_bounds__(THREADS)
    root_mean_of_runs(const SignPiece* pieces, const int64_t* first, const double* partials, float* scales) {
    __shared__ double scratch[THREADS / WARP];
    double sum = 0, count = 0;
    for (int64_t p = first[blockIdx.x] + threadIdx.x; p < first[blockIdx.x + 1]; p += blockDim.x) {
        sum = sum + partials[p];
        count = count + (double)(pieces[p].end - pieces[p].begin);
    }
    sum = over_block(sum, Sum(), scratch);
    count = over_block(count, Sum(), scratch);
    if (threadIdx.x == 0) scales[blockIdx.x] = (float)sqrt(sum / count);
}

__global__ void __launch_bounds__(THREADS)
    compress_pieces(const SignPiece* pieces, const float* x, float* error, const float* scales, bool whole,
                    char* bits) {
    const SignPiece piece = pieces[blockIdx.x];
    const float magnitude = scales[piece.scale];
    octets(piece, [&](int64_t i, int n, int64_t byte) {
        const Octet a = load_octet(x, i, n, whole), b = load_octet(error, i, n, whole);
        Octet left;
        uint32_t signs = 0;
        for (int k = 0; k < OCTET; ++k) {
            const float t = a.x[k] + b.x[k];
            const bool up = t >= 0.0f;  // NaN: no
            left.x[k] = t - (up ? magnitude : -magnitude);
            if (up && k < n) signs |= 1u << k;
        }
        store_octet(error, i, n, whole, left);
        bits[byte] = (char)(uint8_t)signs;
    });
}

__global__ void __launch_bounds__(THREADS)
    unpack_pieces(const SignPiece* pieces, const char* bits, const float* scales, bool whole, float* out) {
    const SignPiece piece = pieces[blockIdx.x];
    const float magnitude = scales[piece.scale];
    octets(piece, [&](int64_t i, int n, int64_t byte) {
        const uint32_t signs = (uint8_t)bits[byte];
        Octet values;
        for (int k = 0; k < OCTET; ++k) values.x[k] = signs >> k & 1 ? magnitude : -magnitude;
        store_octet(out, i, n, whole, values);
    });
}

__global__ void __launch_bounds__(THREADS)
    mean_pieces(const SignPiece* pieces, const char* bits, int64_t bit_stride, const float* scales,
                int64_t scale_stride, int64_t ranks, float factor, bool whole, float* out) {
    const SignPiece piece = pieces[blockIdx.x];
    octets(piece, [&](int64_t i, int n, int64_t byte) {
        Octet sum = {};
#pragma unroll 4
        for (int64_t r = 0; r < ranks; ++r) {
            const uint32_t signs = (uint8_t)bits[r * bit_stride + byte];
            const float magnitude = scales[r * scale_stride + piece.scale];
            for (int k = 0; k < OCTET; ++k) sum.x[k] = sum.x[k] + (signs >> k & 1 ? magnitude : -magnitude);
        }
        for (int k = 0; k < OCTET; ++k) sum.x[k] = sum.x[k] * factor;
        store_octet(out, i, n, whole, sum);
    });
}

// Every piece begins at a multiple of 8 elements, so that the buffer's own alignment decides.
bool aligned(const void* a, const void* b) { return fits(a, 16) && fits(b, 16); }

}  // namespace

void compress_sign_runs(const Where& where, const SignPieces& p, const int64_t* first, int64_t runs, const float* x,
                        float* error, char* bits, float* scales, double* partials) {
    OnDevice on(where);
    const bool whole = aligned(x, error);
    launch(where, square_pieces, p.count, THREADS, p.at, x, (const float*)error, whole, partials);
    launch(where, root_mean_of_runs, runs, THREADS, p.at, first, (const double*)partials, scales);
    launch(where, compress_pieces, p.count, THREADS, p.at, x, error, (const float*)scales, whole, bits);
}

void unpack_sign_runs(const Where& where, const SignPieces& p, const char* bits, const float* scales, float* out) {
    OnDevice on(where);
    launch(where, unpack_pieces, p.count, THREADS, p.at, bits, scales, aligned(out, out), out);
}

void mean_of_sign_runs(const Where& where, const SignPieces& p, const char* bits, int64_t bit_stride,
                       const float* scales, int64_t scale_stride, int64_t ranks, float* out) {
    OnDevice on(where);
    const float factor = (float)(1.0 / (double)ranks);
    launch(where, mean_pieces, p.count, THREADS, p.at, bits, bit_stride, scales, scale_stride, ranks, factor,
           aligned(out, out), out);
}

}  // namespace cuda
}  // namespace dsx
