"""Matrices of which tensor-parallel ranks hold slices: they are joined over these ranks, too.

The data-parallel owner of a matrix has this rank's slice of it. The owners at the same place of the other
tensor-parallel ranks have the other slices. They divide their matrices among themselves, exchange the slices in one
all-to-all, compute whole matrices, and send the slices of the results back. A parameter says by Megatron's attributes
how it was cut: `partition_dim`, and `partition_stride`, the number of parts (queries, keys and values) that were each
cut. Slices of unequal sizes are left out, and fused parts that would need scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch

from ..errors import ZeroOptimizerError
from ..plan.matrices import owners_of
from .matrix_rules import MatrixRule, Settings

__all__ = ["Cut", "compute_sliced", "cut_dimension"]


@dataclass(frozen=True)
class Cut:
    """The way in which the slices of a tensor's matrices were cut.

    Attributes:
        dim: 0 by rows, 1 by columns; `parts`: fused parts, each cut alone.
        tiles: (rows, columns) of this rank's slice of each matrix of a stack.
        matrix: (rows, columns) of the matrices that the rule sees: the whole, or equal parts of its rows.
        work: of one tile's matrices.
    """

    dim: int
    parts: int
    tiles: tuple[tuple[int, int], ...]
    matrix: tuple[int, int]
    work: float

    @classmethod
    def of(
        cls, name: str, parameter: torch.Tensor, shape: Sequence[int], rule: MatrixRule, group: Settings, size: int
    ) -> Cut | None:
        """The cut of a parameter over `size` ranks; None where every matrix of a stack is whole on one rank.

        Raises:
            ZeroOptimizerError: it does not say how it was cut, or cannot be joined.
        """
        dim = cut_dimension(parameter)
        if dim is None:
            raise ZeroOptimizerError(
                f"{name}: got a slice that does not say how it was cut; expected the attributes partition_dim (and"
                " partition_stride, the number of fused parts) beside tensor_model_parallel"
            )
        whole = [n * size if place == dim else n for place, n in enumerate(shape)]
        matrices = tuple(rule.matrices(whole, group))
        stack = len(shape) == 3 and matrices[0][0] * len(matrices) == whole[0] * whole[1]
        if stack and dim == 0:
            return None
        if len(set(matrices)) > 1 or not (stack or len(shape) == 2):
            raise ZeroOptimizerError(
                f"{name}: got a slice of a tensor of shape {tuple(whole)} with the matrices {sorted(set(matrices))};"
                " expected matrices of one shape, in a tensor of two dimensions or a stack, where slices are joined"
            )
        tiles = ((shape[-2], shape[-1]),) * (shape[0] if stack else 1)
        work = len(matrices) // len(tiles) * rule.work(matrices[0], group)
        return cls(dim - len(shape) + 2, getattr(parameter, "partition_stride", 1), tiles, matrices[0], work)

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix of the slices (rows, columns) of all ranks."""
        cut = [piece.tensor_split(self.parts, self.dim) for piece in slices]
        return torch.cat([one[part] for part in range(self.parts) for one in cut], self.dim)

    def divide(self, whole: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The reverse of `join`."""
        cut = [part.tensor_split(size, self.dim) for part in whole.tensor_split(self.parts, self.dim)]
        return [torch.cat([part[rank] for part in cut], self.dim) for rank in range(size)]


def cut_dimension(parameter: torch.Tensor) -> int | None:
    """The dimension along which a slice says it was cut; None for one that does not say it."""
    dim = getattr(parameter, "partition_dim", None)
    return dim % parameter.dim() if type(dim) is int and -parameter.dim() <= dim < parameter.dim() else None


def compute_sliced(
    slices: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    function: Callable[[int, torch.Tensor], torch.Tensor],
    group: Any,
) -> list[torch.Tensor]:
    """This rank's slices of `function(number, whole matrix)` (collective over `group`).

    Args:
        slices: (rows, columns) each, of one dtype and device; on every rank the slices of the same matrices.
        cuts: how each of them was cut.
        group: the ranks that have the other slices.
    """
    if not slices:
        return []
    size, rank = dsx_comm.get_world_size(group), dsx_comm.get_rank(group)
    owners = owners_of([cut.work for cut in cuts], size)
    order = sorted(range(len(slices)), key=owners.__getitem__)
    sizes = [sum(slices[i].numel() for i in order if owners[i] == to) for to in range(size)]
    source = torch.cat([slices[i].reshape(-1) for i in order])
    arrived = source.new_empty(size * sizes[rank])
    dsx_comm.all_to_all_single(arrived, source, [sizes[rank]] * size, sizes, group=group)
    offset, rows = 0, arrived.view(size, sizes[rank])
    for i in (i for i in order if owners[i] == rank):
        stop = offset + slices[i].numel()
        pieces = [rows[sender, offset:stop].view(slices[i].shape) for sender in range(size)]
        for piece, part in zip(pieces, cuts[i].divide(function(i, cuts[i].join(pieces)), size)):
            piece.copy_(part)
        offset = stop
    dsx_comm.all_to_all_single(source, arrived, sizes, [sizes[rank]] * size, group=group)
    found = dict(zip(order, source.split([slices[i].numel() for i in order])))
    return [found[i].view(piece.shape) for i, piece in enumerate(slices)]
