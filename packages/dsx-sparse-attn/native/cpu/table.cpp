// The kernels of one instruction set, and the ceiling to hold them against.
#include "backward.h"
#include "forward.h"
#include "simd.h"

namespace dsx_sparse {
namespace DSX_ISA {
namespace {

int64_t scratch(int64_t block, int64_t dim) {
    const int64_t f = forward_scratch(block, dim), b = backward_scratch(block, dim);
    return f > b ? f : b;
}

double peak(int64_t rounds, float* sink) {
    constexpr int CHAINS = 12;  // latency 4, two a cycle, and some to spare
    vf c[CHAINS];
    const vf a = splat(sink[0]), b = splat(sink[1]);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; ++i) c[i] = splat((float)i);
    for (int64_t k = 0; k < rounds; ++k) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; ++i) c[i] = fma(a, c[i], b);
    }
    vf total = splat(0.0f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; ++i) total = total + c[i];
    sink[2] = total[0];
    return 2.0 * LANES * CHAINS * (double)rounds;
}

#define DSX_TEXT(x) #x
#define DSX_NAME(x) DSX_TEXT(x)

}  // namespace

extern const Kernels table;
const Kernels table{DSX_NAME(DSX_ISA), forward, row_dots, backward, scratch, peak};

}  // namespace DSX_ISA
}  // namespace dsx_sparse
