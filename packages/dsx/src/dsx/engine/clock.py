"""Measures the parts of a step: ranges named forward, backward and step.

`NoClock` measures nothing. `dsx_monitor.WallClock` has the same methods and measures: on CUDA it records events and
reads them after they have happened, so that timing never waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NOTHING = nullcontext()


class Clock(Protocol):
    """Times the parts of a step."""

    def range(self, name: str) -> AbstractContextManager[object]: ...

    def elapsed(self) -> list[tuple[str, float]]: ...


class NoClock:
    """Measures nothing."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """A context that does nothing; the same one each time."""
        return _NOTHING

    def elapsed(self) -> list[tuple[str, float]]:
        """Returns no figures."""
        return []
