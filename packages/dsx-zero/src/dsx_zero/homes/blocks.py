"""Blocks of host memory that are used again, for what a step reads from a disk and makes of it.

New memory costs more than reading into it: the kernel clears each page that is touched for the first time, and torch's
blocks begin 64 bytes behind a page, where a disk that is read past the page cache cannot write without another copy.
Here blocks are whole pages, and the next sub-group, or the next step, gets those that an earlier one has left.

Nobody gives a block back. It comes back when the last tensor over it is gone, whoever had it: a transfer, a value that
waits to be written, a state that an optimizer keeps. So a block is never in two hands.

*Bound.* Idle blocks make room before a new one is mapped: there are never more bytes than were in use at one time.

Left out: page-locked memory (`pinned`), and blocks below 128 KiB, which are torch's.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import torch

__all__ = ["HostBlocks"]

_LEAST = 128 << 10
"""Bytes from which on memory is a block of pages. What is smaller costs little."""

_FITS = 4
"""A block may be larger than what is asked for by this part of it (a quarter)."""


class HostBlocks:
    """Host memory in blocks. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []  # the ones that were let go first come first
        self._returned: deque[mmap.mmap] = deque()
        """Blocks whose tensors are gone. Filled wherever a tensor ends, also inside of the lock: by `append` alone."""
        self._in_use = self._most = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with arbitrary values, which begins at a page if it is large.

        Raises:
            OSError: the memory is refused.
        """
        nbytes = numel * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(numel, dtype=dtype, device="cpu")
        with self._lock:
            block = self._take(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        memory = memoryview(block)
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def converted(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """1-D `values` in host memory in this dtype: themselves, or in a block."""
        return values if values.dtype == dtype else self.empty(values.numel(), dtype).copy_(values)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def drop(self) -> None:
        """Give idle blocks back to the system, and forget how much was in use."""
        with self._lock:
            self._collect()
            self._idle.clear()
            self._most = self._in_use

    def _take(self, size: int) -> mmap.mmap:
        self._collect()
        fitting = [place for place, block in enumerate(self._idle) if size <= len(block) <= size + size // _FITS]
        if fitting:
            block = self._idle.pop(min(fitting, key=lambda place: len(self._idle[place])))
        else:
            kept = sum(map(len, self._idle))
            while self._idle and self._in_use + kept + size > self._most:
                kept -= len(self._idle.pop(0))
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._in_use += len(block)
        self._most = max(self._most, self._in_use)
        return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= len(block)
            self._idle.append(block)
