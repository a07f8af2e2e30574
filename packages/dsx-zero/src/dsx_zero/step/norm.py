"""The global gradient norm and the overflow check: one pass over what this rank holds, and one number per rank that is
added up over the ranks. It travels with what the ranks agree on at each step where the host reads it anyway, else in an
all-reduce of its own.

A non-finite gradient makes the sum of squares non-finite on every rank, so that the norm is the overflow flag too.
Squares are summed per buffer in fp32 by the norm kernel and across buffers in fp64. A sum of squares beyond fp32 is
infinite, as in torch's own norms: which elements share a buffer depends on the stage and on the number of ranks, and
must not decide that.
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

    None where every rank holds all gradients: those of plain data parallelism without division (`whole`).

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
    """What this rank contributes to the square of the norm, and whether all gradients are fp64: a 0-dim fp64 tensor on
    `device` (fp32 where fp64 is missing).

    Args:
        blocks: the norms of this rank's buffers of gradients (`grads.block_norm`), and who shares each buffer.
        alone: no other rank's squares are added, because every rank holds all gradients.
        whole: each of a block's ranks holds all of it (else a shard), so that only the first of them counts.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    norms, counted, all_double = [], [], True
    for ranks, norm in blocks:
        counted.append(alone or (ranks.counts_in_norm and not (whole and ranks.rank)))
        norms.append(norm)
        all_double = all_double and norm.dtype == torch.float64
    if norms:
        squares = torch.stack([n.to(device=device, dtype=dtype) for n in norms]).square()
        if not all(counted):
            # Times zero, not left out: a copy that is not finite makes the norm so on all ranks, which then all skip.
            squares = squares * torch.tensor(counted, dtype=dtype).to(device, non_blocking=True)
        total += squares.sum()
    return total, all_double


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
