"""Gradients on their way from a device to a place that its copies cannot reach: pages that are not locked, a store on
disk.

A copy from a device into such a place makes the thread wait that asks for it. In the middle of backward that would
empty the device's queue, once per unit. Here a thread of its own waits. Values travel in pieces through two small
page-locked buffers: while the device fills one, the thread copies or adds the other one. So a sum over micro-batches
crosses the link once, and the host adds it. Where sums are on a disk, the next one is read and the last one is written
while the thread adds one.

The device keeps values until they have arrived. Training waits for the oldest ones only if more than two, with more
than `_MOST_WAITING` bytes, are under way: the link or the host's addition is slower than backward then.

Left out: the way from the host to a device, for which CUDA copies unlocked pages aside before it goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from dsx_comm.lanes import Lane, Pending, Ticket, is_done, told
from dsx_core.device import Device

from ..worker import Worker
from .home import Home
from .pinned import locked_empty

__all__ = ["THREAD", "FilledByThread", "Ring"]

THREAD = "dsx-zero-gradients"
"""The name of the thread."""

_PIECE, _PIECES = 8 << 20, 2
"""Bytes of a buffer, and how many there are."""

_MOST_WAITING = 64 << 20
"""Bytes of values that may be under way, if they are more than two units'."""


@runtime_checkable
class FilledByThread(Protocol):
    """A home that another thread can fill with values from a device."""

    @property
    def holds_up_copies(self) -> bool:
        """Does a copy from a device to it make the host wait?"""
        ...

    def expect(self, ticket: Ticket) -> None:
        """A thread is going to fill it. From now on that counts as a write, and readers wait for the ticket."""
        ...

    def to_fill(self, *, add: bool) -> tuple[torch.Tensor, Pending | None]:
        """All elements in host memory, to be written; with `add` they have their values once the second part was waited
        for.
        """
        ...

    def filled(self, values: torch.Tensor) -> Pending | None:
        """The elements of `to_fill` are written. Returns what to wait for until the home has them."""
        ...


class Moved:
    """The ticket of a move. Whoever waits for it waits on the host."""

    def __init__(self) -> None:
        self._ended, self._one = threading.Event(), threading.Lock()
        self._rest: Pending | None = None
        self.failure: BaseException | None = None

    def end(self, failure: BaseException | None, rest: Pending | None = None) -> None:
        """The thread has done its part. A failure, of `rest` too, is raised in each thread that waits.

        Args:
            rest: what is under way still (the write to a disk).
        """
        self.failure, self._rest = failure, rest
        self._ended.set()

    def is_completed(self) -> bool:
        """See `Ticket`."""
        rest = self._rest
        return self._ended.is_set() and (rest is None or is_done(rest))

    def wait(self) -> None:
        """See `Ticket`."""
        self._ended.wait()
        with self._one:
            if self._rest is not None:
                try:
                    self._rest.wait()
                except BaseException as error:  # noqa: BLE001 (raised below, in each thread that waits)
                    self.failure = error
                self._rest = None
        if self.failure is not None:
            raise self.failure

    synchronize = wait


class Ring:
    """Carries values of one device to homes that its copies cannot reach. Moves end in the order of `move`.

    Args:
        device: where the values are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._worker = Device.of(device), Worker(device, THREAD)
        self._under_way: deque[tuple[Moved, int]] = deque()
        self._buffers: list[torch.Tensor] = []  # of the thread, as the stream
        self._stream: Any = None

    def carries(self, values: torch.Tensor, home: Home) -> TypeGuard[FilledByThread]:
        """Is a move by this ring what `values` need to get to `home` while the host goes on?"""
        return Device.of(values) == self._device and isinstance(home, FilledByThread) and home.holds_up_copies

    def move(
        self,
        values: torch.Tensor,
        home: FilledByThread,
        lane: Lane,
        *,
        add: bool,
        after: Ticket | None = None,
        seen: Callable[[torch.Tensor], object] | None = None,
    ) -> Moved:
        """Start to copy (with `add`: add) `values`, all elements of `home`, behind what the caller's stream has
        enqueued. The ring keeps `values` until then. Do not write to them.

        Args:
            lane: whose listener hears of it.
            after: the move before, of the values to which these are added: if it has failed, so does this one.
            seen: called in the thread with all elements, in host memory, when they are there.
        """
        while len(self._under_way) >= 2 and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        while len(self._under_way) > 2 and sum(size for _, size in self._under_way) > _MOST_WAITING:
            self._under_way.popleft()[0].wait()
        moved = Moved()
        home.expect(moved)
        given = None
        if add and (after is None or after.is_completed()):
            with suppress(OSError):  # of the move before: the thread will be told, too
                given = home.to_fill(add=True)  # read from a disk while the thread adds the sum before
        fill = partial(self._fill, values, home, self._device.event(), given, add=add, after=after, seen=seen)
        self._worker.submit(partial(_run, moved, told(lane, fill, "to host", values.nbytes)))
        self._under_way.append((moved, values.nbytes))
        return moved

    def _fill(
        self,
        values: torch.Tensor,
        home: FilledByThread,
        ready: Any,
        given: tuple[torch.Tensor, Pending | None] | None,
        *,
        add: bool,
        after: Ticket | None,
        seen: Callable[[torch.Tensor], object] | None,
    ) -> Pending | None:
        """Runs in the thread."""
        if add and after is not None:
            after.wait()
        stream, size = self._prepared(), _PIECE // values.dtype.itemsize
        arriving: deque[tuple[int, torch.Tensor, Any]] = deque()
        total, read = home.to_fill(add=add) if given is None else given
        if read is not None:
            read.wait()
        with self._device.on(stream):
            self._device.wait_for(ready)
            for number, start in enumerate(range(0, values.numel(), size)):
                if len(arriving) == _PIECES:
                    _land(total, *arriving.popleft(), add=add)
                piece = values[start : start + size]
                buffer = self._buffers[number % _PIECES].view(values.dtype)[: piece.numel()]
                buffer.copy_(piece, non_blocking=True)
                arriving.append((start, buffer, self._device.event()))
            while arriving:
                _land(total, *arriving.popleft(), add=add)
            if seen is not None:
                seen(total)
        return home.filled(total)

    def _prepared(self) -> Any:
        """The thread's stream. The buffers are made with it; where no page may be locked they are ordinary memory, and
        copies are slower.
        """
        if self._stream is None:
            self._stream = self._device.new_stream(priority=-1)
            for _ in range(_PIECES):
                try:
                    buffer = locked_empty(_PIECE, torch.uint8)
                except RuntimeError:
                    buffer = torch.empty(_PIECE, dtype=torch.uint8, device="cpu")
                self._buffers.append(buffer)
        return self._stream


def _land(total: torch.Tensor, start: int, buffer: torch.Tensor, arrived: Any, *, add: bool) -> None:
    """A piece is on the host when `arrived` has happened: put it where it belongs."""
    arrived.synchronize()
    place = total[start : start + buffer.numel()]
    if add:
        place.add_(buffer)
    else:
        place.copy_(buffer)


def _run(moved: Moved, job: Callable[[], Pending | None]) -> None:
    try:
        moved.end(None, job())
    except BaseException as error:  # noqa: BLE001 (raised in the threads that wait)
        moved.end(error)
