"""Measures when computations begin and end: on the host's clock, or on the device's if the host only issues them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from dsx_core.device import Device, Mark

from ..schedule import Action


class Clock(Protocol):
    """Takes marks while a step runs, and turns them into seconds after the step."""

    def mark(self, action: Action | None = None) -> Any:
        """Mark this moment. `action` is given when it begins; the mark of its end has none."""
        ...

    def seconds(self, mark: Any) -> float:
        """The time of a mark in seconds on the host's clock (`time.perf_counter`)."""
        ...


class DeviceClock:
    """The clock of computations on a device. A mark on an accelerator is an event in the current stream; nothing waits
    for it until `seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = Device.of(device)
        self._first = self._device.mark()
        self._host = self._first if isinstance(self._first, float) else time.perf_counter()

    def mark(self, action: Action | None = None) -> Mark:
        """Mark this moment."""
        return self._device.mark()

    def seconds(self, mark: Mark) -> float:
        """The time at which the device reached the mark, in seconds. Waits for the device."""
        return self._host + self._device.milliseconds(self._first, mark) / 1e3
