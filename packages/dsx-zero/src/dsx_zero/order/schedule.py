"""Orders of collectives as data: operations, posts, the decision all ranks take from them, and the frozen record of a
step.

Pure functions and data: there is no communication and there are no tensors. ``decide`` is the agreement: every rank
sees the same posts and so computes the same answer. ``Schedule`` is the record of an agreed step; it can be printed,
hashed and validated.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from dsx_core.together import some_ranks

__all__ = [
    "Decision",
    "Kind",
    "Operation",
    "Pass",
    "Post",
    "Schedule",
    "checksum",
    "decide",
    "elide_gathers",
    "posts_of",
]


class Kind(IntEnum):
    """Kinds of operations: what a rank asks for, and what a schedule consists of."""

    GATHER = 0
    """All ranks gather a unit's parameters."""
    REDUCE = 1
    """All ranks reduce a unit's gradients; each rank gives those that it has."""
    USE = 2
    """A unit is used that is still gathered from its previous use (only in a ``Schedule``)."""
    FORWARD_END = 3
    """The outermost forward of a rank has ended."""
    BACKWARD_END = 4
    """A backward of a rank has ended."""
    BOUNDARY = 5
    """A rank has come to its optimizer step."""
    JOIN = 6
    """A rank has run the last of its forwards in a context where the ranks may run different numbers of them."""
    FORWARD_BEGIN = 7
    """A rank begins a forward without gradients whose order is frozen."""
    TRAINING_BEGIN = 8
    """A rank begins to train after forwards without gradients; the order of its training step is frozen."""


class Pass(IntEnum):
    """The kind of pass that a rank is in when it needs something. Each kind of pass has its own order."""

    EVALUATION = 0
    """A forward without gradients."""
    TRAINING = 1
    """A forward with gradients, a backward, or the end of a step."""
    OUTSIDE = 2
    """No pass: parameters are gathered because the user asks for them."""


_PAUSES = frozenset({Kind.FORWARD_END, Kind.BACKWARD_END})


class Operation(NamedTuple):
    """One entry of a schedule; ``unit`` is -1 for marks, which have no unit. (A tuple, as every hook hashes one.)"""

    kind: Kind
    unit: int = -1

    def __str__(self) -> str:
        return self.kind.name.lower() if self.unit < 0 else f"{self.kind.name.lower()}({self.unit})"


@dataclass(frozen=True)
class Post:
    """A rank's message to the others in one round of agreement.

    ``during`` is the kind of pass that the rank is in. ``position`` is how far the rank has executed its frozen
    schedule (0 without one), ``checksum`` covers everything it has executed in this step, ``deviation`` is the first
    operation it needed beyond the schedule, ``edits`` stands for what its user wrote into parameters since the last
    step, ``skipped`` says whether a forward without gradients passed by gathers of its frozen order, ``squares`` is
    this rank's sum of squares of its gradients, where the ranks' are to be added up, ``need`` stands for what it holds
    when it asks for a gather (``ahead.Need``).
    """

    operation: Operation
    during: Pass = Pass.TRAINING
    position: int = 0
    checksum: int = 0
    deviation: Operation | None = None
    edits: int = 0
    skipped: bool = False
    squares: float = 0.0
    need: int = 0

    WORDS = 11

    def to_words(self) -> tuple[int, ...]:
        """Integers, for the wire."""
        strayed = self.deviation
        return (
            int(self.operation.kind),
            self.operation.unit,
            int(self.during),
            self.position,
            self.checksum,
            -1 if strayed is None else int(strayed.kind),
            -1 if strayed is None else strayed.unit,
            self.edits,
            int(self.skipped),
            _bits(self.squares),
            self.need,
        )

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Post:
        """The inverse of ``to_words``."""
        kind, unit, during, position, digest, strayed_kind, strayed_unit, edits, skipped, bits, need = words
        strayed = None if strayed_kind < 0 else Operation(Kind(strayed_kind), strayed_unit)
        wanted, squares = Operation(Kind(kind), unit), _number(bits)
        return cls(wanted, Pass(during), position, digest, strayed, edits, bool(skipped), squares, need)


def posts_of(rows: Sequence[tuple[int, ...]]) -> list[Post]:
    """The posts of all ranks from their words. Ranks that say the same share one post: of a thousand ranks most do, but
    for their squares.
    """
    made: dict[tuple[int, ...], Post] = {}
    posts = []
    for words in rows:
        post = made.get(words)
        if post is None:
            post = made[words] = Post.from_words(words)
        posts.append(post)
    return posts


