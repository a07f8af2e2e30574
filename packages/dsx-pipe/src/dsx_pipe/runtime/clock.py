"""Measures when computations begin and end: on the host's clock, or on the device's if the host only issues them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from ..schedule import Action


class Clock(Protocol):
    """Takes marks while a step runs, and turns them into seconds after the step."""

    def mark(self, action: Action | None = None) -> Any:
        """Mark this moment. `action` is given when it begins; the mark of its end has none."""
        ...

    def seconds(self, mark: Any) -> float:
        """The time of a mark in seconds on the host's clock (`time.perf_counter`)."""
        ...


class HostClock:
    """A clock for computations that have ended when their call returns."""

    def mark(self, action: Action | None = None) -> float:
        """The current time in seconds."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """The mark itself, which is a time already."""
        return mark


class DeviceClock:
    """A clock for CUDA. A mark is an event in the current stream; nothing waits for it until `seconds` is called."""

    def __init__(self) -> None:
        self._first, self._host = self.mark(), time.perf_counter()

    def mark(self, action: Action | None = None) -> Any:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """The time at which the device reached the event, in seconds. Waits for the device."""
        mark.synchronize()
        return self._host + self._first.elapsed_time(mark) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of computations on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
