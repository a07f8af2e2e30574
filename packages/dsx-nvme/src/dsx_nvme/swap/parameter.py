"""Parameters that live on disk and are in memory while they are used. They are read ahead in the order of the last
pass.

Memory is a pool of `buffer_count` x `buffer_size` elements. A parameter takes as much of it as it needs; one that is
larger than a buffer takes several. A released parameter stays in memory until another one needs the room, so that a
parameter used twice in a row is read once.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..engine import Engine
from ..errors import BudgetError, NvmeError, OptionError
from ..memory import Pin
from ..pool import Buffer, BufferPool
from ..store import TensorStore
from ..ticket import Ticket
from .moving import Moving, OnTransfer, no_listener


@dataclass
class _Loaded:
    """A parameter in memory."""

    buffer: Buffer
    tensor: torch.Tensor
    reading: Moving | None = None
    writing: Moving | None = None
    users: int = 0


@dataclass
class SwapCounts:
    """How well the prefetch worked: fetches of a parameter in memory, of one being read, and of one not yet being
    read.
    """

    hits: int = 0
    prefetched: int = 0
    misses: int = 0


class ParameterSwapper:
    """Parameters that live on disk and are in memory while they are used. Use as a context manager.

    `max_in_cpu`: elements of parameters that always stay in memory (the first ones that are added); `ahead`: how many
    parameters to read ahead if there is room; `checksum`: check every read. The files are in
    `<folder>/parameters-rank<rank>`; `keep=False` removes them. `on_transfer` is called for every read and write (see
    `moving`).
    """

    def __init__(
        self, folder: str | os.PathLike, *, dtype: torch.dtype = torch.float32, buffer_count: int = 5,
        buffer_size: int = 100_000_000, max_in_cpu: int = 0, ahead: int = 4, checksum: bool = False, rank: int = 0,
        pin: Pin = "auto", engine: Engine | None = None, keep: bool = False,
        on_transfer: OnTransfer = no_listener,
    ) -> None:  # fmt: skip
        if min(buffer_count, buffer_size) < 1 or ahead < 0:
            raise OptionError(
                f"buffer_count={buffer_count}, buffer_size={buffer_size}, ahead={ahead}: expected at least 1, 1, 0"
            )
        self.dtype, self.ahead, self._on_transfer = dtype, ahead, on_transfer
        self._own_engine = engine is None
        self.engine = engine if engine is not None else Engine(queue_depth=16)
        place = os.path.join(os.fspath(folder), f"parameters-rank{rank}")
        self.store = TensorStore(place, engine=self.engine, checksum=checksum, keep=keep)
        self.pool = BufferPool(max(4096, buffer_count * buffer_size * dtype.itemsize), pin=pin)
        self.engine.register(self.pool.arena)
        self.counts = SwapCounts()
        self._kept: dict[str, torch.Tensor] = {}
        self._room_kept = max_in_cpu
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # least recently used first
        self._order: list[str] = []  # of the last complete pass
        self._seen: list[str] = []  # of this pass
        self._next = 0
        self._closed = False

    def __enter__(self) -> ParameterSwapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a parameter; it replaces an older one of that name. The caller may free its own copy.

        Raises BudgetError if it is too large for the memory, NvmeError if the older one is in use.
        """
        if tensor.numel() * self.dtype.itemsize > self.pool.budget:
            raise BudgetError(
                f"{name}: {tensor.numel()} elements do not fit the {self.pool.budget} bytes of all buffers; raise "
                "buffer_size or buffer_count"
            )
        self._forget(name)
        if tensor.numel() <= self._room_kept:
            self._room_kept -= tensor.numel()
            self._kept[name] = tensor.detach().to("cpu", self.dtype, copy=True)
            return
        self._begin("write", name, tensor.detach().to(self.dtype).contiguous()).wait()

    def fetch(self, name: str) -> torch.Tensor:
        """The parameter in memory; call `release` after its use.

        Waits for its read. Raises KeyError, BudgetError.
        """
        self._seen.append(name)
        if name in self._kept:
            self._advance(name)
            return self._kept[name]
        entry = self._loaded.get(name)
        if entry is None:
            self.counts.misses += 1
            entry = self._load(name, must=True)
        elif entry.reading is not None:
            self.counts.prefetched += 1
        else:
            self.counts.hits += 1
        if entry is None:
            raise NvmeError(f"{name}: no buffer although one was made free")
        entry.users += 1
        self._loaded.move_to_end(name)
        self._advance(name)
        self._finish_read(name, entry)
        self._settle_write(entry)  # the caller may change it now
        return entry.tensor

    def release(self, name: str, *, dirty: bool = False) -> None:
        """Say that a fetched parameter is no longer used. Raises NvmeError if it was not fetched.

        `dirty`: write its new values to disk.
        """
        if name in self._kept:
            return
        entry = self._loaded.get(name)
        if entry is None or entry.users == 0:
            raise NvmeError(f"{name} is released more often than it was fetched")
        entry.users -= 1
        if dirty:
            if entry.writing is not None:
                entry.writing.wait()
            entry.writing = self._begin("write", name, entry.tensor)

    @contextlib.contextmanager
    def use(self, name: str, *, dirty: bool = False) -> Iterator[torch.Tensor]:
        """`fetch` and `release` around a block."""
        tensor = self.fetch(name)
        try:
            yield tensor
        finally:
            self.release(name, dirty=dirty)

    def prefetch(self, *names: str) -> int:
        """Start reading parameters as long as there is room; returns how many of them are in memory or on their way."""
        ready = 0
        for name in names:
            if name not in self._kept and name not in self._loaded and self._load(name, must=False) is None:
                break
            ready += 1
        return ready

    def end_pass(self) -> None:
        """Say that a pass over the parameters has ended. From now on parameters are read ahead in its order."""
        if self._seen:
            self._order, self._seen = self._seen, []
        self._next = 0

    def flush(self) -> None:
        """Wait for all writes. Raises the first error."""
        for entry in self._loaded.values():
            self._settle_write(entry)

    def close(self) -> None:
        """Wait for all transfers and close; remove the files unless `keep` is set."""
        try:
            for entry in self._loaded.values():
                if entry.reading is not None:
                    entry.reading.exception()
            self.flush()
        finally:
            self._loaded.clear()
            if not self._closed:
                self._closed = True
                self.engine.unregister(self.pool.arena)
            self.store.close()
            if self._own_engine:
                self.engine.close()

    def _forget(self, name: str) -> None:
        """Make sure that nothing of an older parameter of that name is read again."""
        entry = self._loaded.get(name)
        if entry is not None and entry.users:
            raise NvmeError(f"{name} is added again while it is in use; release it first")
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._room_kept += kept.numel()
        if entry is not None:
            self._unload(name, entry)
        if name in self.store:
            self.store.delete(name)

    def _unload(self, name: str, entry: _Loaded) -> None:
        if entry.reading is not None:
            entry.reading.exception()
        self._settle_write(entry)
        del self._loaded[name]
        entry.buffer.release()

    def _advance(self, name: str) -> None:
        """Find the present place in the recorded order and read ahead from there.

        If a pass leaves the recorded order, the place is found again later.
        """
        order = self._order
        if not order:
            return
        if self._next >= len(order) or order[self._next] != name:
            later = [i for i in range(self._next, len(order)) if order[i] == name]
            if not later:
                return
            self._next = later[0]
        self._next += 1
        self.prefetch(*order[self._next : self._next + self.ahead])

    def _load(self, name: str, *, must: bool) -> _Loaded | None:
        extent = self.store.spec(name)
        buffer = self.pool.try_acquire(extent.nbytes)
        while buffer is None and self._evict(wanted=must):
            buffer = self.pool.try_acquire(extent.nbytes)
        if buffer is None and must:
            in_use = [n for n, g in self._loaded.items() if g.users]
            raise BudgetError(
                f"{name}: no room for {extent.nbytes} bytes in {self.pool.budget}; {len(in_use)} parameters are in use "
                f"({', '.join(in_use[:5])}): release them first, or raise buffer_count"
            )
        if buffer is None:
            return None
        tensor = buffer.tensor(extent.dtype, extent.shape)
        entry = _Loaded(buffer, tensor, self._begin("read", name, tensor))
        self._loaded[name] = entry
        return entry

    def _begin(self, op: str, name: str, tensor: torch.Tensor) -> Moving:
        def start() -> Ticket:
            return self.store.put(name, tensor) if op == "write" else self.store.get(name, tensor).ticket

        return Moving.begin(self._on_transfer, op, name, tensor, start)

    def _evict(self, *, wanted: bool) -> bool:
        """Evict one parameter from memory; returns False if none can be evicted.

        Reading ahead (`wanted` is False) evicts only parameters that are not needed soon.
        """
        soon = set(self._order[self._next : self._next + self.ahead])
        for name, entry in self._loaded.items():
            if entry.users or (not wanted and (name in soon or entry.reading is not None)):
                continue
            self._unload(name, entry)
            return True
        return False

    def _finish_read(self, name: str, entry: _Loaded) -> None:
        reading = entry.reading
        if reading is None:
            return
        try:
            reading.wait()
            entry.reading = None
        except BaseException:
            entry.users -= 1
            if entry.users == 0 and reading.done():
                del self._loaded[name]
                entry.buffer.release()
            raise

    def _settle_write(self, entry: _Loaded) -> None:
        writing, entry.writing = entry.writing, None
        if writing is not None:
            writing.wait()
