// What the kernels and their caller agree on: plain pointers, sizes and numbers. No torch, no Python, no STL.
//
// The kernels live in one source that is compiled once per instruction set; each object exports one `Kernels` table.
// All arithmetic of the elementwise kernels is fp32 without contraction, so every table gives the same bits.
#pragma once
#include <stdint.h>

namespace dsx {

// SPLIT: a bf16 weight and the 16 low bits of its fp32 master.
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, SPLIT = 3, NONE = 4 };
enum Algorithm : int32_t {
    ADAM = 0,
    ADAGRAD = 1,
    LION = 2,
    SGD = 3,
    ADAM8 = 4,
    LAMB_UPDATE = 5,
    LAMB_APPLY = 6,
    TOUCH = 7
};

// One tensor of an update. Pointers that an algorithm does not use are null.
struct Row {
    char* param;
    const char* grad;
    char* state0;    // first moment, Adagrad's sum, momentum buffer; 8-bit codes for ADAM8
    char* state1;    // second moment
    char* low_bits;  // SPLIT: int16
    char* copy;      // low-precision copy of the new parameter
    float* scale0;   // ADAM8: one per block
    float* scale1;
    int64_t numel;
    int64_t offset;  // index of the first element in the whole buffer: keys the stochastic rounding
};

// One flat buffer.
struct Flat {
    char* data;
    int64_t numel;
    DType dtype;
};

struct Hyper {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float eps;
    float decay;      // decoupled weight decay: parameters are multiplied by this
    float l2;         // weight decay added to the gradient
    float step_size;  // lr / (1 - beta1^t), or lr
    float inv_denom;  // 1 / sqrt(1 - beta2^t), or 1
    float grad_mul;   // 1 / grad_scale
    float damp;       // SGD: 1 - dampening (1 in the first step)
    int32_t flags;
    uint32_t seed;  // ADAM8
};

enum Flag : int32_t {
    UNSCALE = 1,    // multiply gradients by grad_mul
    L2 = 2,         // add l2 * p to the gradient
    DECOUPLED = 4,  // multiply p by decay
    MOMENTUM = 8,   // SGD has a buffer
    NESTEROV = 16,
    EPS_INSIDE = 32,  // Lamb: sqrt(v + eps)
    MAXIMIZE = 64,    // negate gradients
};

struct Step {
    int32_t algorithm;
    DType param, grad, state, copy;
    Hyper hyper;
    const float* coefficients;  // LAMB_APPLY: one per row, step size times trust ratio
    double* partials;           // LAMB_UPDATE: two per chunk of a row (|p|^2, |u|^2)
    const int64_t* partial_start;
};

constexpr int64_t LANES = 16;    // elements per step of every kernel, whatever the instruction set
constexpr int64_t ALIGN = 64;    // thread borders fall on multiples of this, counted from a row's start
constexpr int64_t BLOCK8 = 256;  // elements per scale of the 8-bit states
constexpr int64_t CHUNK = 4096;  // elements per partial sum of a reduction

// Groupwise codes of x. INT8, INT4 symmetric: scale = max|x| / (2^(bits-1) - 1). Asymmetric: scale = (max - min) /
// (2^bits - 1), zero = min. E4M3, E5M2: scale = max|x| / largest number of the format. INT4: the even element is in the
// low half of a byte.
enum Format : int32_t { INT8 = 0, INT4 = 1, INT8_ASYM = 2, INT4_ASYM = 3, E4M3 = 4, E5M2 = 5 };

struct Quant {
    Format format;
    DType dtype;    // of x
    int64_t group;  // elements per scale; even for INT4
    bool stochastic;
    uint32_t seed;
    int64_t offset;
    // Where the groups go (and come from): x is [nodes, devices, chunk], the codes are [pipeline, devices, nodes, chunk
    // / pipeline]. slice: groups per chunk / pipeline; 0 leaves the groups where they are.
    int64_t nodes, devices, pipeline, slice;
    bool stream;  // write past the caches (dequantize, reduce)
};

struct QuantKernels {
    // [begin, end) in elements of x; begin is a multiple of the group.
    void (*quantize)(const Quant& q, const char* x, char* codes, float* scale, float* zero, int64_t begin, int64_t end);
    void (*dequantize)(const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t begin,
                       int64_t end);
    // out[i - begin] = factor times the sum over ranks, in order, of what their codes stand for. Rank r's codes, scales
    // and zeros begin r times the strides further. begin is even.
    void (*reduce)(const Quant& q, const char* codes, const float* scale, const float* zero, int64_t ranks,
                   int64_t code_stride, int64_t scale_stride, float factor, float* out, int64_t begin, int64_t end);
};

