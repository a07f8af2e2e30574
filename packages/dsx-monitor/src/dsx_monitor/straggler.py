"""Finds stragglers: ranks that make the others wait, by comparing the ranks' own work without their waiting times.

One slow rank makes the steps of all ranks equally long, so step times tell nothing. A rank's own work tells: the length
of each phase minus the time spent waiting for communication. `StragglerMonitor` smooths it over steps, compares it
between ranks once in `every` steps (one tiny gather), and names rank and phase if one of them is far above the median.

The arithmetic is in `judge_stragglers`, which needs no ranks. Device time is counted in the phase in which its events
were recorded, even if the host runs ahead of the device.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .timers import BACKWARD, FORWARD, OUTSIDE, STEP, WAITING

__all__ = ["PHASES", "Straggler", "StragglerMonitor", "StragglerReport", "judge_stragglers"]

PHASES = (OUTSIDE, FORWARD, BACKWARD, STEP)
_PHASE_LABELS = {OUTSIDE: "data loading and the training loop"}


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait. Times in milliseconds per step: its own work, and the median of the others."""

    rank: int
    phase: str
    own: float
    middle: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up in {_PHASE_LABELS.get(self.phase, self.phase)}: {self.own:.1f} ms of"
            f" own work per step, the median of the other ranks is {self.middle:.1f} ms"
        )


@dataclass(frozen=True)
class StragglerReport:
    """One comparison of all ranks.

    Attributes:
        own: milliseconds of own work per step, by rank and phase (in the order of `PHASES`).
        waiting: milliseconds per step that each rank waited.
        found: the stragglers, the slowest first.
    """

    own: tuple[tuple[float, ...], ...]
    waiting: tuple[float, ...]
    found: tuple[Straggler, ...]

    def table(self) -> str:
        """A table of all ranks, as text."""
        head = f"{'rank':>6}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'waiting':>12}"
        lines = [
            f"{rank:>6}" + "".join(f"{value:>12.2f}" for value in (*own, waited))
            for rank, (own, waited) in enumerate(zip(self.own, self.waiting))
        ]
        return "\n".join([f"own work per step (ms)\n{head}", *lines])


def judge_stragglers(rows: Sequence[Sequence[float]], *, ratio: float = 1.3, share: float = 0.1) -> StragglerReport:
    """Compare ranks.

    Args:
        rows: for each rank, milliseconds of own work in each of `PHASES`, then of waiting.
        ratio: a phase is reported if it takes at least this multiple of the median of the other ranks,
        share: and if the difference is also at least this share of a step.
    """
    own = tuple(tuple(row[: len(PHASES)]) for row in rows)
    waiting = tuple(row[len(PHASES)] for row in rows)
    step = max(sum(row) for row in rows)  # own work and waiting are all there is
    found = []
    for place, phase in enumerate(PHASES):
        values = [row[place] for row in own]
        in_order = sorted(values)
        for rank, value in enumerate(values):
            middle = _median_of_others(in_order, value)
            if value > ratio * middle and value - middle > share * step:
                found.append(Straggler(rank, phase, value, middle))
    found.sort(key=lambda straggler: straggler.middle - straggler.own)
    return StragglerReport(own, waiting, tuple(found))


def _median_of_others(in_order: Sequence[float], value: float) -> float:
    """The median of sorted numbers without one `value` of them; of one number that number itself."""
    others = len(in_order) - 1
    if not others:
        return value
    without = bisect_left(in_order, value)
    high, low = others // 2, (others - 1) // 2
    return (in_order[high + (high >= without)] + in_order[low + (low >= without)]) / 2


class StragglerMonitor:
    """Collects this rank's steps and compares them with those of the other ranks (`judge_stragglers`).

    Args:
        gather: takes this rank's list of numbers and returns those of all ranks; called at the same steps on all ranks.
        every: steps between two comparisons.
        memory: roughly the number of past steps in the smoothed figures.
        ratio, share: as for `judge_stragglers`.
    """

    def __init__(
        self,
        gather: Callable[[list[float]], Sequence[Sequence[float]]],
        *,
        every: int = 50,
        memory: int = 20,
        ratio: float = 1.3,
        share: float = 0.1,
    ) -> None:
        if every < 1 or memory < 1:
            raise ValueError(f"StragglerMonitor: got every={every}, memory={memory}, expected positive numbers")
        self._gather, self._every, self._keep = gather, every, 1.0 - 1.0 / memory
        self._ratio, self._share = ratio, share
        self._smooth: list[float] | None = None
        self._steps, self._last_end = 0, 0.0
        self.latest: StragglerReport | None = None

    def step(self, elapsed: Iterable[tuple[str, float]]) -> StragglerReport | None:
        """End a step; `elapsed` is the result of `WallClock.elapsed` for it (may be empty).

        Returns the report on every rank if one is due.
        """
        now, known = time.perf_counter(), dict(elapsed)
        length = (now - self._last_end) * 1e3
        first, self._last_end = self._last_end == 0.0, now
        if not first and known:
            self._add(_own_work(known, length))
        self._steps += 1
        if self._steps % self._every:
            return None
        smooth = self._smooth or [0.0] * (len(PHASES) + 1)
        self.latest = judge_stragglers(self._gather(smooth), ratio=self._ratio, share=self._share)
        self._last_end = time.perf_counter()  # the time of the gather must not count in the next step
        return self.latest

    def _add(self, values: list[float]) -> None:
        if self._smooth is None:
            self._smooth = values
        else:
            self._smooth = [self._keep * old + (1 - self._keep) * new for old, new in zip(self._smooth, values)]


def _own_work(known: dict[str, float], length: float) -> list[float]:
    """Own milliseconds in each of `PHASES`, then waiting, of a step of `length` milliseconds."""
    timed = sum(known.get(phase, 0.0) for phase in PHASES)
    known = {**known, OUTSIDE: max(0.0, length - timed)}
    waits = [known.get(WAITING + phase, 0.0) for phase in PHASES]
    own = [max(0.0, known.get(phase, 0.0) - waited) for phase, waited in zip(PHASES, waits)]
    return [*own, sum(waits)]
