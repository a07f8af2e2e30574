"""Reduced gradients of one flat group on their way to a home in another tier, and their norm.

A reduction ends in staging memory on the device if the home is elsewhere. From there a lane copies or adds the values
to the home, or the thread of a `Ring`, if a copy would make the host wait. The norm is computed while the values are
at hand: on the device before they leave, or by what adds them up.

Left out: when a reduction ends, and who waits for the values (`buffers`).
"""

from __future__ import annotations

import torch
from dsx_comm.lanes import Lane, TensorBuffer, Ticket

from ..homes.home import DeviceHome, Home, HostHome, accumulate, block_norm
from ..homes.ring import Ring

__all__ = ["Leaving"]


class Leaving:
    """The last move of a group's reduced values from staging memory to their home.

    Args:
        device: where the gradients are reduced.
        lane: copies values to their home.
        ring: carries values to homes that make the host wait; None: there are none.
    """

    def __init__(self, device: torch.device, lane: Lane, ring: Ring | None) -> None:
        self._device, self._lane, self._ring = device, lane, ring
        self.ticket: Ticket | None = None
        """Of the move; None: there is nothing left to wait for."""
        self._staging: torch.Tensor | None = None
        """The staging memory, unless the ring has it."""
        self.norm: torch.Tensor | None = None
        """Norm of the values in the home, computed when they were moved; None: not known, or not yet."""
        self._norm_memory: torch.Tensor | None = None
        """The place of the value, if a job of the lane computes it: memory of this side, which stays."""

    def prepare(self, home: Home, dtype: torch.dtype) -> torch.Tensor:
        """Staging memory for a reduction whose result goes to `home`."""
        self.let_go(home)
        if self._norm_memory is None:
            wide = torch.promote_types(dtype, torch.float32)
            self._norm_memory = torch.empty((), dtype=wide, device=self._device)
        return torch.empty(home.numel, dtype=dtype, device=self._device)

    def start(self, home: Home, staging: torch.Tensor, *, add: bool) -> None:
        """The staged values are reduced: start to copy (or add) them to their home."""
        if self._ring is not None and self._ring.carries(staging, home):
            if not add:
                self._keep_norm(staging)
            seen = self._keep_norm if add else None
            self.ticket = self._ring.move(staging, home, self._lane, add=add, after=self.ticket, seen=seen)
            return
        if isinstance(home, DeviceHome) or (isinstance(home, HostHome) and staging.device.type == "cpu"):
            ticket = accumulate(home, staging, self._lane) if add else home.store(staging, self._lane)
        elif add:
            ticket = accumulate(home, staging, self._lane, seen=self._keep_norm)
        else:
            self._keep_norm(staging)
            ticket = home.store(staging, self._lane)
        self.ticket, self._staging = ticket, staging

    def let_go(self, home: Home | None) -> None:
        """Free the staging memory behind the move, as `wait` does. What the ring carries is not waited for."""
        if self._staging is not None:
            self.wait(home)

    def wait(self, home: Home | None) -> None:
        """Wait until the values are in their home, and free the staging memory. For a home in host memory only the
        stream waits, if a lane moves them: the home makes the host wait when it is read.
        """
        ticket, staging = self.ticket, self._staging
        self.ticket = self._staging = None
        if ticket is None:
            return
        if staging is None or not isinstance(home, HostHome):
            ticket.synchronize()
        else:
            ticket.wait()
        if staging is not None:
            self._lane.free_after_use(TensorBuffer(staging))

    def _keep_norm(self, values: torch.Tensor) -> None:
        """Compute the norm of all values before they leave for a home: later it would need another read, or a pass of
        the host over memory that a device has had at hand.
        """
        self.norm = block_norm(values, out=self._norm_memory if values.device == self._device else None)
