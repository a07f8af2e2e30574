// What the CUDA kernels and their caller agree on: plain pointers, sizes and numbers. No torch, no Python, no CUDA
// headers.
//
// Every function starts work on the given stream and returns; nothing waits for the device. Pointers are device
// addresses. Failures to start are std::runtime_error.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "dsx_ops/kernels.h"

namespace dsx {
namespace cuda {

struct Where {
    int device;
    uintptr_t stream;  // cudaStream_t
};

// Raises when the driver is missing or too old for the runtime in this module. Returns the driver's version, as 13000
// for 13.0.
int check_driver();

// A number that is known on the host, or lies on the device.
enum ScalarType : int32_t { SCALAR_F32 = 0, SCALAR_F64 = 1, SCALAR_I64 = 2 };
struct Scalar {
    double value;
    const void* at;  // null: `value` counts
    int32_t type;
};

// Numbers of an update of which some lie on the device: `host` has what does not depend on them, the rest is computed
// by `prepare` with the formulas of `dsx_ops.spec.Hyper.lowered`.
struct Recipe {
    int32_t algorithm;
    Hyper host;
    Scalar lr, grad_scale;
    Scalar found_inf;  // other than 0: everything stays as it is
    Scalar step;       // of this update, counted from 1
    double beta1, beta2, weight_decay;
    bool bias_correction;
};
constexpr int32_t SKIP = 1 << 16;  // flag in a Hyper on the device: do nothing

// `out`: room for one Hyper on the device.
void prepare(const Where& where, const Recipe& recipe, Hyper* out);

// One call per algorithm over all rows. `hyper_at`: factors on the device, instead of step.hyper. LAMB_UPDATE:
// `squares` fp64 [rows, 2], `partials` fp64 [2 * chunks of all rows]. LAMB_APPLY: `coefficients` fp32 [rows], on the
// device.
void step(const Where& where, const Step& step, const Row* rows, size_t count, const Hyper* hyper_at, double* squares,
          double* partials, const float* coefficients);

int64_t chunks_of(int64_t numel);
// Sum of squares per row in fp64 at out[i]; `partials` fp64 [chunks of all rows].
void squares(const Where& where, const Flat* rows, size_t count, double* out, double* partials);
void scale(const Where& where, const Flat* rows, size_t count, const Scalar& factor);

void quantize(const Where& where, const Quant& q, const char* x, int64_t numel, char* codes, float* scale, float* zero);
void dequantize(const Where& where, const Quant& q, const char* codes, const float* scale, const float* zero, char* x,
                int64_t numel);

// What several ranks sent: rank r's codes, scales and zeros begin r times the strides further. The sum is multiplied by
// `factor`.
struct Codes {
    const char* codes;
    const float *scale, *zero;
    int64_t ranks, code_stride, scale_stride;
    float factor;
};
void reduce_codes(const Where& where, const Quant& q, const Codes& from, int64_t numel, float* out);
void requantize(const Where& where, const Quant& q, const Codes& from, int64_t numel, const Quant& to, char* codes,
                float* scale, float* zero);

// One bit per element, as SignKernels in kernels.h. partials: fp64 [chunks_of(numel)].
void pack_signs(const Where& where, DType dtype, const char* x, char* bits, int64_t numel);
void unpack_signs(const Where& where, const char* bits, const float* scale, DType dtype, char* out, int64_t rows,
                  int64_t numel);
void compress_signs(const Where& where, DType dtype, const char* x, float* error, char* bits, float* scale,
                    double* partials, int64_t numel);
void mean_of_signs(const Where& where, const char* bits, const float* scales, int64_t ranks, float* out, int64_t numel);

// Runs of a flat fp32 buffer, in pieces; the table of pieces lies on the device.
struct SignPieces {
    const SignPiece* at;
    int64_t count;
};
// The pieces of run r are first[r] to first[r + 1], on the device; partials: fp64, one per piece. The values are left
// as they are.
void compress_sign_runs(const Where& where, const SignPieces& p, const int64_t* first, int64_t runs, const float* x,
                        float* error, char* bits, float* scales, double* partials);
void unpack_sign_runs(const Where& where, const SignPieces& p, const char* bits, const float* scales, float* out);
// Strides: bytes of bits and number of scales from one rank's message to the next.
void mean_of_sign_runs(const Where& where, const SignPieces& p, const char* bits, int64_t bit_stride,
                       const float* scales, int64_t scale_stride, int64_t ranks, float* out);

// ---- rows: a tensor seen as [rows, cols], cols being the last dimension -----------------------------

struct Rows {
    DType dtype;
    int64_t rows, cols;
};
struct Vector {  // along the columns; null when there is none
    const char* at;
    DType dtype;
};
// Keeps element i when the upper 24 bits of noise(seed, offset + i) are at least `threshold`.
struct Drop {
    bool active;
    uint32_t threshold;
    float scale;
    uint32_t seed;
    int64_t offset;
};
// A mask that is broadcast to the rows: strides in elements, 0 where it has one element only.
constexpr int MASK_DIMS = 6;
enum MaskKind : int32_t { NO_MASK = 0, ADDED = 1, TAKES_PART = 2 };
struct MaskView {
    MaskKind kind;
    DType dtype;
    const char* at;
    int64_t sizes[MASK_DIMS], strides[MASK_DIMS];  // of the row's dimensions, outermost first; sizes of 1 in front
    int64_t column_stride;
};

// residual, total: null without a residual. The sum is rounded to the dtype before it is normed.
void layer_norm(const Where& where, const Rows& r, const char* x, const char* residual, char* total, Vector weight,
                Vector bias, float eps, char* y, float* mean, float* rstd);
// Sums down the columns are taken over this many groups of rows (slabs), and then over the slabs.
int64_t norm_slabs(const Rows& r);    // of layer_norm_backward
int64_t column_slabs(const Rows& r);  // of bias_gelu_backward and bias_grad
// partials: fp32 [2, norm_slabs, cols].
void layer_norm_backward(const Where& where, const Rows& r, const char* grad, const char* saved, const float* mean,
                         const float* rstd, Vector weight, Vector bias, const char* extra, bool from_output, char* dx,
                         char* dweight, char* dbias, float* partials);
void bias_gelu(const Where& where, const Rows& r, const char* x, Vector bias, bool tanh, char* y);
// partials: fp32 [column_slabs, cols]; dbias null without a bias.
void bias_gelu_backward(const Where& where, const Rows& r, const char* grad, const char* x, Vector bias, bool tanh,
                        char* dx, char* dbias, float* partials);
// residual + dropout(x + bias); bias and residual may be null.
void dropout(const Where& where, const Rows& r, const char* x, Vector bias, const char* residual, const Drop& drop,
             char* y);
void bias_grad(const Where& where, const Rows& r, const char* grad, const Drop& drop, char* dx, Vector dbias,
               float* partials);
void masked_softmax(const Where& where, const Rows& r, const char* x, const MaskView& mask, float scale, char* y);
void softmax_backward(const Where& where, const Rows& r, const char* grad, const char* y, float scale, char* dx);

// Rows of `full` (batch x sequence of them, in that order or the other) at indices [batch, kept] from or to `part`.
struct Move {
    bool gather, batch_first;
    char *full, *part;
    const int64_t* indices;
    int64_t batch, kept, sequence, row_bytes;
};
void move_rows(const Where& where, const Move& m);

}  // namespace cuda
}  // namespace dsx
