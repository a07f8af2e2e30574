"""One clock in front of two: an engine marks a range once, the wall clock and a trace that may be running both have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .timeline import Timeline
from .timers import WallClock

__all__ = ["TracedClock"]


class TracedClock(WallClock):
    """A `WallClock` whose ranges also become spans, in the lane "compute", of the `timeline` set at the time, if any."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__(device)
        self.timeline: Timeline | None = None

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """As `WallClock.range`, and a span."""
        if self.timeline is None:
            with super().range(name):
                yield
        else:
            with self.timeline.range(name), super().range(name):
                yield
