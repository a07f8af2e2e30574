"""Triton kernels of block-sparse attention: forward, gradient of q, gradients of k and v. Imported only by `triton_gpu`.

One program does one block of queries (forward, dq) or of keys (dk, dv) of one head, and walks the list of its partners. The same
formulas as the CPU kernels: running softmax in powers of two, weights recomputed from the log-sum-exp, dropout by the hash that
`reference.py` describes. No atomics: the results are the same in every run.

Names: bh = batch x head, i/j = positions of queries/keys, N = block, D = head dimension, DP = D rounded up to a power of two.
"""

# The kernels' arguments are pointers, strides and compile-time switches: many, and typed by Triton.
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, bh, i, j, drop_below):
    """Which weights of a tile are kept."""
    head = _mix(tl.load(seed).to(tl.uint32) ^ bh.to(tl.uint32))
    rows = _mix(head + i.to(tl.uint32))
    cols = _mix((head ^ 0xFFFFFFFF) + j.to(tl.uint32))  # not ~: the interpreter of some versions fails on it
    return _mix(rows[:, None] ^ cols[None, :]) >= tl.load(drop_below).to(tl.uint32)


@triton.jit
def _rows(base, i, row_stride, seq, D: tl.constexpr, DP: tl.constexpr):
    """Rows i of a [seq, D] matrix as [N, DP], zero outside."""
    d = tl.arange(0, DP)
    inside = (i[:, None] < seq) & (d[None, :] < D)
    return tl.load(base + i[:, None].to(tl.int64) * row_stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _put(base, i, row_stride, seq, x, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    inside = (i[:, None] < seq) & (d[None, :] < D)
    tl.store(base + i[:, None].to(tl.int64) * row_stride + d[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _scores(q, k, i, j, b, h, scale2, bias, bias_b, bias_h, bias_i, key_bias, seq,
            HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Scores of a tile in units of log 2, masked."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
    inside = (i[:, None] < seq) & (j[None, :] < seq)
    if HAS_BIAS:
        at = bias + b * bias_b + h * bias_h + i[:, None].to(tl.int64) * bias_i + j[None, :]
        s += tl.load(at, mask=inside, other=0.0) * LOG2E
    if HAS_KEY_BIAS:
        s += (tl.load(key_bias + b * seq + j, mask=j < seq, other=0.0) * LOG2E)[None, :]
    seen = j[None, :] < seq
    if CAUSAL:
        seen = seen & (i[:, None] >= j[None, :])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, COUNTS, ITEMS, BIAS, KEY_BIAS, SEED, DROP,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, bias_b, bias_h, bias_i,
    heads, group, seq, blocks, layout_stride, scale, keep_scale,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = block * N + tl.arange(0, N)
    q = _rows(Q + b * q_b + h * q_h, i, q_s, seq, D, DP)
    line = (h * layout_stride + block).to(tl.int64)
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    out = tl.zeros([N, DP], tl.float32)
    for at in range(tl.load(COUNTS + line)):
        j = tl.load(ITEMS + line * blocks + at) * N + tl.arange(0, N)
        k = _rows(K + b * k_b + (h // group) * k_h, j, k_s, seq, D, DP)
        s = _scores(q, k, i, j, b, h, scale * LOG2E, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq,
                    HAS_BIAS, HAS_KEY_BIAS, CAUSAL)  # fmt: skip
        high = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)
        factor = tl.exp2(top - safe)
        p = tl.exp2(s - safe[:, None])
        total = total * factor + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(_kept(SEED, bh, i, j, DROP), p * keep_scale, 0.0)
        v = _rows(V + b * v_b + (h // group) * v_h, j, v_s, seq, D, DP)
        out = out * factor[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = high
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    _put(OUT + b * o_b + h * o_h, i, o_s, seq, out, D, DP)
    lse = tl.where(total == 0.0, float("-inf"), top * LN2 + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(LSE + bh.to(tl.int64) * seq + i, lse, mask=i < seq)


@triton.jit
def _weights_and_scores_gradient(
    q, k, v, do, i, j, b, h, bh, LSE, DELTA, scale, bias, bias_b, bias_h, bias_i, key_bias, SEED, DROP, seq, keep_scale,
    HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """(weights as dV sees them, dS), both [N, N] in float32."""
    lse = tl.load(LSE + bh.to(tl.int64) * seq + i, mask=i < seq, other=float("-inf"))
    delta = tl.load(DELTA + bh.to(tl.int64) * seq + i, mask=i < seq, other=0.0)
    s = _scores(
        q, k, i, j, b, h, scale * LOG2E, bias, bias_b, bias_h, bias_i, key_bias, seq, HAS_BIAS, HAS_KEY_BIAS, CAUSAL
    )
    empty = lse == float("-inf")
    p = tl.where(empty[:, None], 0.0, tl.exp2(s - tl.where(empty, 0.0, lse * LOG2E)[:, None]))
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    kept = p
    if DROPOUT:
        keep = _kept(SEED, bh, i, j, DROP)
        kept = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return kept, p * (dp - delta[:, None])


@triton.jit
def dq_kernel(
    Q, K, V, DO, DQ, LSE, DELTA, DBIAS, COUNTS, ITEMS, BIAS, KEY_BIAS, SEED, DROP,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dq_b, dq_h, dq_s, bias_b, bias_h, bias_i,
    heads, group, seq, blocks, layout_stride, scale, keep_scale,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, WANT_BIAS: tl.constexpr,
):  # fmt: skip
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = block * N + tl.arange(0, N)
    q = _rows(Q + b * q_b + h * q_h, i, q_s, seq, D, DP)
    do = _rows(DO + b * do_b + h * do_h, i, do_s, seq, D, DP)
    line = (h * layout_stride + block).to(tl.int64)
    dq = tl.zeros([N, DP], tl.float32)
    for at in range(tl.load(COUNTS + line)):
        j = tl.load(ITEMS + line * blocks + at) * N + tl.arange(0, N)
        k = _rows(K + b * k_b + (h // group) * k_h, j, k_s, seq, D, DP)
        v = _rows(V + b * v_b + (h // group) * v_h, j, v_s, seq, D, DP)
        _, ds = _weights_and_scores_gradient(
            q, k, v, do, i, j, b, h, bh, LSE, DELTA, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, SEED, DROP, seq,
            keep_scale, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT,
        )  # fmt: skip
        if WANT_BIAS:
            inside = (i[:, None] < seq) & (j[None, :] < seq)
            tl.store(DBIAS + (bh.to(tl.int64) * seq + i[:, None]) * seq + j[None, :], ds, mask=inside)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _put(DQ + b * dq_b + h * dq_h, i, dq_s, seq, dq * scale, D, DP)


@triton.jit
def dkv_kernel(
    Q, K, V, DO, DK, DV, LSE, DELTA, COUNTS, ITEMS, BIAS, KEY_BIAS, SEED, DROP,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    bias_b, bias_h, bias_i,
    heads, group, seq, blocks, layout_stride, scale, keep_scale,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    block, bkv = tl.program_id(0), tl.program_id(1)
    kv_heads = heads // group
    b, hkv = (bkv // kv_heads).to(tl.int64), (bkv % kv_heads).to(tl.int64)
    j = block * N + tl.arange(0, N)
    k = _rows(K + b * k_b + hkv * k_h, j, k_s, seq, D, DP)
    v = _rows(V + b * v_b + hkv * v_h, j, v_s, seq, D, DP)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for member in range(group):
        h = hkv * group + member
        bh = b * heads + h
        line = h * layout_stride + block
        for at in range(tl.load(COUNTS + line)):
            i = tl.load(ITEMS + line * blocks + at) * N + tl.arange(0, N)
            q = _rows(Q + b * q_b + h * q_h, i, q_s, seq, D, DP)
            do = _rows(DO + b * do_b + h * do_h, i, do_s, seq, D, DP)
            p, ds = _weights_and_scores_gradient(
                q, k, v, do, i, j, b, h, bh, LSE, DELTA, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, SEED, DROP, seq,
                keep_scale, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT,
            )  # fmt: skip
            dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision="ieee")
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    _put(DK + b * dk_b + hkv * dk_h, j, dk_s, seq, dk * scale, D, DP)
    _put(DV + b * dv_b + hkv * dv_h, j, dv_s, seq, dv, D, DP)
