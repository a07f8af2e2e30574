"""On a CUDA device the collectives of a model follow each other.

Gathers and reductions use communicators and streams of their own. Where only one collective fits on the device at a
time, two ranks that began with different ones would wait for each other for ever.

All ranks issue the gathers and reductions in one order (`order`). So it is enough that each one waits on the device for
the one that was issued before it. The host waits for nothing, computation goes on meanwhile, and so do the copies that
bring shards to the device.
"""

from __future__ import annotations

import torch
from dsx_comm.lanes import Pending
from dsx_core.device import Device

from ..params.flat import FlatGroup
from .protocol import ReduceTransport, Then, Transport

__all__ = ["InTurn", "ReducesInTurn", "Turns"]


class Turns:
    """The order in which a device does the collectives of one model."""

    def __init__(self) -> None:
        self._last: torch.Event | None = None

    def begin(self, device: torch.device) -> None:
        """Let the current stream wait for the end of the collective before."""
        Device.of(device).wait_for(self._last)

    def end(self, device: torch.device) -> None:
        """The current stream has waited for the collective that began last."""
        self._last = Device.of(device).event()


class InTurn:
    """A transport whose messages take their turn. It runs on lanes of a CUDA device, which wait for what `start`
    returns as soon as it is issued.
    """

    def __init__(self, inner: Transport, turns: Turns) -> None:
        self._inner, self._turns = inner, turns

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        turns, device = self._turns, group.key.device
        turns.begin(device)
        pending = self._inner.start(out, source, group, label)
        return Then([pending], lambda: turns.end(device))

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return self._inner.tensors()


class ReducesInTurn(InTurn):
    """The same for gradients."""

    def __init__(self, inner: ReduceTransport, turns: Turns) -> None:
        super().__init__(inner, turns)
        self._reduces = inner

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return self._reduces.result_dtype(source, group)