def _bits(number: float) -> int:
    """The bits of a double, as a whole number."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


@dataclass(frozen=True)
class Decision:
    """The actions of all ranks after one round.

    1. All ranks execute their schedule up to ``align``. 2. All execute ``operations`` in order. 3. The ranks in
    ``resume`` go on, because their post is fulfilled; the others post again.
    """

    align: int
    operations: tuple[Operation, ...]
    resume: frozenset[int]


def decide(posts: Sequence[Post]) -> Decision:
    """The rules of agreement (``posts[r]`` is rank ``r``'s). At least one rank resumes in every round.

    * A forward without gradients that any rank begins is executed by all in its frozen order, at the place where each
      rank is: the ranks that begin it do not wait for this decision.
    * Gathers that any rank asks for are executed by all, in the order of the ranks that ask.
    * If no rank asks for a gather, one reduce is executed: that of the posted unit with the highest index, because
      backward runs through the units from the last to the first. The ranks that posted it resume; the others take part
      with the gradients they have.
    * When no rank asks for anything and some are at the end of a pass, those resume.
    * When every rank begins to train or is at its boundary, those that begin to train resume.
    * When every rank is at its boundary, or every rank has joined, all resume.

    Raises:
        ValueError: some ranks have joined, and all others begin to train or are at their boundary. Neither of them can
            ever go on.
    """
    if not posts:
        raise ValueError("decide needs the post of at least one rank")
    if len(posts) > 1 and len(set(map(id, posts))) == 1:  # the usual case of many ranks
        said = decide(posts[:1])
        return Decision(said.align, said.operations, frozenset(range(len(posts))))
    align = max(post.position for post in posts)
    asked = [post.operation for post in posts]
    begun = (Operation(Kind.FORWARD_BEGIN),)
    if begun[0] in asked:
        return Decision(0, begun, _ranks(asked, begun))
    gathers = tuple(dict.fromkeys(op for op in asked if op.kind is Kind.GATHER))
    if gathers:
        return Decision(align, gathers, _ranks(asked, gathers))
    reduces = [op for op in asked if op.kind is Kind.REDUCE]
    if reduces:
        chosen = (max(reduces, key=lambda op: op.unit),)
        return Decision(align, chosen, _ranks(asked, chosen))
    paused = frozenset(rank for rank, op in enumerate(asked) if op.kind in _PAUSES)
    if paused:
        return Decision(align, (), paused)
    trains = _ranks(asked, (Operation(Kind.TRAINING_BEGIN),))
    if len(set(asked)) > 1 and (not trains or Operation(Kind.JOIN) in asked):
        at: dict[Operation, list[int]] = {}
        for rank, op in enumerate(asked):
            at.setdefault(op, []).append(rank)
        where = ", ".join(f"rank {some_ranks(ranks)} at {op}" for op, ranks in at.items())
        raise ValueError(f"the ranks wait for each other at different places: {where}")
    return Decision(align, (), trains or frozenset(range(len(posts))))


def _ranks(asked: Sequence[Operation], operations: tuple[Operation, ...]) -> frozenset[int]:
    return frozenset(rank for rank, op in enumerate(asked) if op in operations)


def checksum(operations: Sequence[Operation], before: int = 0) -> int:
    """Extend the checksum ``before`` by executed operations. The result is the same on every machine."""
    return zlib.crc32(struct.pack(f"<{2 * len(operations)}i", *chain.from_iterable(operations)), before)


@dataclass(frozen=True)
class Schedule:
    """The operations of one complete step in the agreed order, marks included.

    Attributes:
        ahead: for every place the places of the gathers that are issued when a rank has come to it, before they are
            needed; empty: none are.
    """

    entries: tuple[Operation, ...]
    ahead: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        """One pass per line."""
        lines: list[list[str]] = [[]]
        for entry in self.entries:
            lines[-1].append(str(entry))
            if entry.kind in _PAUSES:
                lines.append([])
        return "\n".join(" ".join(line) for line in lines if line)

    @cached_property
    def _places(self) -> dict[Operation, list[int]]:
        """The places of every operation, in order; a use counts as a gather."""
        found: dict[Operation, list[int]] = {}
        for place, entry in enumerate(self.entries):
            wanted = Operation(Kind.GATHER, entry.unit) if entry.kind is Kind.USE else entry
            found.setdefault(wanted, []).append(place)
        return found

    @cached_property
    def issued(self) -> tuple[list[int], list[int]]:
        """The places of gathers and reduces in the order in which all ranks issue them, and for every place how many of
        these a rank has issued when it has come there.
        """
        order, counts, early = list[int](), list[int](), set[int]()
        for place, entry in enumerate(self.entries):
            if entry.kind in (Kind.GATHER, Kind.REDUCE) and place not in early:
                order.append(place)
            if self.ahead:
                order.extend(self.ahead[place])
                early.update(self.ahead[place])
            counts.append(len(order))
        return order, counts

    @cached_property
    def reduces(self) -> list[int]:
        """For every place the place of the next reduce at or after it (``len(entries)`` if there is none)."""
        return _next_places(self.entries, frozenset({Kind.REDUCE}))

    @cached_property
    def needs(self) -> list[int]:
        """For every place the place of the next gather or use at or after it (``len(entries)`` if there is none)."""
        return _next_places(self.entries, frozenset({Kind.GATHER, Kind.USE}))

    @cached_property
    def reuses(self) -> bool:
        """Whether the schedule has uses of units that are still gathered."""
        return any(entry.kind is Kind.USE for entry in self.entries)

    @cached_property
    def pass_ends(self) -> list[int]:
        """For every place the place of the mark that ends its pass (``len(entries)`` if none does)."""
        return _next_places(self.entries, _PAUSES)

    @cached_property
    def backward_ends(self) -> list[int]:
        """For every place the place of the next end of a backward (``len(entries)`` if there is none)."""
        return _next_places(self.entries, frozenset({Kind.BACKWARD_END}))

    def find(self, operation: Operation, start: int) -> int | None:
        """Place of the next ``operation`` at or after ``start`` (a gather is also found as a use)."""
        places = self._places.get(operation, ())
        index = bisect_left(places, start)
        return places[index] if index < len(places) else None

    def find_in_pass(self, operation: Operation, start: int) -> int | None:
        """Like ``find``, but only up to the end of the pass in which ``start`` is."""
        places = self._places.get(operation, ())
        index = bisect_left(places, start)
        return places[index] if index < len(places) and places[index] <= self.pass_ends[start] else None

    def validate(self, units: int) -> None:
        """Check every entry, for a model of ``units`` units.

        Raises:
            ValueError: names the first entry that is wrong: its unit is out of range, or a unit is used that was not
                gathered before in its pass.
        """
        gathered: set[int] = set()
        for place, entry in enumerate(self.entries):
            marks = entry.kind in _PAUSES
            if marks != (entry.unit < 0) or entry.kind >= Kind.BOUNDARY or entry.unit >= units:
                raise ValueError(f"schedule entry {place} is {entry}: not an operation on one of {units} units")
            if entry.kind is Kind.USE and entry.unit not in gathered:
                raise ValueError(
                    f"schedule entry {place} is {entry}, but unit {entry.unit} was not gathered before it in its pass"
                )
            if entry.kind is Kind.GATHER:
                gathered.add(entry.unit)
            if marks:
                gathered.clear()


def _next_places(entries: Sequence[Operation], kinds: frozenset[Kind]) -> list[int]:
    """For every place, and the end, the place of the first entry of these kinds at or after it."""
    following = len(entries)
    places = [following]
    for place in range(len(entries) - 1, -1, -1):
        following = place if entries[place].kind in kinds else following
        places.append(following)
    places.reverse()
    return places


def passes(entries: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """The ranges ``[start, stop)`` of places of the passes, marks included."""
    start = 0
    for place, entry in enumerate(entries):
        if entry.kind in _PAUSES:
            yield start, place + 1
            start = place + 1
    if start < len(entries):
        yield start, len(entries)


def elide_gathers(schedule: Schedule, numel: Sequence[int], *, max_reuse_distance: int, max_live: int) -> Schedule:
    """Turn a gather into a use if the unit was gathered shortly before in the same pass.

    The distance between two gathers of a unit is the number of elements gathered between them, the unit's own included.
    A gather becomes a use if the distance is at most ``max_reuse_distance``, and if the units that are kept never have
    more than ``max_live`` elements together.

    Args:
        numel: elements of each unit, by its index.
    """
    entries = list(schedule.entries)
    for start, stop in passes(schedule.entries):
        last: dict[int, int] = {}
        kept = [0] * (stop - start)  # elements kept over each place of the pass
        for place in range(start, stop):
            entry = entries[place]
            if entry.kind is not Kind.GATHER:
                continue
            before, size = last.get(entry.unit), numel[entry.unit]
            last[entry.unit] = place
            if before is None:
                continue
            between = range(before + 1, place)
            distance = size + sum(numel[entries[i].unit] for i in between if entries[i].kind is Kind.GATHER)
            fits = all(
                kept[i - start] + size + numel[entries[i].unit] <= max_live for i in between if entries[i].unit >= 0
            )
            if distance <= max_reuse_distance and fits:
                entries[place] = Operation(Kind.USE, entry.unit)
                for i in between:
                    kept[i - start] += size
    return Schedule(tuple(entries))
