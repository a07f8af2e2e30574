// What the attention kernels and their caller agree on: plain pointers, sizes and numbers. No torch, no Python, no STL.
//
// The kernels live in sources that are compiled once per instruction set; each set exports one `Kernels` table.
#pragma once
#include <stdint.h>

namespace dsx_sparse {

enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };
constexpr int64_t PAD = 16;  // head dimensions and tiles are padded to multiples of this

// A tensor [batch, heads, sequence, head dimension] whose last dimension is contiguous. Strides count elements.
struct Tensor4 {
    const char* data;
    int64_t batch, head, row;
};

// Lists of active blocks: of each query block (rows) and of each key block (columns). `layouts` is the number of heads
// that have lists of their own; 1 means one for all.
struct Lists {
    const int32_t *row_start, *row_items;  // [layouts * (nb + 1)], block columns
    const int32_t *col_start, *col_items;  // [layouts * (nb + 1)], block rows
    int32_t layouts;
};

struct Problem {
    DType dtype;
    int64_t batch, heads, kv_heads, seq, dim, block, blocks;
    Tensor4 q, k, v, out, dout, dk, dv;
    Lists lists;
    float scale;
    bool causal;
    const float* bias;            // added to the scaled scores; may be null
    int64_t bias_stride[3];       // batch, head, query; keys are contiguous
    const float* key_bias;        // [batch, seq]; may be null
    bool dropout;
    uint32_t seed, drop_below;    // a weight is dropped when its hash is below
    float keep_scale;
    float* lse;                   // [batch, heads, seq], natural logarithm; -inf where no key is allowed
    float* delta;                 // [batch, heads, seq]: sum(dout * out) per row
    float* dq;                    // [batch, heads, blocks * block, padded dim] fp32, zeroed by the caller; of a part:
                                  // + part * dq_part
    int64_t dq_part;
    float* dbias;                 // strides of bias; may be null. Work that runs at the same time never meets in it
};

struct Kernels {
    const char* name;
    // One block of queries of one head. Writes out and lse.
    void (*forward)(const Problem& p, int64_t batch, int64_t head, int64_t block, float* scratch);
    // delta of one head, rows [begin, end).
    void (*row_dots)(const Problem& p, int64_t batch, int64_t head, int64_t begin, int64_t end);
    // Key blocks [begin, end) of one key head, for all query heads that share it. Writes dk and dv, adds to dq of
    // `part`.
    void (*backward)(const Problem& p, int64_t batch, int64_t kv_head, int64_t begin, int64_t end, int64_t part,
                     float* scratch);
    // Floats of scratch that one thread needs (64-byte aligned).
    int64_t (*scratch)(int64_t block, int64_t dim);
    // Fused multiply-adds as fast as they go; returns how many floating-point operations were done.
    double (*peak)(int64_t rounds, float* sink);
};

}  // namespace dsx_sparse
