"""Owners of matrices, and the elements that travel to them: arithmetic without tensors and communication.

The shards of flat buffers are equal and end anywhere, also inside a matrix. For an optimizer whose rule has a function
of whole matrices, every matrix of the model gets an *owner*. Before the function, the pieces of a matrix travel to its
owner, and afterwards the pieces of the result travel back the same way. What stays with the shards (masters, states,
gradients) does not move.

*Owners.* The heaviest matrix first, each to the rank with the least work so far. The largest load is then at most the
mean and the last matrix that was added; with many matrices per rank that is a few percent. A single matrix is never
divided.

*States of matrices.* A rule may keep tensors that belong to a matrix as a whole. They are divided, too: a rank with the
elements [a, b) of a matrix of n elements has [a s / n, b s / n) of a state of s, rounded down. So each element of a
state has one place, whatever the shards, and a rank has as large a part of the states as of the matrices. They travel
to the owner with the pieces, and come back with the results.

*Rounds.* The matrices of each owner are divided into rounds of about equal work, so that the messages of one round
travel while the matrices of another are computed.

Everything follows from layouts that all ranks have, so that they agree without a message.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import FlatLayout

__all__ = ["Matrix", "MatrixState", "Piece", "Round", "largest_load_at_least", "owners_of", "rounds_of"]

ROUNDS = 4
"""Most rounds of a step. Messages of the first and of the last round travel beside no arithmetic."""


@dataclass(frozen=True)
class Matrix:
    """One matrix: `rows` x `columns` elements of a parameter, from element `start` on.

    Attributes:
        place: the number of the parameter in the list that `rounds_of` is given.
        work: in any unit.
        states: elements of each of its states; of a slice, those that its ranks have.
        before: elements of each state that the ranks of earlier slices have.
        results: tensors of its shape that come back.
    """

    place: int
    start: int
    rows: int
    columns: int
    work: float
    states: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    results: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of the parameter `place`, which belong to the matrix number `matrix`, and the range of
    each of the matrix' states that goes with them.
    """

    matrix: int
    place: int
    start: int
    stop: int
    states: tuple[tuple[int, int], ...] = ()
    results: int = 1

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements of the parts that travel to the owner, one behind the other: the piece, and its range of each
        state. Back come the same, but the first once for each result.
        """
        return (self.numel, *(stop - start for start, stop in self.states))

    @property
    def parts_back(self) -> tuple[int, ...]:
        """Elements of the parts that come back."""
        return (self.numel,) * (self.results - 1) + self.parts


@dataclass(frozen=True)
class Round:
    """One rank's messages and matrices in one round.

    Attributes:
        sends: its pieces, by owner and then by matrix; `send_sizes`: elements for each rank, and `back_sizes`: elements
            that come back from it.
        receives: pieces of the matrices it owns, by sender and then by matrix; `receive_sizes`: elements of each rank,
            and `reply_sizes`: elements that go back to it.
        owned: numbers of these matrices.
    """

    sends: tuple[Piece, ...]
    send_sizes: tuple[int, ...]
    receives: tuple[Piece, ...]
    receive_sizes: tuple[int, ...]
    owned: tuple[int, ...]
    back_sizes: tuple[int, ...]
    reply_sizes: tuple[int, ...]


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
        send_sizes=_sizes(to, ranks, back=False),
        receives=tuple(piece for sender in range(ranks) for piece in of.get(sender, ())),
        receive_sizes=_sizes(of, ranks, back=False),
        owned=tuple(index for index in members if owners[index] == rank),
        back_sizes=_sizes(to, ranks, back=True),
        reply_sizes=_sizes(of, ranks, back=True),
    )


def _sizes(pieces: dict[int, list[Piece]], ranks: int, *, back: bool) -> tuple[int, ...]:
    """Elements of the messages to or from each rank."""
    return tuple(
        sum(sum(piece.parts_back if back else piece.parts) for piece in pieces.get(rank, ())) for rank in range(ranks)
    )


def _holders(matrix: Matrix, layout: FlatLayout, name: str) -> range:
    """The ranks whose shards have elements of a matrix."""
    offset, shard = layout.offsets[layout.index(name)], layout.shard_numel
    return range((offset + matrix.start) // shard, (offset + matrix.stop - 1) // shard + 1)


def _piece(index: int, matrix: Matrix, place: tuple[FlatLayout, str], rank: int) -> Piece | None:
    """The elements of a matrix that lie in the shard of `rank`; None: it has none of them."""
    own = place[0].local_slice(place[1], rank)
    start, stop = (0, 0) if own is None else (max(own.start, matrix.start), min(own.stop, matrix.stop))
    if start >= stop:
        return None
    numel = matrix.rows * matrix.columns
    states = tuple(
        ((start - matrix.start) * size // numel, (stop - matrix.start) * size // numel) for size in matrix.states
    )
    return Piece(index, matrix.place, start, stop, states, matrix.results)


@dataclass(frozen=True)
class MatrixState:
    """A state of a tensor's matrices, one behind the other, as the owners of elements have it.

    Attributes:
        shape: of the whole state.
        matrices: (elements, elements of the state) of each matrix.
        start: elements of the state that lie before these matrices': of a slice of a tensor, what the ranks of earlier
            slices have.
        of_slice: are they matrices of which tensor-parallel ranks have slices, or a part of such a stack?
    """

    shape: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    start: int = 0
    of_slice: bool = False

    def at(self, element: int) -> int:
        """The state's first element that goes with this element of the tensor, or with a later one."""
        found = self.start
        for numel, size in self.matrices:
            if element < numel:
                return found + element * size // numel
            element, found = element - numel, found + size
        return found
