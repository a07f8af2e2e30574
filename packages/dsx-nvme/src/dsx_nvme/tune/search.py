"""Finds a good setting without trying all of them.

The measurement is a function that the caller gives; this module only chooses the order of the trials.

Guided: from a starting point, the values of one dimension at a time are tried while the others are fixed; a better
value is kept. The best few settings are then measured in turns until the time is over. The speed of a disk drifts, so
only settings that were measured in the same seconds can be compared. Exhaustive: every setting once, then the same
finish.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .space import DIMENSIONS, Setting, Space

Measure = Callable[[Setting], Mapping[str, float]]  # GB/s by direction
Tell = Callable[[float, str], None]
FINALISTS = 3
SHARE_OF_CLIMB = 0.65  # of the time goes to the first part; the rest is for the finalists
MARGIN = 1.02  # a change must be better by this factor, which is more than the noise of one trial


@dataclass
class Found:
    """The outcome: the best setting, its GB/s (medians), and every measurement."""

    best: Setting
    speeds: dict[str, float]
    trials: dict[Setting, list[Mapping[str, float]]]
    seconds: float

    def score(self, setting: Setting) -> float:
        """The median over the trials of the sum of both directions."""
        return statistics.median(sum(t.values()) for t in self.trials[setting])


@dataclass
class _Search:
    measure: Measure
    budget: float  # seconds
    tell: Tell
    clock: Callable[[], float]
    trials: dict[Setting, list[Mapping[str, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.longest = 0.0

    def spent(self) -> float:
        return self.clock() - self.started

    def room(self, until: float) -> bool:
        """Whether one more trial would end in time."""
        return self.spent() + self.longest <= until

    def trial(self, setting: Setting) -> float:
        begun = self.clock()
        speeds = dict(self.measure(setting))
        self.longest = max(self.longest, self.clock() - begun)
        self.trials.setdefault(setting, []).append(speeds)
        self.tell(min(1.0, self.spent() / self.budget), f"{setting.name}: {sum(speeds.values()):.2f}")
        return sum(speeds.values())

    def score(self, setting: Setting) -> float:
        return statistics.median(sum(t.values()) for t in self.trials[setting])

    def finish(self) -> Found:
        finalists = sorted(self.trials, key=self.score, reverse=True)[:FINALISTS]
        while len(finalists) > 1 and self.room(self.budget):
            for setting in finalists:
                if self.room(self.budget):
                    self.trial(setting)
        best = max(finalists, key=self.score)
        directions = self.trials[best][0]
        speeds = {d: statistics.median(t[d] for t in self.trials[best]) for d in directions}
        return Found(best, speeds, self.trials, self.spent())


def guided(
    space: Space,
    measure: Measure,
    *,
    start: Setting,
    budget: float,
    tell: Tell,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Climb from `start` for at most `budget` seconds (the first trial is made in any case)."""
    search = _Search(measure, budget, tell, clock)
    best = space.nearest(start)
    search.trial(best)
    climbing = budget * SHARE_OF_CLIMB
    changed = True
    while changed and search.room(climbing):
        changed = False
        for dimension in DIMENSIONS:
            rivals = [replace(best, **{dimension: v}) for v in space.values[dimension] if v != getattr(best, dimension)]
            rivals = [r for r in rivals if r not in search.trials]
            if not rivals or not search.room(climbing):
                continue
            here = max(search.trial(best), search.score(best))  # again, in the same seconds as the other values
            scores = {r: search.trial(r) for r in rivals if search.room(climbing)}
            if scores and max(scores.values()) > here * MARGIN:
                best, changed = max(scores, key=lambda r: scores[r]), True
    return search.finish()


def exhaustive(
    space: Space, measure: Measure, *, finish_seconds: float, tell: Tell, clock: Callable[[], float] = time.perf_counter
) -> Found:
    """Every setting of the space, then the finalists for `finish_seconds`."""
    search = _Search(measure, float("inf"), tell, clock)
    points = space.all()
    for number, setting in enumerate(points):
        search.trial(setting)
        tell((number + 1) / len(points), setting.name)
    search.budget = search.spent() + finish_seconds
    return search.finish()
