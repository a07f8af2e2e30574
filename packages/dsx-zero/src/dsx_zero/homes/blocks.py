"""Blocks of host memory that are used again, for what is read from a disk and what a step makes of it.

New memory costs more than reading into it: the kernel clears each page that is touched for the first time, and torch's
blocks begin 64 bytes behind a page, where a disk that is read past the page cache cannot write without another copy.
Here blocks are whole pages, and the next sub-group, or the next step, gets those that an earlier one has left.

Nobody gives a block back. It comes back when the last tensor over it is gone, whoever had it: a transfer, a value that
waits to be written, a state that an optimizer keeps. So a block is never in two hands. A copy to a device goes on when
the tensor is gone: `keep_until` holds it.

*Bound.* Idle blocks make room before a new one is mapped: there are never more bytes than were in use at one time.
A block is used for what is smaller by less than 2 %, so that this holds of locked bytes, too.

Left out: blocks below 128 KiB, which are torch's, and memory that stays as long as a model (`pinned`).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import Any

import torch

from .pinned import lock_pages, mapped, unlock_idle

__all__ = ["HostBlocks"]

_LEAST = 128 << 10
"""Bytes from which on memory is a block of pages. What is smaller costs little."""

_FITS = 64
"""A block may be larger than what is asked for by this part of it."""


class _Block:
    """Whole pages."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.region = mapped(nbytes)
        self.nbytes, self.pin = nbytes, pin
        self._unlock = lock_pages(self.region, self) if pin else None

    def close(self) -> None:
        """Nobody uses it, no copy either: unlock its pages."""
        if self._unlock is not None:
            unlock_idle(self._unlock)


class HostBlocks:
    """Host memory in blocks. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Block] = []  # the ones that were let go first come first
        self._returned: deque[_Block] = deque()
        """Blocks whose tensors are gone. Filled wherever a tensor ends, also inside of the lock: by `append` alone."""
        self._kept: list[tuple[Any, torch.Tensor]] = []
        """Tensors that the copies before these events read."""
        self._in_use = self._most = 0

    def __reduce__(self) -> Any:
        """Another process begins with none."""
        return HostBlocks, ()

    def empty(self, numel: int, dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
        """A 1-D tensor with arbitrary values, which begins at a page if it is large; `pin`: its pages are locked.

        Raises:
            RuntimeError: the memory, or locking its pages, is refused.
        """
        nbytes = numel * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)
        with self._lock:
            block = self._take(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, pin)
        memory = memoryview(block.region)
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def converted(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """1-D `values` in host memory in this dtype: themselves, or in a block."""
        return values if values.dtype == dtype else self.empty(values.numel(), dtype).copy_(values)

    def keep_until(self, event: Any, tensor: torch.Tensor) -> None:
        """A copy that `event` is behind reads `tensor`: keep it until then."""
        with self._lock:
            self._kept.append((event, tensor))

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in self._idle)

    def drop(self) -> None:
        """Give idle blocks back to the system, and forget how much was in use."""
        with self._lock:
            self._collect()
            while self._idle:
                self._idle.pop().close()
            self._most = self._in_use

    def _take(self, size: int, pin: bool) -> _Block:
        self._collect()
        fitting = [
            place
            for place, one in enumerate(self._idle)
            if size <= one.nbytes <= size + size // _FITS and one.pin == pin
        ]
        if fitting:
            block = self._idle.pop(min(fitting, key=lambda place: self._idle[place].nbytes))
        else:
            kept = sum(block.nbytes for block in self._idle)
            while self._idle and self._in_use + kept + size > self._most:
                dropped = self._idle.pop(0)
                kept -= dropped.nbytes
                dropped.close()
            block = _Block(size, pin=pin)
        self._in_use += block.nbytes
        self._most = max(self._most, self._in_use)
        return block

    def _collect(self) -> None:
        if self._kept:
            self._kept = [(event, tensor) for event, tensor in self._kept if not event.query()]
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= block.nbytes
            self._idle.append(block)
