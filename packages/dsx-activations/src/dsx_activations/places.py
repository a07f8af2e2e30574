"""The memory that keeps inputs between forward and backward.

A *place* takes a flat tensor and returns a `Held`, which gives the tensor back on its device. `DevicePlace` keeps the
tensor, `SlotPlace` copies it into a buffer with a fixed number of slots, `HostPlace` copies it into host memory on a
lane, and back while the next checkpoint of the model is recomputed.

A slot is free again when its `Held` is garbage-collected. So a slot is never freed twice or too early, even with
retained graphs and with graphs that are never differentiated.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from dsx_comm.lanes import HostLane, Lane, Ticket, make_lane

from .errors import ActivationStateError

__all__ = [
    "DevicePlace", "Held", "HostCopy", "HostPlace", "Place", "SlotPlace", "Slots", "changed_in_place", "host_memory",
]  # fmt: skip


def changed_in_place(shape: torch.Size) -> ActivationStateError:
    """The error for a kept input that was written to before the backward."""
    return ActivationStateError(
        f"checkpoint(): an input of shape {tuple(shape)} was changed in place after the forward pass, so that the"
        " recomputation would see other values; change a copy (x = x + y in the place of x += y)"
    )


_log = logging.getLogger("dsx_activations")


class Held(Protocol):
    """A tensor in a place."""

    def get(self) -> torch.Tensor:
        """The flat tensor on its device, to be read only."""
        ...


class Place(Protocol):
    """Memory that keeps the input of a checkpoint between forward and backward."""

    def put(self, flat: torch.Tensor) -> Held:
        """Keep a flat tensor. It must not be written to as long as it is held."""
        ...

    def moves(self, tensor: torch.Tensor) -> bool:
        """Does it copy this tensor rather than keep it?"""
        ...

    def begin(self) -> None:
        """Say that a checkpoint begins. The backward needs all tensors of one checkpoint at the same time."""
        ...

    def reset(self) -> None:
        """Release buffers that are kept for later use."""
        ...


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get(self) -> torch.Tensor:
        return self._tensor


class DevicePlace:
    """Keeps tensors as they are."""

    def put(self, flat: torch.Tensor) -> Held:
        """See `Place`."""
        return _Kept(flat)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Returns False."""
        return False

    def begin(self) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """Does nothing: there are no buffers."""


