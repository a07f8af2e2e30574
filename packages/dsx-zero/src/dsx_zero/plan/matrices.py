"""Owners of matrices, and the elements that travel to them: arithmetic without tensors and communication.

The shards of flat buffers are equal and end anywhere, also inside a matrix. For an optimizer whose rule has a function
of whole matrices, every matrix of the model gets an *owner*. Before the function, the pieces of a matrix travel to its
owner, and afterwards the pieces of the result travel back the same way. What stays with the shards (masters, states,
gradients) does not move.

*Owners.* The heaviest matrix first, each to the rank with the least work so far. The largest load is then at most the
mean and the last matrix that was added; with many matrices per rank that is a few percent. A single matrix is never
divided.

*Rounds.* The matrices of each owner are divided into rounds of about equal work, so that the messages of one round
travel while the matrices of another are computed.

Everything follows from layouts that all ranks have, so that they agree without a message.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import FlatLayout

__all__ = ["Matrix", "Piece", "Round", "largest_load_at_least", "owners_of", "rounds_of"]

ROUNDS = 4
"""Most rounds of a step. Messages of the first and of the last round travel beside no arithmetic."""


@dataclass(frozen=True)
class Matrix:
    """One matrix: `rows` x `columns` elements of a parameter, from element `start` on.

    Attributes:
        place: the number of the parameter in the list that `rounds_of` is given.
        work: in any unit.
    """

    place: int
    start: int
    rows: int
    columns: int
    work: float

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of the parameter `place`, which belong to the matrix number `matrix`."""

    matrix: int
    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """One rank's messages and matrices in one round.

    Attributes:
        sends: its pieces, by owner and then by matrix; `send_sizes`: elements for each rank.
        receives: pieces of the matrices it owns, by sender and then by matrix; `receive_sizes`: elements of each rank.
        owned: numbers of these matrices.
    """

    sends: tuple[Piece, ...]
    send_sizes: tuple[int, ...]
    receives: tuple[Piece, ...]
    receive_sizes: tuple[int, ...]
    owned: tuple[int, ...]


def owners_of(works: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix, by its work."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: (-works[i], i)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + works[index], rank))
    return owners


def largest_load_at_least(works: Sequence[float], ranks: int) -> float:
    """A bound: the rank with the most work has this at least, in any division. The largest of the mean, the heaviest
    matrix, and, as one rank gets `k + 1` of `k * ranks + 1` matrices, the lightest `k + 1` of that many heaviest ones.
    """
    heavy = sorted(works, reverse=True)
    bounds = [sum(heavy) / ranks]
    for last in range(0, len(heavy), ranks):
        bounds.append(sum(heavy[last - last // ranks : last + 1]))
    return max(bounds)


def rounds_of(
    matrices: Sequence[Matrix], layouts: Sequence[tuple[FlatLayout, str]], rank: int, rounds: int = ROUNDS
) -> tuple[Round, ...]:
    """Messages and matrices of `rank` in each round. The number of rounds is the same on all ranks.

    Args:
        layouts: the layout of each parameter, and its name there. All of them have the same ranks.
    """
    if not matrices:
        return ()
    ranks = layouts[matrices[0].place][0].world_size
    owners = owners_of([matrix.work for matrix in matrices], ranks)
    numbers = _numbers([matrix.work for matrix in matrices], owners, min(rounds, -(-len(matrices) // ranks)))
    found = []
    for number in range(max(numbers) + 1):
        members = [index for index, n in enumerate(numbers) if n == number]
        found.append(_round(matrices, layouts, owners, members, rank, ranks))
    return tuple(found)


def _numbers(works: Sequence[float], owners: Sequence[int], rounds: int) -> list[int]:
    """The round of each matrix: that in which the middle of its work lies, of all the work of its owner."""
    totals, before = dict[int, float](), dict[int, float]()
    for work, owner in zip(works, owners):
        totals[owner] = totals.get(owner, 0.0) + work
    numbers = []
    for work, owner in zip(works, owners):
        middle = before.get(owner, 0.0) + work / 2
        before[owner] = before.get(owner, 0.0) + work
        numbers.append(min(rounds - 1, int(rounds * middle / totals[owner])) if totals[owner] else 0)
    return numbers


def _round(
    matrices: Sequence[Matrix],
    layouts: Sequence[tuple[FlatLayout, str]],
    owners: Sequence[int],
    members: Sequence[int],
    rank: int,
    ranks: int,
) -> Round:
    to: dict[int, list[Piece]] = {}
    of: dict[int, list[Piece]] = {}
    for index in members:
        matrix = matrices[index]
        if (piece := _piece(index, matrix, layouts[matrix.place], rank)) is not None:
            to.setdefault(owners[index], []).append(piece)
        if owners[index] == rank:
            for sender in _holders(matrix, *layouts[matrix.place]):
                if (piece := _piece(index, matrix, layouts[matrix.place], sender)) is not None:
                    of.setdefault(sender, []).append(piece)
    return Round(
        sends=tuple(piece for owner in range(ranks) for piece in to.get(owner, ())),
        send_sizes=tuple(sum(piece.numel for piece in to.get(owner, ())) for owner in range(ranks)),
        receives=tuple(piece for sender in range(ranks) for piece in of.get(sender, ())),
        receive_sizes=tuple(sum(piece.numel for piece in of.get(sender, ())) for sender in range(ranks)),
        owned=tuple(index for index in members if owners[index] == rank),
    )


def _holders(matrix: Matrix, layout: FlatLayout, name: str) -> range:
    """The ranks whose shards have elements of a matrix."""
    offset, shard = layout.offsets[layout.index(name)], layout.shard_numel
    return range((offset + matrix.start) // shard, (offset + matrix.stop - 1) // shard + 1)


def _piece(index: int, matrix: Matrix, place: tuple[FlatLayout, str], rank: int) -> Piece | None:
    """The elements of a matrix that lie in the shard of `rank`; None: it has none of them."""
    own = place[0].local_slice(place[1], rank)
    start, stop = (0, 0) if own is None else (max(own.start, matrix.start), min(own.stop, matrix.stop))
    return Piece(index, matrix.place, start, stop) if start < stop else None
