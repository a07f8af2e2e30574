"""The schedule of a pass: when pieces are read, updated and written, over a fixed number of buffers. No I/O is done
here.

Groups of elements are cut into pieces that fit a slot. A slot holds all states of one piece, and the pieces go through
the slots in turn. With one slot a piece is read, updated and written before the next one. Reading ahead takes `DEPTH`
more slots, and so does writing behind: with more and smaller pieces the disk is also busy at both ends of a pass. The
schedule is a list of actions that can be printed and checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import BudgetError, OptionError

PAGE = 4096
DEPTH = 2  # pieces read ahead, and pieces whose writes are not waited for
Kind = Literal["read", "wait_read", "update", "write", "wait_write"]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a group.

    `offset`: the place of its states in the file, in bytes; `room`: bytes of one state in file and slot.
    """

    index: int
    key: str
    start: int
    stop: int
    offset: int
    room: int
    resident: bool = False  # stays in memory, and is never read or written

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Action:
    """One line of the schedule; pieces by index."""

    kind: Kind
    piece: int
    slot: int


@dataclass(frozen=True)
class SwapPlan:
    """Pieces, slots and the schedule of one pass."""

    pieces: tuple[Piece, ...]
    actions: tuple[Action, ...]
    states: int
    slots: int
    slot_bytes: int  # of one state

    @property
    def file_bytes(self) -> int:
        """The size of the file, which holds all pieces that are not resident."""
        return sum(p.room * self.states for p in self.pieces if not p.resident)

    def render(self) -> str:
        """The schedule as text, a line per action."""
        head = f"{len(self.pieces)} pieces, {self.slots} slots of {self.states} x {self.slot_bytes} bytes"
        names = [f"{p.key}[{p.start}:{p.stop}]" for p in self.pieces]
        return "\n".join([head, *(f"{a.kind:10} {names[a.piece]} slot {a.slot}" for a in self.actions)])

    def validate(self) -> None:
        """Raise OptionError if two pieces use a slot at the same time, or a piece is left out."""
        holder: dict[int, int] = {}
        seen: dict[int, list[Kind]] = {p.index: [] for p in self.pieces}
        for action in self.actions:
            resident = self.pieces[action.piece].resident
            if not resident and action.kind == "read":
                if action.slot in holder:
                    raise OptionError(f"slot {action.slot} is read into while piece {holder[action.slot]} is in it")
                holder[action.slot] = action.piece
            elif not resident and holder.get(action.slot) != action.piece:
                raise OptionError(f"{action.kind} of piece {action.piece}, which is not in slot {action.slot}")
            if action.kind == "wait_write":
                holder.pop(action.slot, None)
            seen[action.piece].append(action.kind)
        for piece in self.pieces:
            expected = ["update"] if piece.resident else ["read", "wait_read", "update", "write", "wait_write"]
            if seen[piece.index] != expected:
                raise OptionError(f"piece {piece.index} goes through {seen[piece.index]}, expected {expected}")


def make_plan(
    sizes: Mapping[str, int], *, states: int, itemsize: int, buffer_bytes: int, read_ahead: bool = False,
    write_behind: bool = False, resident_elements: int = 0, divisible: bool = True,
) -> SwapPlan:  # fmt: skip
    """The plan for groups of `sizes` elements with `states` states each.

    `buffer_bytes`: memory for all slots together; `resident_elements`: the first groups, with together at most that
    many elements, stay in memory; `divisible=False`: a group is never cut. Raises BudgetError if the slots are too
    small.
    """
    slots = 1 + DEPTH * read_ahead + DEPTH * write_behind
    slot_bytes = buffer_bytes // (slots * states) // PAGE * PAGE
    largest = slot_bytes // itemsize
    if largest < 1:
        raise BudgetError(
            f"{buffer_bytes} bytes of buffers do not give {slots} slots of {states} states a page of {PAGE} bytes "
            "each; raise buffer_size or buffer_count"
        )
    pieces: list[Piece] = []
    offset = 0
    for key, numel in sizes.items():
        resident = numel <= resident_elements
        resident_elements -= numel if resident else 0
        for start, stop in _cut(key, numel, numel if resident else largest, divisible):
            room = -(-(stop - start) * itemsize // PAGE) * PAGE
            pieces.append(Piece(len(pieces), key, start, stop, 0 if resident else offset, room, resident))
            offset += 0 if resident else room * states
    actions = tuple(_schedule(pieces, slots, read_ahead, write_behind))
    plan = SwapPlan(tuple(pieces), actions, states, slots, slot_bytes)
    plan.validate()
    return plan


def _cut(key: str, numel: int, largest: int, divisible: bool) -> list[tuple[int, int]]:
    if numel == 0:
        return []
    if numel > largest and not divisible:
        raise BudgetError(
            f"group {key!r} has {numel} elements, a slot holds {largest}; raise buffer_size or buffer_count"
        )
    count = -(-numel // largest)
    unit = 1024  # elements; so cuts are at page boundaries for every dtype of at least 4 bytes
    size = min(largest, -(-numel // count // unit) * unit) if count > 1 else numel
    size = max(1, size)
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def _schedule(pieces: Sequence[Piece], slots: int, read_ahead: bool, write_behind: bool) -> list[Action]:
    moving = [p for p in pieces if not p.resident]
    actions: list[Action] = []
    writing: dict[int, int] = {}  # slot -> piece whose write is not waited for
    read = turn = 0  # how many non-resident pieces were read, and were updated

    for piece in pieces:
        if piece.resident:
            actions.append(Action("update", piece.index, -1))
            continue
        place = turn % slots
        if read == 0 or not read_ahead:
            read = _read(moving, turn + 1, read, slots, writing, actions)
        actions.append(Action("wait_read", piece.index, place))
        if read_ahead:
            read = _read(moving, turn + 1 + DEPTH, read, slots, writing, actions)
        actions += [Action("update", piece.index, place), Action("write", piece.index, place)]
        if write_behind:
            writing[place] = piece.index
        else:
            actions.append(Action("wait_write", piece.index, place))
        turn += 1
    actions += [Action("wait_write", index, place) for place, index in writing.items()]
    return actions


def _read(
    moving: Sequence[Piece], until: int, read: int, slots: int, writing: dict[int, int], actions: list[Action]
) -> int:
    """Read pieces up to number `until`; before a slot is used again, its write is waited for.

    Returns how many pieces have been read.
    """
    while read < min(until, len(moving)):
        place = read % slots
        if place in writing:
            actions.append(Action("wait_write", writing.pop(place), place))
        actions.append(Action("read", moving[read].index, place))
        read += 1
    return read