// One bit per element: 1 for >= 0 (also -0), 0 for negative and NaN; element i in bit i % 8 of byte i / 8.
struct SignKernels {
    // All work on elements [begin, end); begin is a multiple of ALIGN. `stream`: write past the caches.
    void (*pack)(DType dtype, const char* x, char* bits, int64_t begin, int64_t end);
    void (*unpack)(const char* bits, float scale, DType dtype, char* out, int64_t begin, int64_t end, bool stream);
    // Sums of squares of x + error in fp64, in lane order: one number per CHUNK.
    void (*squares)(DType dtype, const char* x, const char* error, int64_t begin, int64_t end, double* partials);
    // Packs the signs of t = x + error and leaves t - scale sign(t) in error.
    void (*compress)(DType dtype, const char* x, char* error, float scale, char* bits, int64_t begin, int64_t end);
    // out = (sum over ranks, in order, of scales[r] sign_r) factor; rank r's bits begin at bits + r stride.
    void (*mean)(const char* bits, int64_t stride, const float* scales, int64_t ranks, float factor, char* out,
                 int64_t begin, int64_t end);
};

// A part of a run of a flat fp32 buffer whose signs share one scale: elements [begin, end), at most SIGN_PIECE of them,
// `begin` a multiple of 8; their bits begin at byte `byte` of what is sent, their scale is number `scale`. The pieces
// of a run begin SIGN_PIECE apart or where its bits go to another place.
constexpr int64_t SIGN_PIECE = 4 * CHUNK;
struct SignPiece {
    int64_t begin, end, byte, scale;
};

// Layer norm of rows of `cols` elements; weight and bias in fp32.
struct NormRows {
    DType dtype;
    int64_t cols;
    float eps;
    const float *weight, *bias;
    const char *x, *residual;  // residual: null, or added first; the sum goes to `total`
    char *total, *y;
    float *mean, *rstd;
    bool stream;
};
struct NormBackRows {
    DType dtype;
    int64_t cols;
    const float *weight, *bias,
        *inverse;  // inverse: 1 / weight, when `saved` is the output; else null and `saved` is the input
    const char *grad, *saved, *extra;  // extra: null, or added to dx
    const float *mean, *rstd;
    char* dx;
    bool stream;
};

// Masks: null, a float dtype (added), or bytes (0 excludes).
enum MaskKind : int32_t { MASK_NONE = 0, MASK_F32 = 1, MASK_BF16 = 2, MASK_F16 = 3, MASK_BOOL = 4 };
struct SoftmaxRows {
    DType dtype;
    int64_t cols;
    float scale;
    const char *x, *grad;  // backward: x is the forward's result
    char* out;
    MaskKind mask_kind;
    const char* mask;           // the mask's element for row r and column c: start of r + c * column_step
    const int64_t* mask_start;  // per row, in elements
    int64_t column_step;        // 0 or 1
    bool stream;
};

// Elementwise functions of x + bias, bias along rows of `cols` elements. Ranges are in elements of the whole tensor.
enum BiasForm : int32_t {
    GELU_TANH = 0,
    GELU_ERF = 1,
    GELU_TANH_BACK = 2,
    GELU_ERF_BACK = 3,
    DROPOUT = 4,
    DROPOUT_RESIDUAL = 5
};
struct BiasRows {
    BiasForm form;
    DType dtype;
    int64_t cols;
    const char *x, *other;  // other: the gradient (backward forms), the residual (DROPOUT_RESIDUAL)
    const float* bias;      // null: none
    char* out;
    uint32_t threshold, seed;
    float keep_scale;
    int64_t offset;
    bool stream;
};

struct RowKernels {
    void (*layer_norm)(const NormRows& n, int64_t begin, int64_t end);
    // Adds to dweight and dbias [cols].
    void (*layer_norm_backward)(const NormBackRows& n, int64_t begin, int64_t end, float* dweight, float* dbias);
    void (*softmax)(const SoftmaxRows& s, int64_t begin, int64_t end,
                    float* scratch);  // scratch: cols rounded up to 16
    void (*softmax_backward)(const SoftmaxRows& s, int64_t begin, int64_t end);
    // Adds the unrounded results to sums [cols] unless that is null.
    void (*bias_function)(const BiasRows& b, int64_t begin, int64_t end, float* sums);
    // out[c] = sum over rows, in order, of parts[row * cols + c].
    void (*add_rows)(const float* parts, int64_t rows, int64_t cols, float* out, int64_t begin, int64_t end);
};

struct Kernels {
    const char* name;
    // Both work on the elements [begin, end) of one row; begin is a multiple of ALIGN (BLOCK8, CHUNK where they
    // matter).
    void (*step)(const Step& step, const Row& row, int64_t row_index, int64_t begin, int64_t end);
    // Sum of squares of [begin, end) in fp64, in lane order: one number per CHUNK.
    void (*squares)(DType dtype, const char* data, int64_t begin, int64_t end, double* partials);
    void (*scale)(DType dtype, char* data, int64_t begin, int64_t end, float factor);
    void (*convert)(DType from, const char* in, DType to, char* out, int64_t begin, int64_t end);
};

// Everything that one instruction set offers.
struct Tables {
    const Kernels* basic;
    const QuantKernels* quant;
    const SignKernels* sign;
    const RowKernels* row;
};

}  // namespace dsx
