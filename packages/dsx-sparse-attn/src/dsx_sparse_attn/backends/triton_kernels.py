"""Triton kernels of block-sparse attention: forward, gradient of q, gradients of k and v. Imported only by
`triton_gpu`.

One program computes one tile of queries (forward, dq) or of keys (dk, dv) of one head. It walks over a list of the
tiles that it is combined with; `triton_tiles` makes the lists. A tile is 16 to 128 positions wide and may hold several
blocks of the layout: then a bit per block says which are computed. Every list has two parts: partial tiles, whose
elements are masked one by one, and full tiles, which need no mask.

The formulas are those of the CPU kernels: a running softmax in powers of two, weights recomputed from the log-sum-exp
in backward, dropout by the hash that `reference.py` describes. There are no atomics, so the results are the same in
every run on one kind of device.

Names: i and j are positions of queries and keys; ROWS and COLS are the sizes of a tile in these directions; D is the
head dimension and DP is D rounded up to a power of two; PRECISION is how float32 products are computed ("tf32x3": three
products on tensor cores).
"""

# The kernels' arguments are pointers, strides and compile-time switches: many, and typed by Triton.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from call to call. Triton would compile a kernel again when one becomes 1 or a multiple of 16.
_COUNTS = [
    "drop_below", "heads", "tiles", "lines", "long_lines", "copies", "copies_per_batch", "head_lines", "shift",
    "cols_per_tile",
]  # fmt: skip

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, bh, i, j, drop_below):
    """The mask of the weights of a tile that dropout keeps; i and j broadcast against each other."""
    head = _mix(seed ^ bh.to(tl.uint32))
    rows = _mix(head + i.to(tl.uint32))
    cols = _mix((head ^ 0xFFFFFFFF) + j.to(tl.uint32))  # not ~: the interpreter of some versions fails on it
    return _mix(rows ^ cols) >= drop_below.to(tl.uint32)


@triton.jit
def _line_and_copy(ORDER, lines, long_lines, copies):
    """The number of this program's tile list, and which copy of it (batch and head) the program computes.

    Long lists come first, for all copies, so that none of them starts last.
    """
    pid = tl.program_id(0)
    is_long = pid < copies * long_lines
    at = tl.where(is_long, pid, pid - copies * long_lines)
    count = tl.where(is_long, long_lines, lines - long_lines)
    line = tl.load(ORDER + tl.where(is_long, 0, long_lines) + at % count)
    return line, at // count


@triton.jit
def _tile(base, first, row_stride, seq, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, INSIDE: tl.constexpr):
    """Rows first, first + 1, ... of a [seq, D] matrix as [ROWS, DP]; zero beyond its borders.

    INSIDE: all rows are below seq.
    """
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    at = base + first.to(tl.int64) * row_stride + (i[:, None] * row_stride + d[None, :])
    if INSIDE and D == DP:
        x = tl.load(at)
    elif INSIDE:
        x = tl.load(at, mask=(d[None, :] < D) & (i[:, None] >= 0), other=0.0)
    else:
        x = tl.load(at, mask=(first + i[:, None] < seq) & (d[None, :] < D), other=0.0)
    return x


