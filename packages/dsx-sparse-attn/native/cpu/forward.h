// The forward kernel, for the table of its instruction set.
#pragma once
#include "dsx_sparse_attn/kernels.h"

namespace dsx_sparse {
namespace DSX_ISA {

void forward(const Problem& p, int64_t batch, int64_t head, int64_t block, float* scratch);
int64_t forward_scratch(int64_t block, int64_t dim);

}  // namespace DSX_ISA
}  // namespace dsx_sparse
