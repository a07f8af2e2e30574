"""The global gradient norm and the overflow check.

Each rank makes one pass over the gradients it holds, and the ranks add up one number each. Where the host reads the
norm anyway, the number is part of the words that the ranks exchange in each step; otherwise in a separate all-reduce.

A non-finite gradient makes the sum of squares non-finite on every rank, so that the norm is the overflow flag too. The
norm kernel sums squares per buffer in fp32; sums of buffers are added in fp64. A sum of squares beyond fp32 counts as
infinite, as in torch's own norms. Without that rule the result would depend on which elements share a buffer, and so on
the stage and the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import dsx_comm
import torch
from dsx_comm import RankSet

from ..errors import ZeroModelError

__all__ = ["CLIP_EPSILON", "groups_of_norm", "norm_of", "sum_of_squares"]

_LARGEST = torch.finfo(torch.float32).max

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


def groups_of_norm(sets: Collection[RankSet], data: RankSet, *, whole: bool) -> tuple[Any, ...]:
    """The groups over which the squares of a model's gradients are summed, one after the other.

    There are none where every rank holds all gradients: plain data parallelism whose buffers are not divided (`whole`).

    Raises:
        ZeroModelError: the rank sets of the model's parameters do not agree on the groups, so that ranks would wait for
            each other.
    """
    for ranks in sets:
        if ranks.norm_groups != data.norm_groups:
            raise ZeroModelError(
                f"the rank set {ranks} sums norms over {len(ranks.norm_groups)} groups and {data} over"
                f" {len(data.norm_groups)}, or over others; give all rank sets of one model the same norm_groups"
            )
    plain = set(sets) <= {data} and data.norm_groups in ((), (data.group,)) and data.counts_in_norm
    return () if whole and plain else data.norm_groups


def sum_of_squares(
    blocks: Iterable[tuple[RankSet, torch.Tensor]], *, device: torch.device, alone: bool, whole: bool
) -> tuple[torch.Tensor, bool]:
    """This rank's contribution to the square of the norm, a 0-dim fp64 tensor on `device` (fp32 where the device lacks
    fp64), and whether all gradients are fp64.

    Args:
        blocks: the norm of each of this rank's gradient buffers (`grads.block_norm`), with the ranks that share it.
        alone: no other rank's squares are added, because every rank holds all gradients.
        whole: each of a block's ranks holds all of it (otherwise a shard), so that only the first of them counts.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    norms, counted, all_double = [], [], True
    for ranks, norm in blocks:
        counted.append(alone or (ranks.counts_in_norm and not (whole and ranks.rank)))
        norms.append(norm)
        all_double = all_double and norm.dtype == torch.float64
    if norms:
        squares = torch.stack(_brought(norms, device, dtype)).square()
        if not all(counted):
            # Multiplied by zero instead of left out: if any copy is not finite, so is the norm, on all ranks. Then all
            # ranks skip the step together.
            squares = squares * torch.tensor(counted, dtype=dtype).to(device, non_blocking=True)
        total += squares.sum()
    return total, all_double


def _brought(norms: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norms on a device. Those in host memory travel together, and on CUDA the host does not wait for them."""
    away = [place for place, norm in enumerate(norms) if norm.device.type == "cpu" and device.type != "cpu"]
    there = [norm if place in away else norm.to(device=device, dtype=dtype) for place, norm in enumerate(norms)]
    if away:
        message = torch.stack([norms[place].to(dtype) for place in away])
        message = message.pin_memory() if device.type == "cuda" else message
        for place, norm in zip(away, message.to(device, non_blocking=True).unbind()):
            there[place] = norm
    return there


def norm_of(total: torch.Tensor, groups: Sequence[Any], *, all_double: bool) -> torch.Tensor:
    """L2 norm over all gradients from this rank's sum of squares: a 0-dim tensor like `total`.

    Args:
        groups: process groups over which squares are summed, one after the other.
        all_double: see `sum_of_squares`.
    """
    for group in groups:
        dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=group)
    if all_double:
        return total.sqrt()
    return torch.where(total > _LARGEST, math.inf, total).sqrt()
