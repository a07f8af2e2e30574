"""Curves of a run in bounded memory: long ones are thinned while they are read.

Of each stretch of points the lowest and the highest are kept, and the first and the last one that is not finite. When a
curve is full, its stretches are doubled. The lowest of the lowest is that of the longer stretch, so nothing is lost by
doing it again and again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import groupby

__all__ = ["Curve", "Pieces"]

_MOST_KEPT = 16384


@dataclass
class Curve:
    """Values over steps (samples). `times` are seconds since 1970, empty if unknown.

    Attributes:
        numbers: the number of each point that is kept, counted from 0 in the order in which points were added.
        count: points that were added.
        stretch: of so many points, as they were added, extremes are kept.
    """

    label: str
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    count: int = 0
    stretch: int = 1

    def add(self, step: float, value: float, time: float | None = None) -> None:
        """Append one point."""
        self.steps.append(step)
        self.values.append(value)
        if time is not None:
            self.times.append(time)
        self.numbers.append(self.count)
        self.count += 1
        if len(self.steps) > _MOST_KEPT:
            self._thin()

    def thinned(self, most: int) -> list[int]:
        """Places of the points to draw: all, or about `most`, among them the first, the last and all extremes."""
        if self.count <= most:
            return list(range(self.count))
        wanted = math.ceil(self.count / (most // 2))
        # Complete stretches of those that are kept: the extremes of half a stretch are not known.
        return self._extremes(math.ceil(wanted / self.stretch) * self.stretch)

    def _thin(self) -> None:
        kept = self._extremes(self.stretch)
        while len(kept) > _MOST_KEPT // 2:
            self.stretch *= 2
            kept = self._extremes(self.stretch)
        has_times = len(self.times) == len(self.steps)
        self.times = [self.times[i] for i in kept] if has_times else []
        self.steps, self.values = [self.steps[i] for i in kept], [self.values[i] for i in kept]
        self.numbers = [self.numbers[i] for i in kept]

    def _extremes(self, stretch: int) -> list[int]:
        """Places of the first and the last point, and of the extremes of each stretch of points as they were added."""
        kept = {0, len(self.values) - 1}
        for _, places in groupby(range(len(self.values)), lambda i: self.numbers[i] // stretch):
            block = list(places)
            finite = [i for i in block if math.isfinite(self.values[i])]
            if finite:
                kept |= {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
            if len(finite) < len(block):
                other = [i for i in block if not math.isfinite(self.values[i])]
                kept |= {other[0], other[-1]}
        return sorted(kept)


class Pieces:
    """A curve cut where its steps go back behind a new start of the run.

    A resumed run goes on upwards and is one piece. Without times, or without starts, nothing is cut.

    Args:
        label: of the curve.
        starts: times of the run's starts, ascending.
    """

    def __init__(self, label: str, starts: list[float]) -> None:
        self.label = label
        self.runs: list[tuple[int, Curve]] = []
        """The number of its start (from 1) and the curve, for each piece."""
        self._starts, self._before = starts if len(starts) > 1 else [], 1

    def add(self, step: float, value: float, time: float | None = None) -> None:
        """Append one point."""
        start = 1 if time is None else max(1, bisect_right(self._starts, time))
        if not self.runs or (step < self.runs[-1][1].steps[-1] and start != self._before):
            self.runs.append((start, Curve(self.label)))
        self.runs[-1][1].add(step, value, time)
        self._before = start
