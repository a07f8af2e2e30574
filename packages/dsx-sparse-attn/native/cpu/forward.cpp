// Forward: one block of queries against the key blocks of its row, with a running softmax and no scores in memory.
//
// Lanes run along the queries. Scores are computed transposed, S^T[keys x queries] = K * Q^T, and so are the outputs,
// O^T[dim x queries] += V^T * P^T: then K and V are only ever broadcast from where they lie, maxima and sums over keys
// never cross lanes, and the only transpositions are of Q and O, once per block of queries. The scale and log2(e) go
// into Q: p = 2^(s - max). Formulas: Milakov & Gimelshein 2018 (running softmax), Dao et al. 2022 (FlashAttention).
#include "forward.h"

#include "gemm.h"
#include "tiles.h"

namespace dsx_sparse {
namespace DSX_ISA {
namespace {

// The state of one block of queries; all arrays have one entry per lane (query).
struct Row {
    const Problem& p;
    int64_t batch, head, kv_head, block, first, count;
    int64_t width;                              // padded head dimension
    float *q, *scores, *out, *k_room, *v_room;  // q: [width x block], scores: [block x block], out: [width x block]
    float *top, *sum, *factor, *bias;
    uint32_t *rows, *cols;
    uint32_t key;
    bool started;
};

// Scores stored, and the largest of each lane taken along.
struct StoreMax {
    float* c;
    int64_t ldc;
    float* top;
    template <int ROWS, int REGS>
    DSX_INLINE void operator()(const Tile<ROWS, REGS>& t, int64_t row, int64_t col) const {
#pragma GCC unroll 2
        for (int v = 0; v < REGS; ++v) {
            vf high = load(top + col + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                store(c + (row + r) * ldc + col + v * LANES, t.at[r][v]);
                high = maximum(t.at[r][v], high);
            }
            store(top + col + v * LANES, high);
        }
    }
};

// Adds biases and masks to the scores of one tile and takes the maxima.
void mask_scores(Row& w, int64_t first_key, int64_t keys, float* top) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    if (p.bias) {  // [queries x keys] in memory; the tile is [keys x queries]
        const float* b =
            p.bias + w.batch * p.bias_stride[0] + w.head * p.bias_stride[1] + w.first * p.bias_stride[2] + first_key;
        if (w.count == n && keys == n) {
            transpose(b, p.bias_stride[2], w.bias, n, n, n, LOG2E);
        } else {
            for (int64_t j = 0; j < keys; ++j)
                for (int64_t i = 0; i < n; ++i)
                    w.bias[j * n + i] = i < w.count ? b[i * p.bias_stride[2] + j] * LOG2E : 0.0f;
        }
    }
    const float* key_bias = p.key_bias ? p.key_bias + w.batch * p.seq + first_key : nullptr;
    const bool diagonal = p.causal && first_key == w.first;
    for (int64_t j = 0; j < n; ++j) {
        float* s = w.scores + j * n;
        const float shift = j >= keys ? -INF : key_bias ? key_bias[j] * LOG2E : 0.0f;
        for (int64_t i = 0; i < n; i += LANES) {
            vf x = load(s + i) + splat(shift);
            if (j >= keys) x = splat(-INF);
            else if (p.bias) x = x + load(w.bias + j * n + i);
            store(s + i, x);
        }
        if (diagonal)
            for (int64_t i = 0; i < j; ++i) s[i] = -INF;
        for (int64_t i = 0; i < n; i += LANES) store(top + i, maximum(load(s + i), load(top + i)));
    }
}

// scores -> weights; updates maximum and sum; leaves in w.factor what the output so far must be multiplied by.
bool softmax(Row& w, const float* top, int64_t first_key, int64_t keys) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    const vf keep_scale = splat(p.keep_scale);
    bool rescale = false;
    if (p.dropout) col_keys(w.key, first_key, keys, w.cols);
    for (int64_t i = 0; i < n; i += LANES) {
        const vf before = load(w.top + i), high = maximum(before, load(top + i));
        const vf safe = high == splat(-INF) ? splat(0.0f) : high;  // nothing allowed yet: 2^(-inf - 0) = 0
        const vf factor = exp2v(before - safe);
        vf total0 = load(w.sum + i) * factor, total1 = splat(0.0f);
        float* s = w.scores + i;
        if (!p.dropout) {
            for (int64_t j = 0; j < keys; j += 2) {
                const vf a = exp2v(load(s + j * n) - safe), b = exp2v(load(s + (j + 1) * n) - safe);
                store(s + j * n, a);
                store(s + (j + 1) * n, b);
                total0 = total0 + a;
                total1 = total1 + b;
            }
        } else {
            const vu row = loadu(w.rows + i);
            for (int64_t j = 0; j < keys; ++j) {
                const vf a = exp2v(load(s + j * n) - safe);
                total0 = total0 + a;
                store(s + j * n, keep(a, mix(row ^ splatu(w.cols[j])), p.drop_below) * keep_scale);
            }
        }
        store(w.top + i, high);
        store(w.sum + i, total0 + total1);
        store(w.factor + i, factor);
        rescale |= any_not_one(factor);
    }
    return rescale;
}

void add_block(Row& w, int64_t column) {
    const Problem& p = w.p;
    const int64_t n = p.block, first_key = column * n, keys = least(n, p.seq - first_key);
    const Rows k = rows_as_float(p.k, p, w.batch, w.kv_head, first_key, keys, w.k_room);
    const Rows v = rows_as_float(p.v, p, w.batch, w.kv_head, first_key, keys, w.v_room);
    const bool masked = p.bias || p.key_bias || keys < n || (p.causal && first_key == w.first);
    alignas(64) float top[128];
    for (int64_t i = 0; i < n; i += LANES) store(top + i, splat(-INF));
    if (masked) {
        gemm<false, TALL_ROWS>(n, n, w.width, k.at, k.stride, w.q, n, Store{w.scores, n});
        mask_scores(w, first_key, keys, top);
    } else {
        gemm<false, TALL_ROWS>(n, n, w.width, k.at, k.stride, w.q, n, StoreMax{w.scores, n, top});
    }
    const bool rescale = softmax(w, top, first_key, masked ? n : keys);
    if (!w.started) {
        gemm<true, TALL_ROWS>(w.width, n, n, v.at, v.stride, w.scores, n, Store{w.out, n});
        w.started = true;
        return;
    }
    if (rescale)
        for (int64_t d = 0; d < w.width; ++d)
            for (int64_t i = 0; i < n; i += LANES)
                store(w.out + d * n + i, load(w.out + d * n + i) * load(w.factor + i));
    gemm<true, TALL_ROWS>(w.width, n, n, v.at, v.stride, w.scores, n, Add{w.out, n});
}

void write_output(Row& w) {
    const Problem& p = w.p;
    const int64_t n = p.block;
    float* lse = p.lse + (w.batch * p.heads + w.head) * p.seq + w.first;
    for (int64_t i = 0; i < n; ++i) {
        if (i < w.count) lse[i] = w.sum[i] == 0.0f ? -INF : w.top[i] * LN2 + __builtin_logf(w.sum[i]);
        w.factor[i] = w.sum[i] == 0.0f ? 0.0f : 1.0f / w.sum[i];
    }
    for (int64_t d = 0; d < w.width; ++d)
        for (int64_t i = 0; i < n; i += LANES)
            store(w.out + d * n + i, w.started ? load(w.out + d * n + i) * load(w.factor + i) : splat(0.0f));
    char* target = const_cast<char*>(row_address(p.out, p.dtype, w.batch, w.head, w.first));
    if (p.dtype == F32 && p.dim % PAD == 0 && w.count == n)
        return transpose(w.out, n, reinterpret_cast<float*>(target), p.out.row, w.width, n, 1.0f);
    transpose(w.out, n, w.q, w.width, w.width, n, 1.0f);  // the queries are no longer needed
    for (int64_t i = 0; i < w.count; ++i)
        narrow(p.dtype, w.q + i * w.width, target + i * p.out.row * size_of(p.dtype), p.dim);
}

}  // namespace

