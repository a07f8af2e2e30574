"""A device of a known size, made of host memory: what is placed on it is counted, and copies to it are paced.

Offload is about bytes: what lies where, how much at most, how much crosses the link. On a machine without a device the
arena stands for one. Tensors made by `empty` and `to_device` count until their storage is gone, whoever holds it;
more than `capacity` is an error, as on a device. Copies go over two `PacedLink`s, one per direction, and add up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from .paced import PacedLink, PacedTransfer

__all__ = ["ArenaFullError", "DeviceArena"]


class ArenaFullError(RuntimeError):
    """The arena has no room for what was asked for."""


class DeviceArena:
    """See the module's text.

    Args:
        capacity: bytes it can hold; None: as much as asked for.
        bytes_per_second: speed of the links to and from the host; None: copies take no time beyond their own.
    """

    def __init__(self, capacity: int | None = None, bytes_per_second: float | None = None) -> None:
        self.capacity = capacity
        self.in_use = 0
        """Bytes of the tensors that are alive."""
        self.peak = 0
        rate = bytes_per_second or 1e15
        self.to_device_link, self.to_host_link = PacedLink(rate), PacedLink(rate)

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor on the arena.

        Raises:
            ArenaFullError: it does not fit; nothing has changed.
        """
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        nbytes = size.numel() * dtype.itemsize
        if self.capacity is not None and self.in_use + nbytes > self.capacity:
            raise ArenaFullError(f"{nbytes} bytes asked for, {self.in_use} of {self.capacity} in use")
        tensor = torch.empty(size, dtype=dtype)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        weakref.finalize(tensor.untyped_storage(), self._give_back, nbytes)
        return tensor

    def to_device(self, source: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, PacedTransfer]:
        """Copy a host tensor onto the arena, into `out` or a new tensor; the transfer is to be waited for."""
        target = self.empty(source.shape, source.dtype) if out is None else out
        return target, self.to_device_link.copy(target, source)

    def to_host(self, source: torch.Tensor, out: torch.Tensor) -> PacedTransfer:
        """Copy a tensor of the arena into host memory; the transfer is to be waited for."""
        return self.to_host_link.copy(out, source)

    def reset_peak(self) -> None:
        """Let `peak` begin at what is in use now."""
        self.peak = self.in_use

    def _give_back(self, nbytes: int) -> None:
        self.in_use -= nbytes
