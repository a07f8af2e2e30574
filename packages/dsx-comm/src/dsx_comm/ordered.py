"""Reductions of several tensors in a fixed order, by torch: the reference for every transport's arithmetic.

Sums go from the first part to the last, so every rank that computes them gets the bitwise identical result; 16-bit
floats are added up in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 1 << 18  # elements that are widened to float32 at a time

_COMBINE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def reduce_in_order(parts: Sequence[torch.Tensor], op: Any, out: torch.Tensor) -> None:
    """out = parts[0] op parts[1] op ... (all 1-D); floats of 16 bits or less are accumulated in float32.

    `out` may be one of the parts; if it is one beyond the first two, parts[0] is overwritten.
    """
    if out.is_floating_point() and out.element_size() <= 2:
        if out.numel() <= BLOCK:
            _reduce_wide(parts, op, out)
            return
        for start in range(0, out.numel(), BLOCK):
            _reduce_wide([part[start : start + BLOCK] for part in parts], op, out[start : start + BLOCK])
        return
    combine = _COMBINE[op]
    total = parts[0] if any(out.data_ptr() == part.data_ptr() for part in parts[2:]) else out
    if len(parts) == 1:
        total.copy_(parts[0])
    else:
        combine(parts[0], parts[1], out=total)
    for part in parts[2:]:
        combine(total, part, out=total)
    if op == dist.ReduceOp.AVG:
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)


def _reduce_wide(parts: Sequence[torch.Tensor], op: Any, out: torch.Tensor) -> None:
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        _COMBINE[op](total, part if part.element_size() == 2 else part.to(torch.float32), out=total)
    if op == dist.ReduceOp.AVG:
        total.div_(len(parts))
    out.copy_(total)
