"""The times of a schedule: start and end of every action, computed from the time that each stage needs.

The result is the *ideal* step: every rank starts an action as soon as the actions before it on the rank are done and
its input has arrived. A real step is compared with it (`Pipeline.report`), and the planner searches over it. Timelines,
also measured ones, are kept as JSON files (`dsx-pipe show --timeline`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import ScheduleError
from .action import Action, Kind
from .plan import Schedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage."""

    forward: float
    input_backward: float
    weight_backward: float = 0.0

    def of(self, kind: Kind) -> float:
        """Seconds of an action of this kind; sends and receives take none."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.INPUT:
            return self.input_backward
        if kind is Kind.WEIGHT:
            return self.weight_backward
        return self.input_backward + self.weight_backward if kind is Kind.BACKWARD else 0.0


@dataclass(frozen=True)
class Span:
    """One action of one rank with its start and end in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, simulated or measured. Times are seconds."""

    name: str
    ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def length(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    def busy(self, rank: int) -> float:
        """Seconds that `rank` computes."""
        return sum(s.end - s.start for s in self.spans if s.rank == rank and s.action.kind.computes)

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks' time: 1 - (sum of busy times) / (ranks x length)."""
        if not self.length:
            return 0.0
        return 1.0 - sum(self.busy(r) for r in range(self.ranks)) / (self.ranks * self.length)


def uniform_times(stages: int, forward: float = 1.0, backward: float = 2.0) -> tuple[StageTimes, ...]:
    """The same times for all stages. Half of the backward is for the input, half for the weights."""
    return (StageTimes(forward, backward / 2, backward / 2),) * stages


def simulate(schedule: Schedule, times: Sequence[StageTimes], *, latency: float | Sequence[float] = 0.0) -> Timeline:
    """Compute the start and end of every action of a schedule.

    Args:
        schedule: with or without sends and receives. With them a message leaves at its send and is waited for at its
            receive. Without them it leaves when it is computed, and the action that needs it waits for it.
        times: seconds per stage.
        latency: seconds between the end of a send and the moment the receiver can use the message; a sequence has one
            number for each pair of neighbouring stages. Messages between stages of one rank take no time.

    Raises:
        ScheduleError: `times` or `latency` has the wrong length, or the schedule has a deadlock.
    """
    if len(times) != schedule.stages:
        raise ScheduleError(f"times: got {len(times)}, expected one for each of {schedule.stages} stages")
    between = schedule.stages - 1
    delays = tuple(latency) if isinstance(latency, Sequence) else (latency,) * between
    if len(delays) != between:
        raise ScheduleError(f"latency: got {len(delays)}, expected one for each of {between} pairs of stages")
    done: dict[Action, float] = {}
    clock = [0.0] * schedule.ranks
    position = [0] * schedule.ranks
    spans: list[Span] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = _ready_at(schedule, action, done, delays)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                end = start + times[action.stage].of(action.kind)
                done[action] = clock[rank] = end
                spans.append(Span(rank, action, start, end))
                position[rank] += 1
                progressed = True
    waiting = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(schedule.actions) if position[r] < len(row)]
    if waiting:
        raise ScheduleError(f"{schedule.name} never ends: {', '.join(waiting)} wait for what never comes")
    return Timeline(schedule.name, schedule.ranks, tuple(sorted(spans, key=lambda s: (s.start, s.rank))))


def _ready_at(schedule: Schedule, action: Action, done: dict[Action, float], delays: Sequence[float]) -> float | None:
    """The time at which the inputs of an action have arrived; None if one of them is not computed yet."""
    times = []
    for needed in requirements(schedule, action):
        at = next((done[a] for a in needed if a in done), None)
        if at is None:
            return None
        source = next(a for a in needed if a in done)
        crosses_ranks = schedule.stage_ranks[source.stage] != schedule.stage_ranks[action.stage]
        times.append(at + (delays[min(source.stage, action.stage)] if crosses_ranks else 0.0))
    return max(times, default=0.0)


def requirements(schedule: Schedule, action: Action) -> list[tuple[Action, ...]]:
    """The actions that must be done before `action`. Of each tuple one action is enough."""
    stage, kind, m = action.stage, action.kind, action.micro_batch
    produced_grad = (Action(stage, Kind.BACKWARD, m), Action(stage, Kind.INPUT, m))
    if kind is Kind.SEND_F:
        return [(Action(stage, Kind.FORWARD, m),)]
    if kind is Kind.SEND_B:
        return [produced_grad]
    if kind.receives:
        return [(action.counterpart(),)]
    if kind is Kind.WEIGHT:
        return [(Action(stage, Kind.INPUT, m),)]
    needs: list[tuple[Action, ...]] = []
    if kind is Kind.FORWARD:
        if stage > 0:
            needs.append(_arrival(schedule, stage, stage - 1, Kind.RECV_F, (Kind.FORWARD,), m))
    else:
        needs.append((Action(stage, Kind.FORWARD, m),))
        if stage < schedule.stages - 1:
            needs.append(_arrival(schedule, stage, stage + 1, Kind.RECV_B, (Kind.BACKWARD, Kind.INPUT), m))
    return needs


def _arrival(
    schedule: Schedule, stage: int, source: int, receive: Kind, produce: tuple[Kind, ...], m: int
) -> tuple[Action, ...]:
    """The actions that bring a message from stage `source` to `stage`: its receive, or a computation in `produce`."""
    crosses_ranks = schedule.stage_ranks[stage] != schedule.stage_ranks[source]
    if schedule.communicates and crosses_ranks:
        return (Action(stage, receive, m),)
    return tuple(Action(source, kind, m) for kind in produce)


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as JSON."""
    spans = [[s.rank, str(s.action), s.start, s.end] for s in timeline.spans]
    Path(path).write_text(json.dumps({"name": timeline.name, "ranks": timeline.ranks, "spans": spans}) + "\n")


def load_timeline(path: str | Path) -> Timeline:
    """Read what `save_timeline` wrote.

    Raises:
        ScheduleError: the file is not such a timeline.
    """
    try:
        data = json.loads(Path(path).read_text())
        spans = tuple(Span(int(r), Action.parse(a), float(s), float(e)) for r, a, s, e in data["spans"])
        return Timeline(str(data["name"]), int(data["ranks"]), spans)
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(
            f"{path}: expected a timeline that dsx_pipe.schedule.save_timeline wrote ({error})"
        ) from None
