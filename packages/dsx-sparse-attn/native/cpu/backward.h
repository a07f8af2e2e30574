// The backward kernels, for the table of their instruction set.
#pragma once
#include "dsx_sparse_attn/kernels.h"

namespace dsx_sparse {
namespace DSX_ISA {

void backward(const Problem& p, int64_t batch, int64_t kv_head, int64_t begin, int64_t end, int64_t part,
              float* scratch);
void row_dots(const Problem& p, int64_t batch, int64_t head, int64_t begin, int64_t end);
int64_t backward_scratch(int64_t block, int64_t dim);

}  // namespace DSX_ISA
}  // namespace dsx_sparse