int64_t forward_scratch(int64_t block, int64_t dim) {
    return 4 * block * padded(dim) + 2 * block * block + 6 * (block + 16);
}

void forward(const Problem& p, int64_t batch, int64_t head, int64_t block, float* scratch) {
    BumpAllocator room{scratch};
    const int64_t n = p.block, width = padded(p.dim), first = block * n, count = least(n, p.seq - first);
    Row w{p, batch, head, head / (p.heads / p.kv_heads), block, first, count, width,
          room.take(width * n), room.take(n * n), room.take(width * n), room.take(width * n), room.take(width * n),
          room.take(n), room.take(n), room.take(n), room.take(n * n),
          reinterpret_cast<uint32_t*>(room.take(n)), reinterpret_cast<uint32_t*>(room.take(n)), 0, false};
    const Rows q = rows_as_float(p.q, p, batch, head, first, count, w.k_room);
    transpose(q.at, q.stride, w.q, n, n, width, p.scale * LOG2E);
    for (int64_t i = 0; i < n; ++i) {
        w.top[i] = -INF;
        w.sum[i] = 0.0f;
    }
    if (p.dropout) {
        w.key = head_key(p, batch, head);
        row_keys(w.key, first, n, w.rows);
        for (int64_t i = 0; i < n; ++i) w.cols[i] = 0;
    }
    const int64_t list = (p.lists.layouts == 1 ? 0 : head) * (p.blocks + 1) + block;
    for (int32_t at = p.lists.row_start[list]; at < p.lists.row_start[list + 1]; ++at)
        add_block(w, p.lists.row_items[at]);
    write_output(w);
}

}  // namespace DSX_ISA
}  // namespace dsx_sparse
