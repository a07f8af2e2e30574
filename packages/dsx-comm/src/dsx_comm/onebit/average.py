"""Averaging gradients in full precision: what exact steps do in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import all_reduce_volume
from ..coalesced import all_reduce_coalesced
from ..collectives import ReduceOp
from .arithmetic import batches


def average_exactly(gradients: Sequence[torch.Tensor], group: Any, wire: torch.dtype | None) -> None:
    """Replace gradients by their means over the ranks, in place; they travel in `wire` (None: their own dtypes)."""
    for batch in batches([g for g in gradients if g.numel()]):
        messages = batch if wire is None else [g.to(wire) for g in batch]
        all_reduce_coalesced(messages, ReduceOp.AVG, group)
        for gradient, message in zip(batch, messages):
            if message is not gradient:
                gradient.copy_(message)


def exact_bytes(parameters: Sequence[torch.Tensor], world_size: int, wire: torch.dtype | None) -> float:
    """Bytes one rank sends to average these parameters' gradients once."""
    total = sum(p.numel() * (wire or p.dtype).itemsize for p in parameters)
    return all_reduce_volume(total, world_size) / world_size
