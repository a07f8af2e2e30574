"""Norms of whole tensors for optimizers that see slices (Lamb): sums per parameter over the ranks that hold parts of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dsx_comm
import torch

from .masters import Master

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["SegmentedNorms"]


class SegmentedNorms:
    """`norm_reducer` of such an optimizer: called once per step on every rank, also on one that holds nothing.

    Adds the rows of a (local parameters, k) tensor into a (all parameters, k) one, sums that over the ranks in one
    small all-reduce and gives back the local rows.
    """

    def __init__(self, runtime: Runtime, masters: Sequence[Master]) -> None:
        names = [name for unit in runtime.trainable_units() for group in unit.trainable for name in group.layout.names]
        row = {name: index for index, name in enumerate(names)}
        self._rows = {id(master.tensor): row[master.name] for master in masters}
        self._count, self._group = len(names), runtime.process_group

    def __call__(self, params: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks of `squares` (row i belongs to params[i])."""
        index = torch.tensor([self._rows[id(p)] for p in params], dtype=torch.long, device=squares.device)
        total = squares.new_zeros((self._count, *squares.shape[1:]))
        total[index] = squares
        dsx_comm.all_reduce(total, op=dsx_comm.ReduceOp.SUM, group=self._group)
        return total[index]
