"""The global gradient norm and the overflow check: one pass over what this rank holds, one tiny all-reduce.

A non-finite gradient makes the sum of squares non-finite on every rank, so that the norm is the overflow flag too.
Squares are summed per buffer in fp32 by the norm kernel and across buffers in fp64. A sum of squares beyond fp32 is
infinite, as in torch's own norms: which elements share a buffer depends on the stage and on the number of ranks, and
must not decide that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import dsx_comm
import torch

__all__ = ["CLIP_EPSILON", "global_norm"]

_LARGEST = torch.finfo(torch.float32).max

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


def global_norm(blocks: Iterable[torch.Tensor], *, device: torch.device, group: Any, shared: bool) -> torch.Tensor:
    """L2 norm over all gradients, a 0-dim fp64 tensor on `device` (fp32 where fp64 is missing).

    Args:
        blocks: this rank's gradients, wherever they lie; each is let go before the next one is taken.
        group: process group over which squares are summed.
        shared: False when every rank holds all gradients and nothing is to be summed.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    norms, all_double = [], True
    for block in blocks:
        norms.append(_norm(block))
        all_double = all_double and block.dtype == torch.float64
    if norms:
        total += torch.stack([n.to(device=device, dtype=dtype) for n in norms]).square().sum()
    if shared:
        dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=group)
    if all_double:
        return total.sqrt()
    return torch.where(total > _LARGEST, math.inf, total).sqrt()


def _norm(block: torch.Tensor) -> torch.Tensor:
    if block.dtype.itemsize < 4:
        return torch.linalg.vector_norm(block, dtype=torch.float32)
    return torch.linalg.vector_norm(block)
