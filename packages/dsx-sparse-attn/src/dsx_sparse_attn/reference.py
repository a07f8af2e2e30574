"""Attention over a layout in plain PyTorch: the oracle for tests, and the implementation for calls that no kernel can
do.

* `dense_attention` computes all scores and lets autograd differentiate them. Tests compare other implementations with
  it.
* `forward` and `backward` gather the computed blocks and multiply them in batches. They use the formulas of the kernels
  (backward recomputes weights from the log-sum-exp), any dtype and device, and memory in proportion to the number of
  blocks.

The dropout mask is a hash of (seed, batch x head, query, key), so that backward, a recomputation, and every backend
draw the same mask: keep where mix(mix(h + i) ^ mix(~h + j)) >= p * 2^32 with h = mix(seed ^ (batch * heads + head)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import AttentionCall, Gradients, compute_dtype
from .masks import hide

__all__ = ["backward", "dense_attention", "dropout_keep", "forward"]

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """The hash of `native/cpu/simd.h`, on int64 tensors that hold 32-bit numbers."""
    x = (((x ^ (x >> 16)) & _MASK) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _dropout_keys(call: AttentionCall, length: int) -> tuple[Tensor, Tensor]:
    """Row and column keys, each int64 [batch, heads, length]."""
    if call.seed is None:
        raise RuntimeError("dropout keys were asked for in a call without a seed")
    batch, heads = call.q.shape[:2]
    device = call.q.device
    which = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    head = _mix((call.seed.to(device).view(1, 1, 1) & _MASK) ^ which)
    places = torch.arange(length, device=device)
    return _mix((head + places) & _MASK), _mix(((head ^ _MASK) + places) & _MASK)


def dropout_keep(call: AttentionCall) -> Tensor:
    """The dropout mask of all scores, bool [batch, heads, seq, seq], True where a weight is kept."""
    rows, cols = _dropout_keys(call, call.q.shape[2])
    return _mix(rows.unsqueeze(-1) ^ cols.unsqueeze(-2)) >= call.drop_below


def allowed(call: AttentionCall) -> Tensor:
    """bool [1 or heads, seq, seq]: the pairs that layout and causality allow."""
    seq = call.q.shape[2]
    full = (call.layout != 0).repeat_interleave(call.block, 1).repeat_interleave(call.block, 2)[:, :seq, :seq]
    return full.tril() if call.causal else full


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def dense_attention(call: AttentionCall) -> Tensor:
    """Attention with all scores in memory, differentiable by autograd; rows with no allowed key are zero."""
    dtype = compute_dtype(call.q.dtype)
    q = call.q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(call.group, 1) for x in (call.k, call.v))
    scores = q @ k.transpose(-1, -2) * call.scale
    added = _sum(call.bias, None if call.key_bias is None else call.key_bias[:, None, None, :])
    if added is not None:
        scores = scores + hide(added)
    scores = scores.masked_fill(~allowed(call), float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    if call.seed is not None:
        weights = weights * dropout_keep(call) * call.keep_scale
    return (weights @ v).to(call.q.dtype)


class _Blocks:
    """The computed blocks of one call, gathered: `heads`, `rows`, `cols` are int64 [nnz]."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.batch, self.query_heads, self.seq, self.dim = call.q.shape
        self.dtype = compute_dtype(call.q.dtype)
        layout = call.layout.tril() if call.causal else call.layout
        self.heads, self.rows, self.cols = layout.expand(self.query_heads, -1, -1).nonzero(as_tuple=True)
        self.kv_heads = self.heads // call.group
        self.lines = self.heads * call.blocks + self.rows
        self.pad = call.blocks * call.block - self.seq

    def split(self, x: Tensor) -> Tensor:
        """[batch, heads, seq, dim] -> [batch, heads, blocks, block, dim], padded with zeros, in the compute dtype."""
        x = F.pad(x.to(self.dtype), (0, 0, 0, self.pad))
        return x.view(*x.shape[:2], self.call.blocks, self.call.block, x.shape[-1])

    def of_rows(self, x: Tensor) -> Tensor:
        """The query block of every computed block, [batch, nnz, block, dim]."""
        return self.split(x)[:, self.heads, self.rows]

    def of_cols(self, x: Tensor) -> Tensor:
        """The key block of every computed block, [batch, nnz, block, dim]."""
        return self.split(x)[:, self.kv_heads, self.cols]

    def sum_by(self, lines: Tensor, heads: int, x: Tensor) -> Tensor:
        """Add up [batch, nnz, block, dim] by line: [batch, heads, seq, dim]."""
        total = x.new_zeros(self.batch, heads * self.call.blocks, *x.shape[2:]).index_add(1, lines, x)
        side = self.call.blocks * self.call.block
        return total.view(self.batch, heads, side, x.shape[-1])[:, :, : self.seq]

    def scores(self) -> Tensor:
        """The scores after scaling, biases and masks, [batch, nnz, block, block]."""
        call, n = self.call, self.call.block
        s = self.of_rows(call.q) @ self.of_cols(call.k).transpose(-1, -2) * call.scale
        inside = torch.arange(n, device=s.device)
        bias = None if call.bias is None else self.bias_blocks(call.bias)
        added = _sum(bias, None if call.key_bias is None else self.key_bias_blocks(call.key_bias))
        if added is not None:
            s = s + hide(added)
        if self.pad:
            beyond = self.cols[:, None] * n + inside >= self.seq
            s = s.masked_fill(beyond[None, :, None, :], float("-inf"))
        if call.causal:
            later = (self.rows == self.cols)[:, None, None] & (inside[None, :] > inside[:, None])
            s = s.masked_fill(later[None], float("-inf"))
        return s

    def key_bias_blocks(self, key_bias: Tensor) -> Tensor:
        """The blocks of a bias of the keys, [batch, nnz, 1, block]."""
        padded = F.pad(key_bias.to(self.dtype), (0, self.pad)).view(-1, self.call.blocks, self.call.block)
        return padded[:, self.cols].unsqueeze(-2)

    def bias_blocks(self, bias: Tensor) -> Tensor:
        """The blocks of a bias, [1 or batch, nnz, 1 or block, block]."""
        tall = bias.shape[2] != 1
        wide = F.pad(bias.to(self.dtype), (0, self.pad, 0, self.pad if tall else 0))
        rows = self.call.blocks if tall else 1
        parts = wide.view(*wide.shape[:2], rows, wide.shape[2] // rows, self.call.blocks, self.call.block).transpose(
            3, 4
        )
        heads = self.heads if bias.shape[1] != 1 else torch.zeros_like(self.heads)
        return parts[:, heads, self.rows if tall else torch.zeros_like(self.rows), self.cols]

    def bias_gradient(self, bias: Tensor, ds: Tensor) -> Tensor:
        """The blocks' gradients, summed to the bias's shape."""
        call, n = self.call, self.call.block
        full = ds.new_zeros(self.batch, self.query_heads, call.blocks, call.blocks, n, n)
        full[:, self.heads, self.rows, self.cols] = ds
        side = call.blocks * n
        full = full.transpose(3, 4).reshape(self.batch, self.query_heads, side, side)[..., : self.seq, : self.seq]
        return full.sum_to_size(bias.shape).to(bias.dtype)

    def keep(self) -> Tensor:
        """The dropout mask of the blocks, bool [batch, nnz, block, block]."""
        call = self.call
        rows, cols = (
            x.view(*x.shape[:2], call.blocks, call.block)[:, self.heads, at]
            for x, at in zip(_dropout_keys(call, call.blocks * call.block), (self.rows, self.cols), strict=True)
        )
        return _mix(rows.unsqueeze(-1) ^ cols.unsqueeze(-2)) >= call.drop_below

    def by_line(self, x: Tensor) -> Tensor:
        """[batch, heads, seq] per row -> [batch, nnz, block, 1]."""
        x = F.pad(x, (0, self.pad)).view(self.batch, self.query_heads * self.call.blocks, self.call.block)
        return x[:, self.lines].unsqueeze(-1)


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and shape, and the log-sum-exp [batch, heads, seq] (-inf where no key is allowed)."""
    b = _Blocks(call)
    s = b.scores()
    per_block = s.amax(-1)
    lines = b.lines.view(1, -1, 1).expand_as(per_block)
    top = s.new_full((b.batch, b.query_heads * call.blocks, call.block), float("-inf"))
    top = top.scatter_reduce(1, lines, per_block, "amax")
    top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(s - top[:, b.lines].unsqueeze(-1))
    total = torch.zeros_like(top).index_add(1, b.lines, p.sum(-1))
    if call.seed is not None:
        p = p * b.keep() * call.keep_scale
    out = b.sum_by(b.lines, b.query_heads, p @ b.of_cols(call.v))
    total, top = (x.view(b.batch, b.query_heads, call.blocks * call.block)[..., : b.seq] for x in (total, top))
    lse = torch.where(total == 0, float("-inf"), top + torch.log(total))
    out = out / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return torch.empty_like(call.q).copy_(out), lse.contiguous()


def backward(call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool) -> Gradients:
    """Gradients by the formulas of the kernels; `lse` is the one that `forward` returned."""
    b = _Blocks(call)
    p = torch.exp(b.scores() - b.by_line(lse.masked_fill(lse == float("-inf"), float("inf"))))
    delta = (dout.to(b.dtype) * out.to(b.dtype)).sum(-1)
    do = b.of_rows(dout)
    dp = do @ b.of_cols(call.v).transpose(-1, -2)
    kept = p
    if call.seed is not None:
        factor = b.keep() * call.keep_scale
        kept, dp = p * factor, dp * factor
    ds = p * (dp - b.by_line(delta))
    kv_heads = call.k.shape[1]
    key_lines = b.kv_heads * call.blocks + b.cols
    dq = b.sum_by(b.lines, b.query_heads, ds @ b.of_cols(call.k)) * call.scale
    dk = b.sum_by(key_lines, kv_heads, ds.transpose(-1, -2) @ b.of_rows(call.q)) * call.scale
    dv = b.sum_by(key_lines, kv_heads, kept.transpose(-1, -2) @ do)
    dbias = b.bias_gradient(call.bias, ds) if want_bias and call.bias is not None else None
    return Gradients(
        torch.empty_like(call.q, memory_format=torch.contiguous_format).copy_(dq),
        torch.empty_like(call.k).copy_(dk),
        torch.empty_like(call.v).copy_(dv),
        dbias,
    )
