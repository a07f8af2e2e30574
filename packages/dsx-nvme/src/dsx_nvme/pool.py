"""Host buffers within a byte budget: one page-aligned arena, from which buffers are allocated first fit.

A request for more bytes than are free waits until a buffer is released; a request for more than the budget raises at
once. The arena is one mapping that never grows, so it is registered with the kernel once.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from . import memory
from .errors import BudgetError, OptionError
from .extents import FreeRanges
from .memory import Pin

ALIGN = 4096


class Buffer:
    """A buffer of a pool. Release it with `release()`, or use it as a context manager. Its first contents are
    undefined.
    """

    def __init__(self, pool: BufferPool, start: int, nbytes: int) -> None:
        self._pool, self.start, self.nbytes = pool, start, nbytes
        self._held = True

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The memory as a tensor: 1-D over all bytes, or of `shape` from the beginning.

        Do not use it after `release`.
        Raises `BudgetError` where it does not fit, and after `release`.
        """
        if not self._held:
            raise BudgetError("this buffer was given back to its pool; take a new one")
        numel = self.nbytes // dtype.itemsize if shape is None else math.prod(shape)
        nbytes = numel * dtype.itemsize
        if nbytes > self.nbytes:
            raise BudgetError(f"a tensor of {nbytes} bytes does not fit into a buffer of {self.nbytes} bytes")
        flat = self._pool.arena[self.start : self.start + nbytes].view(dtype)
        return flat if shape is None else flat.view(shape)

    def release(self) -> None:
        """Release the buffer; a second call does nothing."""
        if self._held:
            self._held = False
            self._pool._give_back(self.start, self.nbytes)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BufferPool:
    """`budget` bytes of page-aligned host memory. `pin` as for `dsx_nvme.empty`. Thread-safe."""

    def __init__(self, budget: int, *, pin: Pin = "auto") -> None:
        if budget < ALIGN:
            raise OptionError(f"budget={budget}: expected at least {ALIGN} bytes")
        self.budget = budget // ALIGN * ALIGN
        self._memory = memory.allocate(self.budget, pin)
        self.arena = self._memory.tensor(torch.uint8, self.budget)
        self._free = FreeRanges([(0, self.budget)])
        self._changed = threading.Condition()
        self.in_use = 0
        self.peak = 0

    @property
    def locked(self) -> memory.Locked:
        """The way the arena is page-locked, or why it is not."""
        return self._memory.locked

    def acquire(self, nbytes: int, *, timeout: float | None = None) -> Buffer:
        """A buffer of at least `nbytes`; waits until there is room.

        Raises BudgetError if `nbytes` is more than the budget, or after `timeout` seconds.
        """
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        if size > self.budget:
            raise BudgetError(f"{nbytes} bytes asked of a pool of {self.budget} bytes; give the pool a larger budget")
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (buffer := self._take(size)) is None:
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    raise BudgetError(
                        f"no {nbytes} bytes came free within {timeout} s ({self.in_use} of {self.budget} bytes in use)"
                    )
                self._changed.wait(left)
        return buffer

    def try_acquire(self, nbytes: int) -> Buffer | None:
        """A buffer, or None if there is no room now."""
        with self._changed:
            return self._take(max(ALIGN, -(-nbytes // ALIGN) * ALIGN))

    def _take(self, size: int) -> Buffer | None:
        start = self._free.take(size)
        if start is None:
            return None
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return Buffer(self, start, size)

    def _give_back(self, start: int, nbytes: int) -> None:
        with self._changed:
            self._free.give(start, nbytes)
            self.in_use = self.budget - self._free.total
            self._changed.notify_all()
