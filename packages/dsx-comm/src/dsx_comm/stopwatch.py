"""How long a call takes on this machine, for gates that measure before they decide."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["shortest_time"]

_REPEATS = 3


def shortest_time(call: Callable[[], Any], device: torch.device, together: Callable[[], Any]) -> float:
    """The shortest of a few runs, in seconds, after one that does not count; ranks meet in `together` before each."""
    times = []
    for _ in range(_REPEATS + 1):
        together()
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
