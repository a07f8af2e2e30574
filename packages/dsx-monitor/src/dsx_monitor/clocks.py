"""One clock in front of two: a range that an engine marks once is in the wall clock and in a trace, if one is
running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .timeline import Timeline
from .timers import WallClock

__all__ = ["TracedClock"]


class TracedClock(WallClock):
    """A `WallClock` whose ranges also become spans of `timeline`, in the lane "compute", while one is set."""

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