class Slots:
    """Buffers of `number` equal slots, one buffer for each size, dtype and device that is asked for.

    Args:
        make: allocates a buffer: (elements, dtype, device).
    """

    def __init__(self, number: int, make: Callable[[int, torch.dtype, torch.device], torch.Tensor]) -> None:
        self._number, self._make = number, make
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._warned = False

    def take(self, owner: object, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A slot that belongs to `owner` until `owner` is garbage-collected. If all slots are taken, new memory; the
        first time with a warning.
        """
        key = (numel, dtype, device)
        if key not in self._free:
            buffer = self._make(numel * self._number, dtype, device)
            self._free[key] = list(buffer.view(self._number, numel))
        free = self._free[key]
        if not free:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "number_checkpoints: got %d, and more checkpointed inputs of %d elements are alive at a time; the"
                    " others get memory of their own. Raise it to the number of checkpoints of a forward pass",
                    self._number, numel,
                )  # fmt: skip
            return self._make(numel, dtype, device)
        slot = free.pop()
        weakref.finalize(owner, free.append, slot).atexit = False
        return slot

    def reset(self) -> None:
        """Release the buffers. Slots in use keep their contents."""
        self._free = {}


class SlotPlace:
    """Copies into slots on the same device."""

    def __init__(self, number: int) -> None:
        self._slots = Slots(number, lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device))

    def put(self, flat: torch.Tensor) -> Held:
        """See `Place`."""
        held = _InSlot()
        held.slot = self._slots.take(held, flat.numel(), flat.dtype, flat.device)
        held.slot.copy_(flat)
        return held

    def moves(self, tensor: torch.Tensor) -> bool:
        """Returns True."""
        return True

    def begin(self) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """See `Place`."""
        self._slots.reset()


class _InSlot:
    slot: torch.Tensor

    def get(self) -> torch.Tensor:
        return self.slot


class _Batch:
    """The tensors of one checkpoint, and the batch of the checkpoint before it, which the backward needs next."""

    def __init__(self, before: _Batch | None) -> None:
        self.held: list[weakref.ref[_OnHost]] = []
        self.before = None if before is None else weakref.ref(before)

    def fetch(self) -> None:
        """Start copying the tensors back that are still needed."""
        for known in self.held:
            if (held := known()) is not None:
                held.start()


class HostCopy:
    """A device tensor that is copied into host memory on a lane, and back when it is wanted again.

    Args:
        source: the tensor. It must not be written to before `let_go`.
        host: where it is copied to, as large.
        lane: where copies run.
    """

    def __init__(self, source: torch.Tensor, host: torch.Tensor, lane: Lane) -> None:
        self._source: torch.Tensor | None = source
        self._device, self.host, self._lane = source.device, host, lane
        self._back: tuple[torch.Tensor, Ticket] | None = None
        lane.see_writes_so_far()
        self._leaving = lane.submit(lambda: _copy(host, source))

    def let_go(self) -> None:
        """Free the device's copy. Work that the caller queues later waits for the copy, so that it can use the memory
        again.
        """
        if self._source is not None:
            self._leaving.wait()
            self._source = None

    def start(self) -> None:
        """Start copying the tensor back, unless it is still on the device or already on its way."""
        if self._source is not None or self._back is not None:
            return
        out, host = torch.empty(self.host.shape, dtype=self.host.dtype, device=self._device), self.host
        self._lane.see_writes_so_far()  # the memory of `out` may have had another user on the caller's side
        self._back = (out, self._lane.submit(lambda: _copy(out, host)))

    def take(self) -> torch.Tensor:
        """The tensor on its device, to be read only."""
        if self._source is not None:
            self._leaving.wait()
            return self._source
        self.start()
        (out, ticket), self._back = self._arriving(), None
        ticket.wait()
        return out

    def _arriving(self) -> tuple[torch.Tensor, Ticket]:
        if self._back is None:
            raise RuntimeError("a copy from host memory was taken before it was started")
        return self._back

    def __del__(self) -> None:
        if self._back is not None:
            self._back[1].wait()  # the lane may still write into the memory that is about to be freed


class _OnHost(HostCopy):
    """An input of a checkpoint, which must not be changed in place until the backward."""

    def __init__(self, source: torch.Tensor, host: torch.Tensor, lane: Lane, batch: _Batch) -> None:
        self._version, self._changed, self._batch = source._version, False, batch
        super().__init__(source, host, lane)
        batch.held.append(weakref.ref(self))

    def let_go(self) -> None:
        """See `HostCopy`."""
        if self._source is not None:
            self._changed = self._source._version != self._version
        super().let_go()

    def get(self) -> torch.Tensor:
        self._batch.fetch()
        before = self._batch.before
        if before is not None and (batch := before()) is not None:
            batch.fetch()
        source = self._source
        if self._changed or (source is not None and source._version != self._version):
            raise changed_in_place(self.host.shape)
        return self.take()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class HostPlace:
    """Copies into host memory, page-locked for CUDA tensors, and back.

    Copies out run beside the computation of the next checkpoint; the device keeps the inputs of the latest two until
    then. In the backward the inputs of one checkpoint come back while the one after it is recomputed and
    differentiated. Host tensors are in host memory already and are kept as they are, unless a lane is given.

    Args:
        number: slots to copy into; None: new memory for each.
        lane: where copies run; None: a lane for each device.
    """

    def __init__(self, number: int | None = None, lane: Lane | None = None) -> None:
        self._slots = None if number is None else Slots(number, host_memory)
        self._given, self._lanes = lane, {}
        self._leaving: deque[list[weakref.ref[_OnHost]]] = deque()
        self._batch = _Batch(None)
        self._stays: Place = DevicePlace() if number is None else SlotPlace(number)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Returns False for host tensors, unless a lane was given or they stand for a device's (a plan)."""
        return not self._is_host(tensor.device) or self._stays.moves(tensor)

    def begin(self) -> None:
        """See `Place`."""
        self._batch = _Batch(self._batch)
        self._leaving.append(self._batch.held)
        while len(self._leaving) > 2:
            for known in self._leaving.popleft():
                if (held := known()) is not None:
                    held.let_go()

    def put(self, flat: torch.Tensor) -> Held:
        """See `Place`."""
        if self._is_host(flat.device):
            return self._stays.put(flat)
        if self._slots is None:
            return _OnHost(
                flat, host_memory(flat.numel(), flat.dtype, flat.device), self._lane(flat.device), self._batch
            )
        held = _InHostSlot()
        slot = self._slots.take(held, flat.numel(), flat.dtype, flat.device)
        held.inner = _OnHost(flat, slot, self._lane(flat.device), self._batch)
        return held

    def reset(self) -> None:
        """See `Place`."""
        self._leaving.clear()
        self._batch = _Batch(None)
        self._stays.reset()
        if self._slots is not None:
            self._slots.reset()

    def _is_host(self, device: torch.device) -> bool:
        """Whether memory of this device is in its place already. In a plan host tensors stand for a device's, and have
        its lane.
        """
        return device.type == "cpu" and self._given is None and isinstance(self._lane(device), HostLane)

    def _lane(self, device: torch.device) -> Lane:
        if self._given is not None:
            return self._given
        if device not in self._lanes:
            self._lanes[device] = make_lane(device)
        return self._lanes[device]


class _InHostSlot:
    """Owns a slot as long as it lives."""

    inner: _OnHost

    def get(self) -> torch.Tensor:
        return self.inner.get()


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host for a flat tensor of a device, page-locked for CUDA."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda", device="cpu")
