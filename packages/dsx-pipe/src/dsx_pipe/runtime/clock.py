"""When computations begin and end: by the host's clock, or by the device's if the host only issues them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from ..schedule import Action


class Clock(Protocol):
    """Takes marks while a step runs, and turns them into seconds behind it."""

    def mark(self, action: Action | None = None) -> Any:
        """This moment: an action begins, or, the second time, it has ended."""
        ...

    def seconds(self, mark: Any) -> float:
        """The moment of a mark on the host's clock (`time.perf_counter`)."""
        ...


class HostClock:
    """For computations that are done when their call returns."""

    def mark(self, action: Action | None = None) -> float:
        """This moment."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class DeviceClock:
    """For CUDA: a mark is an event in the current stream, which nothing waits for until `seconds` is asked."""

    def __init__(self) -> None:
        self._first, self._host = self.mark(), time.perf_counter()

    def mark(self, action: Action | None = None) -> Any:
        """This place in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """When the device came to it; waits for the device."""
        mark.synchronize()
        return self._host + self._first.elapsed_time(mark) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of computations on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
