"""The number of floating-point operations of a call, for `torch.utils.flop_counter` and dsx-monitor's profiler.

One product of a block of queries with a block of keys over `dim` numbers costs 2 * rows * columns * dim. Forward has
two products for every block of the layout (scores, output), backward five (scores again, and the gradients of weights,
values, queries and keys). Elements of a block that a causal or padding mask hides are computed, and so they are
counted. Left out, as usual: softmax, masks, dropout.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["register_flop_formulas"]

_FORWARD, _BACKWARD = 2, 5


def _seen_pairs(layout: Tensor, seq: int, block: int, heads: int) -> int:
    """Pairs of query and key that the layout computes, over all heads; all pairs if the layout is being traced."""
    if layout.is_meta or type(layout) is not Tensor:
        return heads * seq * seq
    blocks = layout.shape[-1]
    lengths = torch.full((blocks,), block, dtype=torch.int64)
    lengths[-1] = seq - block * (blocks - 1)
    pairs = ((layout != 0).to("cpu", torch.int64) * lengths[:, None] * lengths).sum().item()
    return int(pairs) * (heads if layout.shape[0] == 1 else 1)


def _products(count: int, q: Tensor, layout: Tensor, block: int) -> int:
    batch, heads, seq, dim = q.shape
    return count * 2 * batch * dim * _seen_pairs(layout, seq, block, heads)


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
    block = rest[4]  # bias, key_bias, seed, scale, block
    return _products(_FORWARD, q, layout, block)


def _backward_flops(
    dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool, *inputs: Any, out_val: Any = None, **_: Any
) -> int:
    q, layout, block = inputs[0], inputs[3], inputs[8]
    return _products(_BACKWARD, q, layout, block)


@cache
def register_flop_formulas() -> None:
    """Register the operators' formulas with torch. Calling it again does nothing.

    A call of the operator under a dispatch mode does this, which is early enough for dsx-monitor. A `FlopCounterMode`
    copies the registry when it is made, so call this function before. It is not done at import, because the registry's
    module imports triton if that is installed.
    """
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula([torch.ops.dsx_sparse_attn.attention], get_raw=True)(_forward_flops)
    register_flop_formula([torch.ops.dsx_sparse_attn.attention_backward], get_raw=True)(_backward_flops)
