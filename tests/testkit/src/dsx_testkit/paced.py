"""Links of a known speed and computation of a known length, so that overlap can be tested where there is neither.

The idea: a transfer over a `PacedLink` ends when the bytes would have arrived, and transfers of one link take turns, as
on a wire. `SleepingLinear` spends a given time in forward and in backward without using a core. Two ranks that share
two cores then show the overlap that a schedule allows, not what the machine's cores allow. What it leaves out:
bandwidth that depends on the message size.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

__all__ = ["PacedLink", "PacedTransfer", "SleepingLinear"]


class PacedTransfer:
    """One transfer under way; like a `Work`, it is waited for."""

    def __init__(self, due: float) -> None:
        self._due = due

    def is_completed(self) -> bool:
        """Whether the last byte has arrived."""
        return time.perf_counter() >= self._due

    def wait(self) -> None:
        """Return when the last byte has arrived. Waiting again does nothing."""
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class PacedLink:
    """A link that carries one transfer after the other.

    Args:
        bytes_per_second: bandwidth, above 0.
        latency_s: seconds from the last byte sent to its arrival; does not occupy the link.
    """

    def __init__(self, bytes_per_second: float, latency_s: float = 0.0) -> None:
        if bytes_per_second <= 0 or latency_s < 0:
            raise ValueError(
                f"got {bytes_per_second} bytes/s, {latency_s} s; expected a rate above 0 and a latency from 0"
            )
        self.bytes_per_second, self.latency_s = bytes_per_second, latency_s
        self.bytes = 0
        """Bytes of all transfers so far."""
        self.transfers = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def busy_s(self) -> float:
        """Seconds in which the link has carried something, those ahead included."""
        return self.bytes / self.bytes_per_second

    def start(self, nbytes: int) -> PacedTransfer:
        """Begin a transfer behind those under way and return at once."""
        with self._lock:
            begin = max(time.perf_counter(), self._free_at)
            self._free_at = begin + nbytes / self.bytes_per_second
            self.bytes += nbytes
            self.transfers += 1
            return PacedTransfer(self._free_at + self.latency_s)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> PacedTransfer:
        """Copy now, and say when the copy would have arrived: who reads earlier reads what a real link had not
        brought.
        """
        target.copy_(source)
        return self.start(source.numel() * source.element_size())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SleepingLinear(nn.Linear):
    """A square linear layer that also sleeps: `forward_s` in forward and `backward_s` (default: twice that) in
    backward.
    """

    def __init__(self, features: int, forward_s: float, backward_s: float | None = None) -> None:
        super().__init__(features, features)
        self.forward_s = forward_s
        self.backward_s = 2 * forward_s if backward_s is None else backward_s

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Sleep, then multiply."""
        return super().forward(_Sleep.apply(input, self.forward_s, self.backward_s))