@triton.jit
def _put(base, first, row_stride, seq, x, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    at = base + first.to(tl.int64) * row_stride + (i[:, None] * row_stride + d[None, :])
    tl.store(at, x.to(base.dtype.element_ty), mask=(first + i[:, None] < seq) & (d[None, :] < D))


@triton.jit
def _masked(
    s, in_i, in_j, first_i, first_j, bits, shift, cols_per_tile, b, h, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq,
    HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile (in units of log 2) with biases added, and -inf where they are masked.

    in_i, in_j: positions inside the tile, shaped to broadcast to that of s. bits: bit (row of blocks * cols_per_tile +
    column of blocks) says whether the layout computes that block; shift is log2 of the block.
    """
    i = first_i + in_i
    j = first_j + in_j
    if HAS_BIAS:
        at = BIAS + b * bias_b + h * bias_h + first_i.to(tl.int64) * bias_i + first_j + (in_i * bias_i + in_j)
        if FULL:
            s += tl.load(at) * LOG2E
        else:
            s += tl.load(at, mask=(i < seq) & (j < seq), other=0.0) * LOG2E
    if HAS_KEY_BIAS:
        if FULL:
            s += tl.load(KEY_BIAS + b * seq + j) * LOG2E
        else:
            s += tl.load(KEY_BIAS + b * seq + j, mask=j < seq, other=0.0) * LOG2E
    if not FULL:
        seen = ((bits >> ((in_i >> shift) * cols_per_tile + (in_j >> shift))) & 1) != 0
        seen = seen & (j < seq)
        if CAUSAL:
            seen = seen & (i >= j)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _forward_step(
    q, out, total, top, at, ITEMS, BITS, K, V, k_s, v_s, first_i, b, h, bh, seed, drop_below, keep_scale, scale,
    BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running softmax."""
    first_j = tl.load(ITEMS + at) * COLS
    in_i = tl.arange(0, ROWS)[:, None]
    in_j = tl.arange(0, COLS)[None, :]
    bits = 0 if FULL else tl.load(BITS + at)
    k = _tile(K, first_j, k_s, seq, COLS, D, DP, FULL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    s = _masked(
        s, in_i, in_j, first_i, first_j, bits, shift, cols_per_tile, b, h, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq,
        HAS_BIAS, HAS_KEY_BIAS, CAUSAL, FULL,
    )  # fmt: skip
    high = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(high == float("-inf"), 0.0, high)
    factor = tl.exp2(top - safe)
    p = tl.exp2(s - safe[:, None])
    total = total * factor + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(_kept(seed, bh, first_i + in_i, first_j + in_j, drop_below), p * keep_scale, 0.0)
    v = _tile(V, first_j, v_s, seq, COLS, D, DP, FULL)
    out = tl.dot(p.to(v.dtype), v, out * factor[:, None], input_precision=PRECISION)
    return out, total, high


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    Q, K, V, OUT, LSE, STARTS, ITEMS, BITS, ORDER, BIAS, KEY_BIAS, SEED,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, bias_b, bias_h, bias_i,
    heads, group, seq, tiles, lines, long_lines, copies, copies_per_batch, shift, cols_per_tile, drop_below, scale,
    keep_scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries."""
    line, copy = _line_and_copy(ORDER, lines, long_lines, copies)
    h = (line // tiles + copy % copies_per_batch).to(tl.int64)
    b = (copy // copies_per_batch).to(tl.int64)
    bh = b * heads + h
    first_i = (line % tiles) * ROWS
    q = _tile(Q + b * q_b + h * q_h, first_i, q_s, seq, ROWS, D, DP, False)
    k = K + b * k_b + (h // group) * k_h
    v = V + b * v_b + (h // group) * v_h
    seed = tl.load(SEED).to(tl.uint32) if DROPOUT else 0
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DP], tl.float32)
    middle = tl.load(STARTS + 2 * line + 1)
    for at in range(tl.load(STARTS + 2 * line), middle):
        out, total, top = _forward_step(
            q, out, total, top, at, ITEMS, BITS, k, v, k_s, v_s, first_i, b, h, bh, seed, drop_below, keep_scale, scale,
            BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
            ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, False,
        )  # fmt: skip
    for at in range(middle, tl.load(STARTS + 2 * line + 2)):
        out, total, top = _forward_step(
            q, out, total, top, at, ITEMS, BITS, k, v, k_s, v_s, first_i, b, h, bh, seed, drop_below, keep_scale, scale,
            BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
            ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, True,
        )  # fmt: skip
    safe_total = tl.where(total == 0.0, 1.0, total)
    _put(OUT + b * o_b + h * o_h, first_i, o_s, seq, out / safe_total[:, None], ROWS, D, DP)
    lse = tl.where(total == 0.0, float("-inf"), top * LN2 + tl.log(safe_total))
    i = first_i + tl.arange(0, ROWS)
    tl.store(LSE + bh * seq + i, lse, mask=i < seq)


@triton.jit(do_not_specialize=["heads", "tiles"])
def delta_kernel(
    OUT,
    DO,
    DELTA,
    o_b,
    o_h,
    o_s,
    do_b,
    do_h,
    do_s,
    heads,
    seq,
    tiles,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """sum(out * dout) of every row, float32 [batch, heads, seq]."""
    pid = tl.program_id(0)
    bh = (pid // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = (pid % tiles) * ROWS
    out = _tile(OUT + b * o_b + h * o_h, first, o_s, seq, ROWS, D, DP, False).to(tl.float32)
    do = _tile(DO + b * do_b + h * do_h, first, do_s, seq, ROWS, D, DP, False).to(tl.float32)
    i = first + tl.arange(0, ROWS)
    tl.store(DELTA + bh * seq + i, tl.sum(out * do, 1), mask=i < seq)


@triton.jit
def _row_numbers(LSE, DELTA, at, i, seq, INSIDE: tl.constexpr):
    """(log-sum-exp in units of log 2, delta) of rows i. Rows that see no key get +inf: their weights are 2^-inf = 0."""
    if INSIDE:
        lse = tl.load(LSE + at + i)
        delta = tl.load(DELTA + at + i)
    else:
        lse = tl.load(LSE + at + i, mask=i < seq, other=float("-inf"))
        delta = tl.load(DELTA + at + i, mask=i < seq, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), delta


@triton.jit
def _dq_step(
    q, do, lse, delta, dq, at, ITEMS, BITS, K, V, DBIAS, k_s, v_s, first_i, b, h, bh, seed, drop_below, keep_scale,
    scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    WANT_BIAS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Adds dS K of one tile of keys."""
    first_j = tl.load(ITEMS + at) * COLS
    in_i = tl.arange(0, ROWS)[:, None]
    in_j = tl.arange(0, COLS)[None, :]
    bits = 0 if FULL else tl.load(BITS + at)
    k = _tile(K, first_j, k_s, seq, COLS, D, DP, FULL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    s = _masked(
        s, in_i, in_j, first_i, first_j, bits, shift, cols_per_tile, b, h, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq,
        HAS_BIAS, HAS_KEY_BIAS, CAUSAL, FULL,
    )  # fmt: skip
    p = tl.exp2(s - lse[:, None])
    v = _tile(V, first_j, v_s, seq, COLS, D, DP, FULL)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(_kept(seed, bh, first_i + in_i, first_j + in_j, drop_below), dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if WANT_BIAS:
        i = first_i + in_i
        j = first_j + in_j
        tl.store(DBIAS + (bh * seq + first_i) * seq + first_j + (in_i * seq + in_j), ds, mask=(i < seq) & (j < seq))
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    Q, K, V, DO, DQ, LSE, DELTA, DBIAS, STARTS, ITEMS, BITS, ORDER, BIAS, KEY_BIAS, SEED,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dq_b, dq_h, dq_s, bias_b, bias_h, bias_i,
    heads, group, seq, tiles, lines, long_lines, copies, copies_per_batch, shift, cols_per_tile, drop_below, scale,
    keep_scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    WANT_BIAS: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and of the bias if it is wanted."""
    line, copy = _line_and_copy(ORDER, lines, long_lines, copies)
    h = (line // tiles + copy % copies_per_batch).to(tl.int64)
    b = (copy // copies_per_batch).to(tl.int64)
    bh = b * heads + h
    first_i = (line % tiles) * ROWS
    q = _tile(Q + b * q_b + h * q_h, first_i, q_s, seq, ROWS, D, DP, False)
    do = _tile(DO + b * do_b + h * do_h, first_i, do_s, seq, ROWS, D, DP, False)
    k = K + b * k_b + (h // group) * k_h
    v = V + b * v_b + (h // group) * v_h
    lse, delta = _row_numbers(LSE, DELTA, bh * seq, first_i + tl.arange(0, ROWS), seq, False)
    seed = tl.load(SEED).to(tl.uint32) if DROPOUT else 0
    dq = tl.zeros([ROWS, DP], tl.float32)
    middle = tl.load(STARTS + 2 * line + 1)
    for at in range(tl.load(STARTS + 2 * line), middle):
        dq = _dq_step(
            q, do, lse, delta, dq, at, ITEMS, BITS, k, v, DBIAS, k_s, v_s, first_i, b, h, bh, seed, drop_below,
            keep_scale, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
            ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, WANT_BIAS, False,
        )  # fmt: skip
    for at in range(middle, tl.load(STARTS + 2 * line + 2)):
        dq = _dq_step(
            q, do, lse, delta, dq, at, ITEMS, BITS, k, v, DBIAS, k_s, v_s, first_i, b, h, bh, seed, drop_below,
            keep_scale, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
            ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, WANT_BIAS, True,
        )  # fmt: skip
    _put(DQ + b * dq_b + h * dq_h, first_i, dq_s, seq, dq * scale, ROWS, D, DP)


@triton.jit
def _dkv_step(
    k, v, dk, dv, at, ITEMS, BITS, Q, DO, LSE, DELTA, q_s, do_s, first_j, b, h, bh, seed, drop_below, keep_scale, scale,
    BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Adds P^T dO and dS^T Q of one tile of queries.

    Scores are computed transposed, [COLS, ROWS], so that none is transposed afterwards.
    """
    first_i = tl.load(ITEMS + at) * ROWS
    in_i = tl.arange(0, ROWS)[None, :]
    in_j = tl.arange(0, COLS)[:, None]
    bits = 0 if FULL else tl.load(BITS + at)
    q = _tile(Q, first_i, q_s, seq, ROWS, D, DP, FULL)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
    s = _masked(
        s, in_i, in_j, first_i, first_j, bits, shift, cols_per_tile, b, h, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq,
        HAS_BIAS, HAS_KEY_BIAS, CAUSAL, FULL,
    )  # fmt: skip
    lse, delta = _row_numbers(LSE, DELTA, bh * seq, first_i + tl.arange(0, ROWS), seq, FULL)
    p = tl.exp2(s - lse[None, :])
    do = _tile(DO, first_i, do_s, seq, ROWS, D, DP, FULL)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    kept = p
    if DROPOUT:
        keep = _kept(seed, bh, first_i + in_i, first_j + in_j, drop_below)
        kept = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_COUNTS)
def dkv_kernel(
    Q, K, V, DO, DK, DV, LSE, DELTA, STARTS, ITEMS, BITS, ORDER, BIAS, KEY_BIAS, SEED,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    bias_b, bias_h, bias_i,
    heads, group, members, seq, tiles, lines, long_lines, copies, copies_per_batch, head_lines, shift, cols_per_tile,
    drop_below, scale, keep_scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values from `members` of the query heads that share them, starting at head
    `part * members`.

    head_lines: number of lists of one query head, which are stored one after the other (0: all heads share a layout).
    """
    line, copy = _line_and_copy(ORDER, lines, long_lines, copies)
    part = (line // tiles + copy % copies_per_batch).to(tl.int64)
    b = (copy // copies_per_batch).to(tl.int64)
    first_j = (line % tiles) * COLS
    kv = part * members // group
    k = _tile(K + b * k_b + kv * k_h, first_j, k_s, seq, COLS, D, DP, False)
    v = _tile(V + b * v_b + kv * v_h, first_j, v_s, seq, COLS, D, DP, False)
    seed = tl.load(SEED).to(tl.uint32) if DROPOUT else 0
    dk = tl.zeros([COLS, DP], tl.float32)
    dv = tl.zeros([COLS, DP], tl.float32)
    for member in range(members):
        h = part * members + member
        bh = b * heads + h
        q = Q + b * q_b + h * q_h
        do = DO + b * do_b + h * do_h
        start = STARTS + 2 * (h * head_lines + line % tiles)
        middle = tl.load(start + 1)
        for at in range(tl.load(start), middle):
            dk, dv = _dkv_step(
                k, v, dk, dv, at, ITEMS, BITS, q, do, LSE, DELTA, q_s, do_s, first_j, b, h, bh, seed, drop_below,
                keep_scale, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
                ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, False,
            )  # fmt: skip
        for at in range(middle, tl.load(start + 2)):
            dk, dv = _dkv_step(
                k, v, dk, dv, at, ITEMS, BITS, q, do, LSE, DELTA, q_s, do_s, first_j, b, h, bh, seed, drop_below,
                keep_scale, scale, BIAS, bias_b, bias_h, bias_i, KEY_BIAS, seq, shift, cols_per_tile,
                ROWS, COLS, D, DP, HAS_BIAS, HAS_KEY_BIAS, CAUSAL, DROPOUT, PRECISION, True,
            )  # fmt: skip
    _put(DK + b * dk_b + part * dk_h, first_j, dk_s, seq, dk * scale, COLS, D, DP)
    _put(DV + b * dv_b + part * dv_h, first_j, dv_s, seq, dv, COLS, D, DP)
