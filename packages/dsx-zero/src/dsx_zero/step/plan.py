"""The step as data: which masters are updated together, and in which order sub-groups are fetched, stepped and stored.

A *sub-group* is a run of masters that the optimizer updates in one call. Each sub-group is fetched (where states or
masters are not in memory), stepped, written to the parameters and stored. A unit is published as soon as all its
masters are written, so that its gather runs while the next sub-group is stepped. `Pipeline` says how far fetching and
storing of other sub-groups run beside the step.

The plan is frozen, can be printed (`str`) and checks itself (`validate`). It does not say how data is moved; `runner`
executes it. Publishing is collective, so units are published in ascending order on every rank, whatever sub-groups a
rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["ALIGNMENT", "OVERLAP", "Action", "Kind", "Pipeline", "StepPlan", "SubGroup", "cut", "make_plan"]

ALIGNMENT = 256
"""Elements. A parameter is cut only at multiples of this, so that a cut divides no block of 8-bit states and no vector
register.
"""

OVERLAP = 1 << 22
"""Least elements of a sub-group that is cut off only so that publishing overlaps. With fewer, the call would cost the
host more time than the overlap hides.
"""


@dataclass(frozen=True)
class Pipeline:
    """Limits of the transfers of sub-groups that run beside the step.

    Attributes:
        ahead: sub-groups that are fetched while one is stepped.
        behind: sub-groups whose storing may be under way when the next one is fetched; 0: storing ends first.
    """

    ahead: int = 1
    behind: int = 1


class Kind(Enum):
    """The kind of an action on a sub-group; `PUBLISH` names a unit."""

    FETCH = "fetch"
    STEP = "step"
    WRITE = "write"
    STORE = "store"
    PUBLISH = "publish"


@dataclass(frozen=True)
class Action:
    """One entry of a plan."""

    kind: Kind
    target: int

    def __str__(self) -> str:
        return f"{self.kind.value} {'unit ' if self.kind is Kind.PUBLISH else ''}{self.target}"


@dataclass(frozen=True)
class SubGroup:
    """Masters [start, stop) in layout order, `numel` elements together."""

    start: int
    stop: int
    numel: int


@dataclass(frozen=True)
class StepPlan:
    """A whole step."""

    sub_groups: tuple[SubGroup, ...]
    actions: tuple[Action, ...]
    pipeline: Pipeline = Pipeline()

    @property
    def in_memory(self) -> int:
        """The most sub-groups that are fetched and not stored yet."""
        return 1 + self.pipeline.ahead

    @property
    def moves(self) -> bool:
        """Is anything fetched and stored?"""
        return any(action.kind is Kind.FETCH for action in self.actions)

    def __str__(self) -> str:
        """One line per sub-group and one for the actions."""
        lines = [f"sub-group {n}: masters {g.start}-{g.stop - 1}, {g.numel:,} elements" if g.stop > g.start
                 else f"sub-group {n}: no masters" for n, g in enumerate(self.sub_groups)]  # fmt: skip
        return "\n".join([*lines, ", ".join(map(str, self.actions))])

    def validate(self, units: Sequence[int]) -> None:
        """Raise ValueError that names the first contradiction in the plan.

        Args:
            units: the unit of each master, in layout order.
        """
        position = 0
        for number, group in enumerate(self.sub_groups):
            if group.start != position or group.stop < group.start:
                raise ValueError(f"sub-group {number} begins at master {group.start}, expected {position}")
            position = group.stop
        if position != len(units):
            raise ValueError(f"the sub-groups have {position} masters, expected {len(units)}")
        self._validate_actions(units)

    def _validate_actions(self, units: Sequence[int]) -> None:
        done: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        last = -1
        for place, action in enumerate(self.actions):
            kind, target = action.kind, action.target
            if target in done[kind]:
                raise ValueError(f"action {place} is {action}, for the second time")
            needed = _BEFORE.get(kind)
            if needed is not None and (self.moves or needed is not Kind.FETCH) and target not in done[needed]:
                raise ValueError(f"action {place} is {action}, but there was no {needed.value} {target} before it")
            done[kind].add(target)
            if len(done[Kind.FETCH] - done[Kind.STORE]) > self.in_memory:
                raise ValueError(
                    f"action {place} is {action}: more than {self.in_memory} sub-groups would be in memory"
                )
            if kind is Kind.PUBLISH:
                late = [n for n, g in enumerate(self.sub_groups)
                        if target in units[g.start : g.stop] and n not in done[Kind.WRITE]]  # fmt: skip
                if late:
                    raise ValueError(f"action {place} is {action}, but sub-group {late[0]} of it is not written")
                if target < last:
                    raise ValueError(
                        f"action {place} is {action}, after unit {last}: the ranks publish in ascending order"
                    )
                last = target
        everything = set(range(len(self.sub_groups)))
        for kind in (Kind.STEP, Kind.WRITE, *((Kind.FETCH, Kind.STORE) if self.moves else ())):
            if done[kind] != everything:
                raise ValueError(f"{kind.value} is missing for sub-group {min(everything - done[kind])}")
        if not set(units) <= done[Kind.PUBLISH]:
            raise ValueError(f"unit {min(set(units) - done[Kind.PUBLISH])} is never published")


_BEFORE = {Kind.STEP: Kind.FETCH, Kind.WRITE: Kind.STEP, Kind.STORE: Kind.WRITE}


def cut(numel: int, most: int) -> tuple[tuple[int, int], ...]:
    """Cut the `numel` elements of a master into pieces of at most `most` elements (rounded up to `ALIGNMENT`)."""
    step = max(ALIGNMENT, -(-most // ALIGNMENT) * ALIGNMENT)
    return tuple((start, min(start + step, numel)) for start in range(0, numel, step)) or ((0, 0),)


def make_plan(
    masters: Sequence[tuple[int, int]],
    units: Sequence[int],
    *,
    most: int | None = None,
    overlap: bool = False,
    moves: bool = False,
    by_unit: bool = False,
    pipeline: Pipeline = Pipeline(),
) -> StepPlan:
    """Divide the masters into sub-groups and put the actions in order.

    Args:
        masters: unit and elements of each master, in layout order.
        units: the numbers of all units that any rank steps, ascending.
        most: the most elements of a sub-group (a single master may have more); None: no limit.
        overlap: end a sub-group after a unit when it has at least `OVERLAP` elements.
        moves: sub-groups are fetched and stored.
        by_unit: begin a new sub-group at each unit, so that units can be stepped one by one.
        pipeline: how far transfers run beside the step.
    """
    groups = _sub_groups(masters, most, overlap, by_unit)
    actions: list[Action] = []
    left = list(units)

    def fetch(number: int) -> None:
        if moves and number < len(groups):
            actions.append(Action(Kind.FETCH, number))

    for number in range(pipeline.ahead):
        fetch(number)
    for number, group in enumerate(groups):
        fetch(number + pipeline.ahead)
        actions += [Action(Kind.STEP, number), Action(Kind.WRITE, number)]
        if moves:
            actions.append(Action(Kind.STORE, number))
        following = masters[group.stop][0] if group.stop < len(masters) else None
        while left and (following is None or left[0] < following):
            actions.append(Action(Kind.PUBLISH, left.pop(0)))
    plan = StepPlan(tuple(groups), tuple(actions), pipeline)
    plan.validate([unit for unit, _ in masters])
    return plan


def _sub_groups(masters: Sequence[tuple[int, int]], most: int | None, overlap: bool, by_unit: bool) -> list[SubGroup]:
    groups: list[SubGroup] = []
    start = numel = 0
    for place, (unit, size) in enumerate(masters):
        full = most is not None and numel + size > most
        behind = (by_unit or (overlap and numel >= OVERLAP)) and unit != masters[place - 1][0]
        if place > start and (full or behind):
            groups.append(SubGroup(start, place, numel))
            start, numel = place, 0
        numel += size
    groups.append(SubGroup(start, len(masters), numel))
    return groups
