"""A schedule as frozen data: for every rank the list of its actions, in order.

    plan = one_f_one_b(ranks=2, micro_batches=4)
    print(plan)                          # name, stages and one line per rank
    assert Schedule.parse(str(plan)) == plan

A *rank* is a process of the pipeline; a *stage* is a part of the model. A rank holds one stage, or several (interleaved
and V-shaped schedules). Sends and receives may be left out: the runtime then sends an output as soon as it is computed
and receives an input when it is needed. `with_communication` adds them.

Left out: time (`simulate.py`) and correctness (`validate.py`). This module does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import ScheduleError
from .action import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """The order of the actions of every rank.

    Attributes:
        name: name of the schedule in reports.
        micro_batches: number of micro-batches of a step.
        stage_ranks: for every stage, the rank that holds it.
        actions: for every rank, its actions in order.
    """

    name: str
    micro_batches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(
        name: str, micro_batches: int, stage_ranks: Sequence[int], actions: Iterable[Iterable[Action | str]]
    ) -> Schedule:
        """Make a schedule from lists. An action may be text like "0F1".

        Raises:
            ScheduleError: a text is not an action.
        """
        rows = tuple(tuple(a if isinstance(a, Action) else Action.parse(a) for a in row) for row in actions)
        return Schedule(name, micro_batches, tuple(stage_ranks), rows)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @cached_property
    def trains(self) -> bool:
        """True if the schedule has backward actions."""
        return any(a.kind in (Kind.BACKWARD, Kind.INPUT) for row in self.actions for a in row)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backward is split into an input part and a weight part (zero-bubble)."""
        return any(a.kind is Kind.INPUT for row in self.actions for a in row)

    @cached_property
    def communicates(self) -> bool:
        """True if the schedule has explicit sends or receives."""
        return any(not a.kind.computes for row in self.actions for a in row)

    @cached_property
    def digest(self) -> int:
        """A number of 56 bits that equal schedules share."""
        return int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:7], "big")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    def without_communication(self) -> Schedule:
        """The same schedule with computation only."""
        rows = tuple(tuple(a for a in row if a.kind.computes) for row in self.actions)
        return Schedule(self.name, self.micro_batches, self.stage_ranks, rows)

    def __str__(self) -> str:
        head = [
            f"schedule: {self.name}",
            f"micro_batches: {self.micro_batches}",
            f"stage_ranks: {' '.join(map(str, self.stage_ranks))}",
        ]
        return "\n".join(head + [f"rank {r}: {' '.join(map(str, row))}" for r, row in enumerate(self.actions)]) + "\n"

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that prints as `text`. Empty lines and lines that begin with # are skipped.

        Raises:
            ScheduleError: a line is missing, repeated or not understood. The message names the line.
        """
        head: dict[str, str] = {}
        rows: dict[int, tuple[Action, ...]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key, colon, value = line.partition(":")
            key = key.strip()
            if not colon:
                raise ScheduleError(f"line {number}: got {line!r}, expected 'key: value'")
            if key in head:
                raise ScheduleError(f"line {number}: {key} is given twice")
            if key in ("schedule", "micro_batches", "stage_ranks"):
                head[key] = value.strip()
            else:
                _add_row(rows, key, value, number)
        missing = [key for key in ("schedule", "micro_batches", "stage_ranks") if key not in head]
        if missing:
            raise ScheduleError(f"the schedule has no line {missing[0]!r}")
        if sorted(rows) != list(range(len(rows))):
            raise ScheduleError(f"ranks: got {sorted(rows)}, expected one line for each of 0..{max(rows)}")
        try:
            micro_batches = int(head["micro_batches"])
            stage_ranks = tuple(map(int, head["stage_ranks"].split()))
        except ValueError as error:
            raise ScheduleError(f"micro_batches and stage_ranks: expected whole numbers ({error})") from None
        return Schedule(head["schedule"], micro_batches, stage_ranks, tuple(rows[r] for r in range(len(rows))))


def _add_row(rows: dict[int, tuple[Action, ...]], key: str, value: str, number: int) -> None:
    words = key.split()
    if len(words) != 2 or words[0] != "rank" or not words[1].isdigit():
        raise ScheduleError(
            f"line {number}: got {key!r}, expected schedule, micro_batches, stage_ranks or 'rank <number>'"
        )
    rank = int(words[1])
    if rank in rows:
        raise ScheduleError(f"line {number}: rank {rank} is given twice")
    try:
        rows[rank] = tuple(Action.parse(word) for word in value.split())
    except ScheduleError as error:
        raise ScheduleError(f"line {number}: {error}") from None
