"""Norms of whole tensors for optimizers that see only slices (Lamb): each parameter's squares are summed over the ranks
that hold parts of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSet

from ..errors import ZeroOptimizerError
from .masters import Master

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["SegmentedNorms", "connect_norms"]


def connect_norms(inner: Any, runtime: Runtime, masters: Sequence[Master]) -> None:
    """Give optimizers with per-tensor norms (Lamb) a way to sum them over the slices of a tensor.

    Raises:
        ZeroOptimizerError: the optimizer needs norms of whole tensors and has no `norm_reducer`.
    """
    sets = {group.ranks for unit in runtime.trainable_units() for group in unit.trainable}
    divided = any((ranks.size > 1 and runtime.stage > 0) or ranks.tensor_groups for ranks in sets)
    if not divided:  # one rank has whole tensors at stage 3 and with offload too
        return
    if hasattr(inner, "norm_reducer"):
        inner.norm_reducer = SegmentedNorms(runtime, masters)
    elif getattr(inner, "needs_tensor_norms", False):
        raise ZeroOptimizerError(
            f"{type(inner).__name__} needs norms of whole tensors but has no `norm_reducer` to sum them over ranks; use"
            " stage 0"
        )


class SegmentedNorms:
    """The `norm_reducer` of such an optimizer. Every rank calls it once per step, also a rank that holds nothing.

    It adds the rows of a (local parameters, k) tensor into a (all parameters, k) tensor, sums that over the ranks with
    one small all-reduce per rank set, and returns the local rows.
    """

    def __init__(self, runtime: Runtime, masters: Sequence[Master]) -> None:
        names = [name for unit in runtime.trainable_units() for group in unit.trainable for name in group.layout.names]
        row = {name: index for index, name in enumerate(names)}
        self._rows = {id(master.tensor): row[master.name] for master in masters}
        self._count = len(names)
        self._sums = list(_sums(runtime, row))

    def __call__(self, params: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks of `squares` (row i belongs to params[i])."""
        index = torch.tensor([self._rows[id(p)] for p in params], dtype=torch.long, device=squares.device)
        total = squares.new_zeros((self._count, *squares.shape[1:]))
        total[index] = squares
        for group, rows in self._sums:
            part = total if len(rows) == self._count else total[rows]
            dsx_comm.all_reduce(part, op=dsx_comm.ReduceOp.SUM, group=group)
            if part is not total:
                total[rows] = part
        return total[index]


def _sums(runtime: Runtime, row: dict[str, int]) -> Iterator[tuple[Any, list[int]]]:
    """Groups of ranks, each with the rows that are summed over it: first the ranks with other shards of the parameter,
    then the ranks with other slices of the tensor.
    """
    rows: dict[RankSet, list[int]] = {}
    for unit in runtime.trainable_units():
        for group in unit.trainable:
            rows.setdefault(group.ranks, []).extend(row[name] for name in group.layout.names)
    for ranks, members in rows.items():
        if ranks.size > 1 and runtime.stage > 0:
            yield ranks.group, members
        for group in ranks.tensor_groups:
            yield group, members
