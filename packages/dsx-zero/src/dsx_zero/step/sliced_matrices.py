"""Matrices of which tensor-parallel ranks hold slices: they are joined over these ranks, too.

The data-parallel owner of a matrix has this rank's slice of it. The owners at the same place of the other
tensor-parallel ranks have the other slices. They divide their matrices among themselves, exchange the slices in one
all-to-all, compute whole matrices, and send the slices of the results back. A parameter says by Megatron's attributes
how it was cut: `partition_dim`, and `partition_stride`, the number of parts (queries, keys and values) that were each
cut.

*States of matrices* belong to the whole matrix, and no direction of it is the slices'. So the states of a whole tensor
are divided as one line: of S elements, the rank t of T has [t S / T, (t + 1) S / T), rounded down, and the
data-parallel ranks divide this part in proportion to the elements of its slices (`plan/matrices.py`). Fused parts have
no place in the whole tensor that a box could say, so that checkpoints have their slices by rank; so it is with their
states.

Slices of unequal sizes are left out, and fused parts that would need scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import dsx_comm
import torch

from ..errors import ZeroOptimizerError
from ..params.flat import FlatGroup
from ..plan.matrices import MatrixState, owners_of
from .matrix_rules import MatrixRule, Settings, matrix_states, stateful

__all__ = ["Cut", "Slice", "compute_sliced", "cut_dimension", "states_of_tensor"]


@dataclass(frozen=True)
class Cut:
    """The way in which the slices of a tensor's matrices were cut.

    Attributes:
        dim: 0 by rows, 1 by columns; `parts`: fused parts, each cut alone.
        rank, size: of the tensor-parallel ranks.
        tiles: (rows, columns) of this rank's slice of each matrix of a stack.
        matrix: (rows, columns) of the matrices that the rule sees: the whole, or equal parts of its rows.
        count: of these in a tile.
        work: of one tile's matrices.
        states: elements of each state of all tiles' matrices together.
    """

    dim: int
    parts: int
    rank: int
    size: int
    tiles: tuple[tuple[int, int], ...]
    matrix: tuple[int, int]
    count: int
    work: float
    states: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, group: FlatGroup, rule: MatrixRule, settings: Settings) -> Cut | None:
        """The cut of a parameter; None where every matrix of a stack is whole on one rank.

        Raises:
            ZeroOptimizerError: it does not say how it was cut, or cannot be joined.
        """
        shape, whole, dim = _whole_shape(name, group)
        matrices = tuple(rule.matrices(whole, settings))
        stack = len(shape) == 3 and matrices[0][0] * len(matrices) == whole[0] * whole[1]
        if stack and dim == 0:
            return None
        if len(set(matrices)) > 1 or not (stack or len(shape) == 2):
            raise ZeroOptimizerError(
                f"{name}: got a slice of a tensor of shape {whole} with the matrices {sorted(set(matrices))};"
                " expected matrices of one shape, in a tensor of two dimensions or a stack, where slices are joined"
            )
        tiles = ((shape[-2], shape[-1]),) * (shape[0] if stack else 1)
        count, keeps = len(matrices) // len(tiles), stateful(rule)
        return cls(
            dim - len(shape) + 2,
            getattr(group.parameters[group.layout.index(name)], "partition_stride", 1),
            *_place(group),
            tiles,
            matrices[0],
            count,
            count * rule.work(matrices[0], settings),
            () if keeps is None else tuple(map(prod, keeps.state_shapes(whole, settings).values())),
        )

    def range_of(self, state: int, tile: int, rank: int) -> tuple[int, int]:
        """The elements of a tile's state that a tensor-parallel rank has, counted in the tile."""
        numel, each = self.states[state], self.states[state] // len(self.tiles)
        edges = (rank * numel // self.size, (rank + 1) * numel // self.size)
        start, stop = (min(max(edge - tile * each, 0), each) for edge in edges)
        return start, stop

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix of the slices (rows, columns) of all ranks."""
        cut = [piece.tensor_split(self.parts, self.dim) for piece in slices]
        return torch.cat([one[part] for part in range(self.parts) for one in cut], self.dim)

    def divide(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The reverse of `join`."""
        cut = [part.tensor_split(self.size, self.dim) for part in whole.tensor_split(self.parts, self.dim)]
        return [torch.cat([part[rank] for part in cut], self.dim) for rank in range(self.size)]


def _place(group: FlatGroup) -> tuple[int, int]:
    """Rank and number of the ranks that have slices of the same tensors."""
    ranks = group.ranks.tensor_groups[0]
    return dsx_comm.get_rank(ranks), dsx_comm.get_world_size(ranks)


def _whole_shape(name: str, group: FlatGroup) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shapes of this rank's slice and of the whole tensor, and the dimension that was cut."""
    index = group.layout.index(name)
    dim, shape = cut_dimension(group.parameters[index]), tuple(group.layout.shapes[index])
    if dim is None:
        raise ZeroOptimizerError(
            f"{name}: got a slice that does not say how it was cut; expected the attributes partition_dim (and"
            " partition_stride, the number of fused parts) beside tensor_model_parallel"
        )
    size = _place(group)[1]
    return shape, tuple(n * size if place == dim else n for place, n in enumerate(shape)), dim


def states_of_tensor(rule: Any, name: str, group: FlatGroup, settings: Settings) -> dict[str, MatrixState]:
    """The states of the matrices of a parameter, or of the slice of one that this rank has, by name."""
    shape, keeps = group.layout.shapes[group.layout.index(name)], stateful(rule)
    if keeps is None or not group.ranks.tensor_groups or not keeps.matrices(shape, settings):
        return matrix_states(rule, shape, settings)
    cut, (rank, size) = Cut.of(name, group, keeps, settings), _place(group)
    whole = keeps.state_shapes(_whole_shape(name, group)[1], settings)
    if cut is None:  # matrices that are whole here
        mine = matrix_states(rule, shape, settings)
        return {
            key: MatrixState(whole[key], state.matrices, rank * prod(whole[key]) // size, True)
            for key, state in mine.items()
        }
    found, tile = {}, prod(cut.tiles[0])
    for number, (key, form) in enumerate(whole.items()):
        ranges = [cut.range_of(number, place, rank) for place in range(len(cut.tiles))]
        matrices = tuple((tile, stop - start) for start, stop in ranges)
        if cut.parts > 1:
            found[key] = MatrixState((sum(part for _, part in matrices),), matrices)
        else:
            found[key] = MatrixState(form, matrices, rank * prod(form) // size, True)
    return found


def cut_dimension(parameter: torch.Tensor) -> int | None:
    """The dimension along which a slice says it was cut; None for one that does not say it."""
    dim = getattr(parameter, "partition_dim", None)
    return dim % parameter.dim() if type(dim) is int and -parameter.dim() <= dim < parameter.dim() else None


@dataclass(frozen=True)
class Slice:
    """A slice of a matrix (rows, columns), and this rank's elements of its states, 1-D."""

    cut: Cut
    tile: int
    values: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()

    def sizes(self, rank: int, results: int = 1) -> list[int]:
        """Elements of what a rank has of the matrix: of its slice, once for each result, and of its states."""
        ranges = [self.cut.range_of(state, self.tile, rank) for state in range(len(self.states))]
        return [self.values.numel()] * results + [stop - start for start, stop in ranges]


def compute_sliced(
    slices: Sequence[Slice],
    function: Callable[[int, torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]],
    results: int,
    group: Any,
) -> list[list[torch.Tensor]]:
    """What `function(number, whole matrix, whole states)` gives, and the states, which it changes in place: for each
    slice this rank's slices of the results and its elements of the states (collective over `group`).

    Args:
        slices: of one dtype and device; on every rank the slices of the same matrices.
        results: the number of matrices that `function` gives.
        group: the ranks that have the other slices.
    """
    if not slices:
        return []
    size, rank = dsx_comm.get_world_size(group), dsx_comm.get_rank(group)
    owners = owners_of([one.cut.work for one in slices], size)
    order = sorted(range(len(slices)), key=owners.__getitem__)
    mine = [i for i in order if owners[i] == rank]
    sent = [sum(sum(slices[i].sizes(rank)) for i in order if owners[i] == to) for to in range(size)]
    received = [sum(sum(slices[i].sizes(sender)) for i in mine) for sender in range(size)]
    source = torch.cat([part.reshape(-1) for i in order for part in (slices[i].values, *slices[i].states)])
    arrived = source.new_empty(sum(received))
    dsx_comm.all_to_all_single(arrived, source, received, sent, group=group)

    parts = [
        iter(piece.split([n for i in mine for n in slices[i].sizes(sender)]))
        for sender, piece in enumerate(arrived.split(received))
    ]
    answers: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for i in mine:
        one = slices[i]
        whole = one.cut.join([next(part).view(one.values.shape) for part in parts])
        states = [torch.cat([next(part) for part in parts]) for _ in one.states]
        found = [one.cut.divide(result) for result in function(i, whole, states)]
        for sender in range(size):
            answers[sender] += [result[sender].reshape(-1) for result in found]
        for number, state in enumerate(states):
            for sender, part in enumerate(state.split([one.sizes(r)[number + 1] for r in range(size)])):
                answers[sender].append(part)
    replied = [sum(part.numel() for part in answer) for answer in answers]
    returned = [sum(sum(slices[i].sizes(rank, results)) for i in order if owners[i] == to) for to in range(size)]
    back = source.new_empty(sum(returned))
    answer = torch.cat([source.new_empty(0), *(part for answer in answers for part in answer)])
    dsx_comm.all_to_all_single(back, answer, returned, replied, group=group)
    pieces = iter(back.split([n for i in order for n in slices[i].sizes(rank, results)]))
    by_slice = {i: [next(pieces) for _ in slices[i].sizes(rank, results)] for i in order}
    return [by_slice[i] for i in range(len(slices))]
