"""Matrices of which tensor-parallel ranks hold slices: they are joined over these ranks, too.

The data-parallel owner of a matrix has this rank's slice of it. The owners at the same place of the other
tensor-parallel ranks have the other slices. They divide their matrices among themselves, exchange the slices in one
all-to-all, compute whole matrices, and send the slices of the results back. A parameter says by Megatron's attributes
how it was cut: `partition_dim`, and `partition_stride`, the number of parts (queries, keys and values) that were each
cut. Where parts differ (fewer keys than queries), `partition_sizes` of the parameter or `split_rows` of its group says
how long they are in this rank's slice. Slices may be unequal (a vocabulary that the ranks do not divide): ranks tell
each other theirs.

*States of matrices* belong to the whole matrix, and no direction of it is the slices'. So the states of a whole tensor
are divided as one line: of S elements, the rank t of T has [t S / T, (t + 1) S / T), rounded down, and the
data-parallel ranks divide this part in proportion to the elements of its slices (`plan/matrices.py`). Fused parts have
no place in the whole tensor that a box could say, so that checkpoints have their slices by rank; so it is with their
states.

Left out: unequal slices for rules with states of matrices, whose places a rank could not tell without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import dsx_comm
import torch

from ..errors import ZeroOptimizerError
from ..params.flat import FlatGroup
from ..plan.matrices import MatrixState, owners_of
from .matrix_rules import MatrixRule, Settings, matrix_states, stateful

__all__ = ["Cut", "Slice", "SliceSizes", "compute_sliced", "cut_dimension", "states_of_tensor", "tell_sizes"]


@dataclass(frozen=True)
class SliceSizes:
    """A rank's words about its slice: its shape, the dimension that was cut, how long its fused parts are there, and
    the rows of the matrices that it has whole, below each other (heads).
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]
    whole: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, group: FlatGroup, settings: Settings) -> SliceSizes:
        """The sizes of this rank's slice. Raises ZeroOptimizerError if it does not say how it was cut."""
        index = group.layout.index(name)
        parameter, shape = group.parameters[index], tuple(group.layout.shapes[index])
        dim, count = cut_dimension(parameter), getattr(parameter, "partition_stride", 1)
        if dim is None:
            raise ZeroOptimizerError(
                f"{name}: got a slice that does not say how it was cut; expected the attributes partition_dim (and"
                " partition_stride, the number of fused parts) beside tensor_model_parallel"
            )
        said = tuple(getattr(parameter, "partition_sizes", ()))
        below = _split_rows(settings, dim, len(shape))
        rows = below if count > 1 else ()
        sizes = tuple(said or rows or (shape[dim] // count,) * count)
        if len(sizes) != count or sum(sizes) != shape[dim] or (rows and len(rows) != count):
            raise ZeroOptimizerError(
                f"{name}: got partition_stride={count} for {shape[dim]} elements of dimension {dim}, partition_sizes="
                f"{said} and split_rows={settings.get('split_rows')}; expected equal parts, or the sizes of this rank's"
                " parts as partition_sizes of the parameter or split_rows of its group, one for each part"
            )
        return cls(shape, dim, sizes, below if count == 1 else ())


def _split_rows(settings: Settings, dim: int, dims: int) -> tuple[int, ...]:
    """The sizes of fused parts, where rows were cut and the parameter group says sizes; else none."""
    rows = settings.get("split_rows", 1)
    return () if isinstance(rows, int) or dim != max(dims - 2, 0) else tuple(rows)


@dataclass(frozen=True)
class Cut:
    """The way in which the slices of a tensor's matrices were cut.

    Attributes:
        dim: 0 by rows, 1 by columns.
        parts: for each rank, how long its fused parts are in this dimension; each part was cut alone.
        rank: this one of the tensor-parallel ranks.
        tiles: (rows, columns) of this rank's slice of each matrix of a stack.
        matrices: (rows, columns) of the matrices of a whole tile that the rule sees, one below the other.
        work: of one tile's matrices.
        states: elements of each state of all tiles' matrices together.
    """

    dim: int
    parts: tuple[tuple[int, ...], ...]
    rank: int
    tiles: tuple[tuple[int, int], ...]
    matrices: tuple[tuple[int, int], ...]
    work: float
    states: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, name: str, group: FlatGroup, rule: MatrixRule, settings: Settings, everyone: Sequence[SliceSizes] = ()
    ) -> Cut | None:
        """The cut of a parameter; None where every matrix is whole on one rank.

        Args:
            everyone: what each of the tensor-parallel ranks says; none: the same as this one.

        Raises:
            ZeroOptimizerError: it does not say how it was cut, or cannot be joined.
        """
        shape, whole, dim, told, settings = _whole(name, group, settings, everyone)
        if not (matrices := tuple(rule.matrices(whole, settings))):
            return None
        stack = len(shape) == 3 and sum(rows for rows, _ in matrices) == whole[0] * whole[1]
        if (stack and dim == 0) or told[0].whole:
            return None
        if any(columns != whole[-1] for _, columns in matrices) or not (stack or len(shape) == 2):
            raise ZeroOptimizerError(
                f"{name}: got a slice of a tensor of shape {whole} with the matrices {sorted(set(matrices))};"
                " expected matrices below each other, in a tensor of two dimensions or a stack, where slices are joined"
            )
        tiles = ((shape[-2], shape[-1]),) * (shape[0] if stack else 1)
        each, keeps = matrices[: len(matrices) // len(tiles)], stateful(rule)
        return cls(
            dim - len(shape) + 2,
            tuple(one.parts for one in told),
            _place(group)[0],
            tiles,
            each,
            sum(rule.work(matrix, settings) for matrix in each),
            () if keeps is None else tuple(map(prod, keeps.state_shapes(whole, settings).values())),
        )

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks."""
        return len(self.parts)

    def tile_of(self, rank: int) -> tuple[int, int]:
        """(rows, columns) of a rank's slice of a matrix."""
        length, (rows, columns) = sum(self.parts[rank]), self.tiles[0]
        return (length, columns) if self.dim == 0 else (rows, length)

    def range_of(self, state: int, tile: int, rank: int) -> tuple[int, int]:
        """The elements of a tile's state that a tensor-parallel rank has, counted in the tile."""
        numel, each = self.states[state], self.states[state] // len(self.tiles)
        edges = (rank * numel // self.size, (rank + 1) * numel // self.size)
        start, stop = (min(max(edge - tile * each, 0), each) for edge in edges)
        return start, stop

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix of the slices (rows, columns) of all ranks."""
        cut = [piece.split(parts, self.dim) for piece, parts in zip(slices, self.parts)]
        return torch.cat([one[part] for part in range(len(self.parts[0])) for one in cut], self.dim)

    def divide(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The reverse of `join`."""
        pieces = iter(whole.split([one[part] for part in range(len(self.parts[0])) for one in self.parts], self.dim))
        cut = [[next(pieces) for _ in self.parts] for _ in self.parts[0]]
        return [torch.cat([part[rank] for part in cut], self.dim) for rank in range(self.size)]

    def shapes_of(self, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """The elements [start, stop) of this rank's slice of a matrix as runs: (elements, shape of the matrix that the
        rule sees).
        """
        first, columns = 0, self.tiles[0][1]
        for rows, matrix in self._rows():
            last = first + rows * columns
            if (count := min(stop, last) - max(start, first)) > 0:
                yield count, matrix
            first = last

    def _rows(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """The rows of this rank's slice, from the first on, with the shape of the matrix in which they lie."""
        below, lying = 0, []
        for rows, columns in self.matrices:
            lying.append((below, below + rows, (rows, columns)))
            below += rows
        for start, stop in self._ranges() if self.dim == 0 else [(0, below)]:
            for first, last, matrix in lying:
                if (count := min(stop, last) - max(start, first)) > 0:
                    yield count, matrix

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """The rows of the whole matrix that this rank has, by fused part."""
        start = 0
        for part in range(len(self.parts[0])):
            lengths = [one[part] for one in self.parts]
            first = start + sum(lengths[: self.rank])
            yield first, first + lengths[self.rank]
            start += sum(lengths)


def _place(group: FlatGroup) -> tuple[int, int]:
    """Rank and number of the ranks that have slices of the same tensors."""
    ranks = group.ranks.tensor_groups[0]
    return dsx_comm.get_rank(ranks), dsx_comm.get_world_size(ranks)


def _whole(
    name: str, group: FlatGroup, settings: Settings, everyone: Sequence[SliceSizes] = ()
) -> tuple[tuple[int, ...], tuple[int, ...], int, Sequence[SliceSizes], Settings]:
    """The shapes of this rank's slice and of the whole tensor, the dimension that was cut, the sizes of all slices, and
    the settings for the whole tensor, in which `split_rows` counts the rows of all ranks.
    """
    mine = SliceSizes.of(name, group, settings)
    told, dim = everyone or [mine] * _place(group)[1], mine.dim
    length = sum(one.shape[dim] for one in told)
    whole = tuple(length if place == dim else n for place, n in enumerate(mine.shape))
    if _split_rows(settings, dim, len(whole)):
        fused = [sum(lengths) for lengths in zip(*(one.parts for one in told))]
        settings = {**settings, "split_rows": [n for one in told for n in one.whole] if mine.whole else fused}
    return mine.shape, whole, dim, told, settings


def tell_sizes(mine: Mapping[str, SliceSizes], group: Any) -> dict[str, list[SliceSizes]]:
    """The sizes of the slices of every tensor on all ranks of a group (collective).

    Raises:
        ZeroOptimizerError: the slices of a tensor do not make up one tensor. The same on all ranks.
    """
    everyone: list[dict[str, SliceSizes]] = [{}] * dsx_comm.get_world_size(group)
    dsx_comm.all_gather_object(everyone, dict(mine), group=group)
    told: dict[str, list[SliceSizes]] = {}
    for name in dict.fromkeys(name for found in everyone for name in found):
        slices = [found[name] for found in everyone if name in found]
        alike = {
            (one.dim, one.shape[: one.dim], one.shape[one.dim + 1 :], len(one.parts), bool(one.whole)) for one in slices
        }
        if len(slices) < len(everyone) or len(alike) > 1:
            raise ZeroOptimizerError(
                f"{name}: got slices of the shapes {[getattr(found.get(name), 'shape', None) for found in everyone]} on"
                " the tensor-parallel ranks, expected shapes that differ in the dimension that was cut only, in groups"
                " for Muon on all of them"
            )
        told[name] = slices
    return told


def states_of_tensor(rule: Any, name: str, group: FlatGroup, settings: Settings) -> dict[str, MatrixState]:
    """The states of the matrices of a parameter, or of the slice of one that this rank has, by name."""
    shape, keeps = group.layout.shapes[group.layout.index(name)], stateful(rule)
    mine = matrix_states(rule, shape, settings)
    if keeps is None or not mine or not group.ranks.tensor_groups:
        return mine
    cut, (rank, size) = Cut.of(name, group, keeps, settings), _place(group)
    _, form, _, _, of_whole = _whole(name, group, settings)
    whole = keeps.state_shapes(form, of_whole)
    if cut is None:  # matrices that are whole here
        return {
            key: MatrixState(whole[key], state.matrices, rank * prod(whole[key]) // size, True)
            for key, state in mine.items()
        }
    found, tile = {}, prod(cut.tiles[0])
    for number, (key, form) in enumerate(whole.items()):
        ranges = [cut.range_of(number, place, rank) for place in range(len(cut.tiles))]
        matrices = tuple((tile, stop - start) for start, stop in ranges)
        if len(cut.parts[0]) > 1:
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
        return [prod(self.cut.tile_of(rank))] * results + [stop - start for start, stop in ranges]


def compute_sliced(
    slices: Sequence[Slice],
    function: Callable[[int, torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]],
    results: int,
    group: Any,
) -> list[list[torch.Tensor]]:
    """Results of `function(number, whole matrix, whole states)`, and the states, which it changes in place: for each
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
        whole = one.cut.join([next(part).view(one.cut.tile_of(sender)) for sender, part in enumerate(parts)])
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
