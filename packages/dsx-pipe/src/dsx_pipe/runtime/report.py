"""The times of a step: stage times, the ideal step computed from them, and the measured bubble compared with it."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm

from ..schedule import Action, Kind, Schedule, Span, StageTimes, Timeline, simulate
from .step import Step


@dataclass(frozen=True)
class StepReport:
    """A measured step, and the ideal step of the schedule for the same stage times.

    Attributes:
        stage_times: mean seconds per micro-batch of each stage, measured in this step.
        measured: start and end of every computation of every rank.
        ideal: the same schedule simulated with these stage times, without time for messages.
        most_kept: for each stage, the largest number of micro-batches whose activations it kept at one time.
    """

    stage_times: tuple[StageTimes, ...]
    measured: Timeline
    ideal: Timeline
    most_kept: tuple[int, ...]

    @property
    def over_ideal(self) -> float:
        """Measured length divided by ideal length; 1 is ideal."""
        return self.measured.length / self.ideal.length

    def __str__(self) -> str:
        lines = [
            f"{self.measured.name}: step {1e3 * self.measured.length:.1f} ms, ideal {1e3 * self.ideal.length:.1f} ms "
            f"({self.over_ideal:.3f}x); bubble {self.measured.bubble_share:.1%}, ideal {self.ideal.bubble_share:.1%}",
            "stage  forward ms  input ms  weight ms  kept",
        ]
        for stage, (times, kept) in enumerate(zip(self.stage_times, self.most_kept)):
            lines.append(
                f"{stage:>5}  {1e3 * times.forward:>10.2f}  {1e3 * times.input_backward:>8.2f}  "
                f"{1e3 * times.weight_backward:>9.2f}  {kept:>4}"
            )
        return "\n".join(lines)


def stage_times_of(spans: Sequence[Span], stages: int) -> tuple[StageTimes, ...]:
    """Mean seconds per stage and kind. A whole backward counts as input backward."""
    sums: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        kind = Kind.INPUT if span.action.kind is Kind.BACKWARD else span.action.kind
        sums[span.action.stage, kind].append(span.end - span.start)

    def mean(stage: int, kind: Kind) -> float:
        values = sums.get((stage, kind), [])
        return sum(values) / len(values) if values else 0.0

    return tuple(
        StageTimes(mean(s, Kind.FORWARD), mean(s, Kind.INPUT), mean(s, Kind.WEIGHT)) for s in range(stages)
    )  # fmt: skip


def gather_report(schedule: Schedule, step: Step, most_kept: dict[int, int], group: Any) -> StepReport:
    """The report of the ranks' last step (collective).

    Args:
        schedule: of the step.
        step: this rank's part.
        most_kept: for each stage of this rank, as in `StepReport`.
        group: of the pipeline's ranks, for messages in host memory.
    """
    mine = [(span.rank, str(span.action), span.start, span.end) for span in step.spans]
    rows = dsx_comm.together(group).gather((mine, most_kept, step.start, platform.node()))
    # clocks of several hosts cannot be compared, so times count from the step's start, which is common to all ranks
    clocks_differ = len({row[3] for row in rows}) > 1
    spans = [
        Span(rank, Action.parse(action), start - clocks_differ * began, end - clocks_differ * began)
        for row, _, began, _ in rows for rank, action, start, end in row
    ]  # fmt: skip
    kept = {stage: n for row in rows for stage, n in row[1].items()}
    return make_report(schedule, spans, [kept.get(s, 0) for s in range(schedule.stages)])


def make_report(schedule: Schedule, spans: Sequence[Span], most_kept: Sequence[int]) -> StepReport:
    """The report of a step from the spans of all ranks."""
    measured = Timeline(schedule.name, schedule.ranks, tuple(sorted(spans, key=lambda s: (s.start, s.rank))))
    times = stage_times_of(spans, schedule.stages)
    return StepReport(times, measured, simulate(schedule, times), tuple(most_kept))
