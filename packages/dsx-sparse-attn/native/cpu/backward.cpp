// Backward: each block of keys against the query blocks of its column; weights are computed again from lse.
//
// Lanes run along the keys. With P = 2^(S - lse), delta = sum(dO * O) per query:
//     dV^T += dO^T P      dP = dO V^T      dS = P * (dP - delta)      dK^T += Q^T dS      dQ += dS K
// K and V are transposed once per block of keys, dK and dV back at its end; everything else is read as it lies. dK and
// dV stay in the cache; dQ is added to in memory, which is why query heads that share keys, and key blocks of one part,
// are one thread's work. Formulas: Dao et al. 2022 (FlashAttention), appendix B.
#include "backward.h"

#include "gemm.h"
#include "tiles.h"

namespace dsx_sparse {
namespace DSX_ISA {
namespace {

struct Column {
    const Problem& p;
    int64_t batch, kv_head, first, keys;  // the block of keys
    int64_t width;
    float *k, *v, *dk, *dv;               // transposed: [width x block]; k is scaled for powers of two
    float *weights, *dscores;             // [block x block], queries down, keys across
    float *k_room, *q_room, *dout_room;
    float *lse, *delta;                   // per query of the block at hand
    uint32_t *rows, *cols;
    Rows k_rows;
};

struct StoreWeights {  // S -> P = 2^(S - lse)
    float* c;
    int64_t ldc;
    const float* lse;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const vf shift = splat(lse[row + r]);
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) store(c + (row + r) * ldc + col + v * LANES, exp2v(t.at[r][v] - shift));
        }
    }
};

struct StoreScoreGradients {  // dP -> dS = P * (dP - delta)
    float* c;
    int64_t ldc;
    const float *weights, *delta;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const vf shift = splat(delta[row + r]);
#pragma GCC unroll 2
            for (int v = 0; v < REGS; ++v) {
                const int64_t at = (row + r) * ldc + col + v * LANES;
                store(c + at, load(weights + at) * (t.at[r][v] - shift));
            }
        }
    }
};

void mask_and_weigh(Column& w, int64_t head, int64_t first, int64_t count) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    alignas(64) float shift[128];  // of the keys
    for (int64_t j = 0; j < n; ++j)
        shift[j] = j >= w.keys ? -INF : p.key_bias ? p.key_bias[w.batch * p.seq + w.first + j] * LOG2E : 0.0f;
    alignas(64) float line[128] = {};
    for (int64_t i = 0; i < count; ++i) {
        float* s = w.weights + i * n;
        const float* bias = nullptr;
        if (p.bias) {
            bias = p.bias + w.batch * p.bias_stride[0] + head * p.bias_stride[1] + (first + i) * p.bias_stride[2] +
                   w.first;
            if (w.keys < n) {
                __builtin_memcpy(line, bias, 4 * w.keys);
                bias = line;
            }
        }
        const vf lse = splat(w.lse[i]);
        for (int64_t j = 0; j < n; j += LANES) {
            vf x = load(s + j) + load(shift + j);
            if (bias) x = x + load(bias + j) * splat(LOG2E);
            store(s + j, exp2v(x - lse));
        }
        if (p.causal && first == w.first)
            for (int64_t j = i + 1; j < n; ++j) s[j] = 0.0f;
    }
    __builtin_memset(w.weights + count * n, 0, 4 * (n - count) * n);
}

// dS with dropped weights: dP counts only where the weight was kept, and dV sees the kept weights, scaled.
void drop_and_differentiate(Column& w, int64_t count) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    const vf scale = splat(p.keep_scale);
    for (int64_t i = 0; i < n; ++i) {
        const vu row = splatu(i < count ? w.rows[i] : 0);
        const vf delta = splat(w.delta[i]);
        for (int64_t j = 0; j < n; j += LANES) {
            const vu hash = mix(row ^ loadu(w.cols + j));
            float *weight = w.weights + i * n + j, *at = w.dscores + i * n + j;
            const vf a = load(weight);
            store(at, a * (keep(load(at), hash, p.drop_below) * scale - delta));
            store(weight, keep(a, hash, p.drop_below) * scale);
        }
    }
}

void add_bias_gradient(const Column& w, int64_t head, int64_t first, int64_t count) {
    const Problem& p = w.p;
    for (int64_t i = 0; i < count; ++i) {
        float* to =
            p.dbias + w.batch * p.bias_stride[0] + head * p.bias_stride[1] + (first + i) * p.bias_stride[2] + w.first;
        const float* from = w.dscores + i * p.block;
        for (int64_t j = 0; j < w.keys; ++j) to[j] += from[j];
    }
}

