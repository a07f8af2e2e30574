"""One clock in front of several: the engine marks a range once, the wall clock and the timeline both have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .timeline import Timeline
from .timers import WallClock

__all__ = ["TracedClock"]


class TracedClock(WallClock):
    """A `WallClock` whose ranges also become spans of a `Timeline`.

    Args:
        device: as for `WallClock`.
        timeline: gets every range, in the lane "compute".
    """

    def __init__(self, device: Any, timeline: Timeline) -> None:
        super().__init__(device)
        self._timeline = timeline

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """As `WallClock.range`, and a span."""
        with self._timeline.range(name), super().range(name):
            yield
