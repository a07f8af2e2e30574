// What the CUDA kernels and their caller agree on: plain pointers, sizes and numbers. No torch, no Python, no CUDA headers.
//
// Every function starts work on the given stream and returns; nothing waits for the device. Pointers are device addresses. Failures to
// start are std::runtime_error.
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

// Raises when the driver is missing or too old for the runtime in this module. Returns the driver's version, as 13000 for 13.0.
int check_driver();

// A number that is known on the host, or lies on the device.
enum ScalarType : int32_t { SCALAR_F32 = 0, SCALAR_F64 = 1, SCALAR_I64 = 2 };
struct Scalar {
    double value;
    const void* at;  // null: `value` counts
    int32_t type;
};

// The numbers of an update before the arithmetic of `dsx_ops.spec.Hyper.lowered`, some of them on the device.
struct Recipe {
    int32_t algorithm;
    Scalar lr, grad_scale, found_inf, step;  // found_inf: a number other than 0 leaves everything as it is
    double beta1, beta2, eps, weight_decay;
    bool bias_correction;
    int32_t flags;
    uint32_t seed;
};
constexpr int32_t SKIP = 1 << 16;  // flag in a Hyper on the device: do nothing

// Turns a recipe into factors at `out` (room for one Hyper on the device). `step` is read after counting it up when it lies on the device:
// unless found_inf says skip, the kernel adds one to it (fp32 or int64).
void prepare(const Where& where, const Recipe& recipe, Hyper* out);

// One call per algorithm over all rows. `hyper_at`: factors on the device, instead of step.hyper. LAMB_UPDATE: `squares` fp64 [rows, 2],
// `partials` fp64 [2 * chunks of all rows]. LAMB_APPLY: `coefficients` fp32 [rows], on the device.
void step(const Where& where, const Step& step, const Row* rows, size_t count, const Hyper* hyper_at, double* squares, double* partials,
          const float* coefficients);

struct Flat {
    char* data;
    int64_t numel;
    DType dtype;
};
int64_t chunks_of(int64_t numel);
// Sum of squares per row in fp64 at out[i]; `partials` fp64 [chunks of all rows].
void squares(const Where& where, const Flat* rows, size_t count, double* out, double* partials);
void scale(const Where& where, const Flat* rows, size_t count, const Scalar& factor);

void quantize(const Where& where, const Quant& q, const char* x, int64_t numel, char* codes, float* scale, float* zero);
void dequantize(const Where& where, const Quant& q, const char* codes, const float* scale, const float* zero, char* x, int64_t numel);

}  // namespace cuda
}  // namespace dsx
