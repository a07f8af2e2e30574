"""A clock for two uses: a range that an engine marks once is measured by the wall clock, and is a span in the trace if
a trace is being taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .timeline import Timeline
from .timers import WallClock

__all__ = ["TracedClock"]


class TracedClock(WallClock):
    """A `WallClock` whose ranges are also spans in the lane "compute" of `timeline`, while a timeline is set."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__(device)
        self.timeline: Timeline | None = None

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Like `WallClock.range`, and also a span."""
        if self.timeline is None:
            with super().range(name):
                yield
        else:
            with self.timeline.range(name), super().range(name):
                yield
