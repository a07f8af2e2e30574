// Products of a few vectors with a matrix of 8- or 4-bit codes; a table for each instruction set.
#pragma once
#include <cstdint>

namespace dsx {

// A matrix of `columns` codes in each row; a row has `groups` scales, one for each columns / groups codes. Groups are
// multiples of MATVEC_BLOCK codes, unless a row is one group.
struct PackedMatrix {
    const uint8_t* codes;
    const float* scales;
    int64_t columns, groups;
};
constexpr int64_t MATVEC_BLOCK = 32;

// out[v * out_stride + row] = sum over columns of x[v * columns + column] * code * scale, for rows begin to end and
// every v below `vectors`. For 4 bits x is in the order of `split_pairs`: in each block of 32 the even columns come
// first.
struct MatvecKernels {
    void (*int8)(const PackedMatrix&, const float* x, int64_t vectors, float* out, int64_t out_stride, int64_t begin,
                 int64_t end);
    void (*int4)(const PackedMatrix&, const float* x, int64_t vectors, float* out, int64_t out_stride, int64_t begin,
                 int64_t end);
};

}  // namespace dsx