void add_block(Column& w, int64_t head, int64_t block, int64_t part) {
    const Problem& p = w.p;
    const int64_t n = p.block, first = block * n, count = least(n, p.seq - first);
    const Rows q = rows_as_float(p.q, p, w.batch, head, first, count, w.q_room);
    const Rows dout = rows_as_float(p.dout, p, w.batch, head, first, count, w.dout_room);
    const int64_t line = (w.batch * p.heads + head) * p.seq + first;
    for (int64_t i = 0; i < n; ++i) {  // rows that see no key, and padding: weights 2^(-inf) = 0
        w.lse[i] = i < count && p.lse[line + i] != -INF ? p.lse[line + i] * LOG2E : INF;
        w.delta[i] = i < count ? p.delta[line + i] : 0.0f;
    }
    if (p.bias || p.key_bias || w.keys < n || (p.causal && first == w.first)) {
        gemm<false>(n, n, w.width, q.at, q.stride, w.k, n, Store{w.weights, n});
        mask_and_weigh(w, head, first, count);
    } else {
        gemm<false>(n, n, w.width, q.at, q.stride, w.k, n, StoreWeights{w.weights, n, w.lse});
    }
    if (p.dropout) {
        row_keys(head_key(p, w.batch, head), first, n, w.rows);
        col_keys(head_key(p, w.batch, head), w.first, n, w.cols);
        gemm<false>(n, n, w.width, dout.at, dout.stride, w.v, n, Store{w.dscores, n});
        drop_and_differentiate(w, count);
    } else {
        gemm<false>(n, n, w.width, dout.at, dout.stride, w.v, n, StoreScoreGradients{w.dscores, n, w.weights, w.delta});
    }
    if (p.dbias) add_bias_gradient(w, head, first, count);
    gemm<true>(w.width, n, count, dout.at, dout.stride, w.weights, n, Add{w.dv, n});
    gemm<true>(w.width, n, count, q.at, q.stride, w.dscores, n, Add{w.dk, n});
    float* dq = p.dq + part * p.dq_part + ((w.batch * p.heads + head) * p.blocks * n + first) * w.width;
    gemm<false>(n, w.width, n, w.dscores, n, w.k_rows.at, w.k_rows.stride, AddScaled{dq, w.width, p.scale});
}

// A transposed gradient to the rows of the user's tensor.
void write_rows(const Column& w, const Tensor4& tensor, const float* gradient, float* room, float factor) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    char* target = const_cast<char*>(row_address(tensor, p.dtype, w.batch, w.kv_head, w.first));
    if (p.dtype == F32 && p.dim % PAD == 0 && w.keys == n)
        return transpose(gradient, n, reinterpret_cast<float*>(target), tensor.row, w.width, n, factor);
    transpose(gradient, n, room, w.width, w.width, n, factor);
    for (int64_t j = 0; j < w.keys; ++j)
        narrow(p.dtype, room + j * w.width, target + j * tensor.row * size_of(p.dtype), p.dim);
}

}  // namespace

int64_t backward_scratch(int64_t block, int64_t dim) {
    return 7 * block * padded(dim) + 2 * block * block + 6 * (block + 16);
}

void backward(const Problem& p, int64_t batch, int64_t kv_head, int64_t begin, int64_t end, int64_t part,
              float* scratch) {
    const int64_t n = p.block, width = padded(p.dim), group = p.heads / p.kv_heads;
    for (int64_t column = begin; column < end; ++column) {
        BumpAllocator room{scratch};
        const int64_t first = column * n, keys = least(n, p.seq - first);
        Column w{p, batch, kv_head, first, keys, width,
                 room.take(width * n), room.take(width * n), room.take(width * n), room.take(width * n),
                 room.take(n * n), room.take(n * n),
                 room.take(width * n), room.take(width * n), room.take(width * n), room.take(n), room.take(n),
                 reinterpret_cast<uint32_t*>(room.take(n)), reinterpret_cast<uint32_t*>(room.take(n)), {}};
        const Rows v = rows_as_float(p.v, p, batch, kv_head, first, keys, w.k_room);
        transpose(v.at, v.stride, w.v, n, n, width, 1.0f);
        w.k_rows = rows_as_float(p.k, p, batch, kv_head, first, keys, w.k_room);
        transpose(w.k_rows.at, w.k_rows.stride, w.k, n, n, width, p.scale * LOG2E);
        __builtin_memset(w.dk, 0, 4 * width * n);
        __builtin_memset(w.dv, 0, 4 * width * n);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            const int64_t list = (p.lists.layouts == 1 ? 0 : head) * (p.blocks + 1) + column;
            for (int32_t at = p.lists.col_start[list]; at < p.lists.col_start[list + 1]; ++at)
                add_block(w, head, p.lists.col_items[at], part);
        }
        write_rows(w, p.dk, w.dk, w.q_room, p.scale);
        write_rows(w, p.dv, w.dv, w.q_room, 1.0f);
    }
}

void row_dots(const Problem& p, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    alignas(64) float a[256] = {}, b[256] = {};
    const int64_t width = padded(p.dim);
    float* delta = p.delta + (batch * p.heads + head) * p.seq;
    for (int64_t i = begin; i < end; ++i) {
        widen(p.dtype, row_address(p.out, p.dtype, batch, head, i), a, p.dim);
        widen(p.dtype, row_address(p.dout, p.dtype, batch, head, i), b, p.dim);
        vf sum = splat(0.0f);
        for (int64_t d = 0; d < width; d += LANES) sum = fma(load(a + d), load(b + d), sum);
        float total = 0.0f;
        for (int l = 0; l < LANES; ++l) total += sum[l];
        delta[i] = total;
    }
}

}  // namespace DSX_ISA
}  // namespace dsx_sparse
