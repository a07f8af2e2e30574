"""`TensorStore`: tensors by name on disk, stored and read while a program runs.

The store has one data file, which grows as needed, with an extent per name. `flush` writes the index (names, shapes,
checksums) and replaces the old one by an atomic rename. Extents that the index on disk refers to are never overwritten:
a tensor that is put again goes to another extent, and the old extent is free after the next flush. So after a kill the
folder has exactly the tensors of the last flush. A tensor that was not flushed yet is overwritten in place, so that the
file does not grow with the steps. With a flush per step it grows to twice the size of the tensors.

Writes and reads of one name keep their order; those of different names may overtake each other.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import torch

from .checksum import crc32
from .engine import Engine
from .errors import BudgetError, ChecksumError, ForkError, TensorError
from .extents import FreeRanges
from .files import OpenFile
from .folder_lock import OWNER, FolderLock
from .gds import DirectEngine
from .memory import empty
from .store_index import Entry, read_index, write_index
from .tensor_file import NAMES, NO_SUM, PAGE, Extent, Reading
from .ticket import Ticket

DATA, INDEX = "tensors.dat", "index.json"


class TensorStore:
    """Named tensors in a folder. Use as a context manager.

    `budget`: the most bytes of the data file (None: no limit); tensors of the last flush keep their room until the next
    flush. `checksum`: whether to write and check CRC-32s; `keep`: False removes the files at `close` (swap space);
    `engine`: an `Engine` to share. A folder in use by another process is refused (NvmeError); if its process was just
    killed, the store waits for it. Only one thread at a time may call the store; any thread may wait for its results.
    Tensors that are transferred directly to a device (`DirectEngine`) have no checksums, because computing them would
    need a copy on the host.
    """

    def __init__(
        self, folder: str | os.PathLike, *, engine: Engine | DirectEngine | None = None, budget: int | None = None,
        checksum: bool = True, keep: bool = True,
    ) -> None:  # fmt: skip
        self.folder = os.fspath(folder)
        self.budget, self.checksum, self.keep = budget, checksum, keep
        os.makedirs(self.folder, exist_ok=True)
        self._own_engine, self._pid = engine is None, os.getpid()
        self.engine = engine if engine is not None else Engine()
        self._file, self._lock = self._take_folder()
        self._entries: dict[str, Entry] = {}
        self._flushed: dict[int, int] = {}  # room by offset of the extents that the index on disk refers to
        self._previous: dict[str, Entry] = {}  # flushed versions of names that were put again, for a put that fails
        self._holes = FreeRanges()
        self._end = 0
        self._moving: dict[str, list[Ticket]] = {}
        try:
            self._load()
        except BaseException:
            self._shut()
            raise

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors stored."""
        return sum(entry.extent.nbytes for entry in self._entries.values())

    def spec(self, name: str) -> Extent:
        """Shape, dtype and place of a tensor."""
        return self._entry(name).extent

    def put(self, name: str, tensor: torch.Tensor) -> Ticket:
        """Start storing a tensor under `name`; it replaces an older one.

        Do not write to the tensor before the ticket's `wait`. Raises BudgetError if the store would outgrow its budget,
        OSError if the disk is full. After a put that failed, the store has the version of the last flush, if any.
        """
        self._own()
        if not isinstance(name, str):
            raise TensorError(f"got a name of type {type(name).__name__}, expected str")
        if tensor.dtype not in NAMES:
            raise TensorError(f"{name}: cannot store {tensor.dtype}; expected one of {', '.join(map(str, NAMES))}")
        self._finish(name)
        nbytes = tensor.numel() * tensor.element_size()
        room = max(PAGE, -(-nbytes // PAGE) * PAGE)
        old = self._entries.get(name)
        in_place = old is not None and old.room == room and old.extent.offset not in self._flushed
        checksum = f"{crc32(tensor):08x}" if self.checksum and not self._goes_directly(tensor) else NO_SUM
        offset = old.extent.offset if old is not None and in_place else self._allocate(name, room, old)
        try:
            ticket = self.engine.write(tensor, self._file, offset)
        except BaseException:
            if not in_place:
                self._free(offset, room)
            raise
        replaced = self._entries.get(name)  # also None if `_allocate` took its room
        self._entries[name] = Entry(Extent(tuple(tensor.shape), tensor.dtype, offset), room, checksum)
        self._moving[name] = [ticket]
        if replaced is not None and not in_place:
            if replaced.extent.offset in self._flushed:
                self._previous[name] = replaced
            self._release(replaced)
        return ticket

    def get(self, name: str, out: torch.Tensor | None = None) -> Reading:
        """Start reading a tensor, into `out` (same number of elements and dtype) or a new page-aligned one.

        Raises KeyError.
        """
        entry = self._entry(name)
        extent = entry.extent
        if out is None:
            out = empty(extent.shape, dtype=extent.dtype)
        elif out.numel() != extent.numel or out.dtype != extent.dtype:
            raise TensorError(
                f"{name}: got {out.numel()} elements of {out.dtype} to read {extent.numel} of {extent.dtype} into"
            )
        if any(ticket.what.op == "write" for ticket in self._moving.get(name, ())):
            self._finish(name)
        target = out
        check = self.checksum and entry.checksum != NO_SUM and not self._goes_directly(target)
        after = (lambda: self._check(name, entry, target)) if check else None
        ticket = self.engine.read(out, self._file, extent.offset, after=after)
        self._moving[name] = [*(t for t in self._moving.get(name, ()) if not t.settled), ticket]
        return Reading(ticket, out)

    def delete(self, name: str) -> None:
        """Delete a tensor. Its room is free at once, or after the next flush if it was flushed. Raises KeyError."""
        self._own()
        entry = self._entry(name)
        self._finish(name)
        del self._entries[name]
        self._previous.pop(name, None)
        self._release(entry)

    def flush(self, *, durable: bool = False) -> None:
        """Wait for all writes and write the index. From now on these tensors survive a kill of the process.

        `durable` also waits for the device, so that they survive a loss of power too (if every flush of the folder is
        durable). Raises the first error of a write; then the index on disk stays unchanged.
        """
        self._own()
        for name in list(self._moving):
            self._finish(name)
        if durable:
            os.fsync(self._file.plain_fd)
        current = {entry.extent.offset: entry.room for entry in self._entries.values()}
        before = self._flushed
        self._flushed = {**before, **current}  # both, until the new index is certainly on disk
        write_index(os.path.join(self.folder, INDEX), self._entries, durable=durable)
        self._flushed = current
        self._previous.clear()
        for offset, room in before.items():
            if offset not in current:
                self._free(offset, room)

    def close(self) -> None:
        """Flush (or, with keep=False, wait and remove the files) and close. Closes even if a write failed.

        In a forked child it only closes, because the store belongs to its parent.
        """
        if self._file.users < 1:
            return
        mine = os.getpid() == self._pid
        try:
            if mine and self.keep:
                self.flush()
                os.ftruncate(self._file.plain_fd, self._end)
            elif mine:
                for ticket in [t for tickets in self._moving.values() for t in tickets]:
                    ticket.exception()
        finally:
            if mine:
                for name in (OWNER,) if self.keep else (DATA, INDEX, OWNER):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.folder, name))
            self._shut()

    def _take_folder(self) -> tuple[OpenFile, FolderLock]:
        path = os.path.join(self.folder, DATA)
        while True:
            file = self.engine.open(path, write=True)
            try:
                lock = FolderLock(self.folder, file.plain_fd)
                lock.acquire()
                if file.is_named(path):
                    return file, lock
            except BaseException:
                self.engine.close_file(file)
                self._close_engine()
                raise
            self.engine.close_file(file)  # another store, with keep=False, has removed the file and then its lock

    def _goes_directly(self, tensor: torch.Tensor) -> bool:
        return isinstance(self.engine, DirectEngine) and self.engine.goes_directly(tensor)

    def _shut(self) -> None:
        self._lock.release()
        self.engine.close_file(self._file)
        self._close_engine()

    def _close_engine(self) -> None:
        if self._own_engine:
            self.engine.close()

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"{self.folder} holds no tensor {name!r}; it holds {len(self._entries)} others")
        return self._entries[name]

    def _own(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"{self.folder} belongs to the parent process; make a store of another folder here")

    def _finish(self, name: str) -> None:
        """Wait for the transfers of a name. After a failed write the version of the last flush is the stored one."""
        tickets = self._moving.pop(name, [])
        for ticket in tickets:
            ticket.exception()
        for ticket in tickets:
            if ticket.what.op == "write" and ticket.failed and name in self._entries:
                self._release(self._entries.pop(name))
                if name in self._previous:
                    self._entries[name] = self._previous.pop(name)
                ticket.wait()

    def _allocate(self, name: str, room: int, old: Entry | None) -> int:
        """Room for a tensor. If there is no other room, that of `old` is used, a version that was never flushed."""
        offset = self._holes.take(room)
        if offset is None and self._fits(room, self._end):
            self._end += room
            offset = self._end - room
        if offset is None and old is not None and old.extent.offset not in self._flushed:
            trial = self._holes.copy()
            trial.give(old.extent.offset, old.room)
            if trial.take(room) is not None or self._fits(room, trial.cut(self._end)):
                del self._entries[name]
                self._release(old)
                return self._allocate(name, room, None)
        if offset is None:
            raise BudgetError(
                f"{name}: {room} bytes more than the store's {self._end} of {self.budget} bytes; delete tensors, flush "
                "(what the last flush wrote keeps its room until the next one), or give it a larger budget"
            )
        return offset

    def _fits(self, room: int, end: int) -> bool:
        return self.budget is None or end + room <= self.budget

    def _release(self, entry: Entry) -> None:
        """Free an extent. If the index on disk refers to it, `flush` frees it later."""
        if entry.extent.offset not in self._flushed:
            self._free(entry.extent.offset, entry.room)

    def _free(self, offset: int, room: int) -> None:
        self._holes.give(offset, room)
        self._end = self._holes.cut(self._end)

    def _load(self) -> None:
        path = os.path.join(self.folder, INDEX)
        if not os.path.lexists(path):
            return
        self._entries = read_index(path, os.fstat(self._file.plain_fd).st_size)
        for entry in sorted(self._entries.values(), key=lambda e: e.extent.offset):
            if entry.extent.offset > self._end:
                self._holes.give(self._end, entry.extent.offset - self._end)
            self._end = entry.extent.offset + entry.room
            self._flushed[entry.extent.offset] = entry.room

    def _check(self, name: str, entry: Entry, tensor: Any) -> None:
        found = f"{crc32(tensor):08x}"
        if found != entry.checksum:
            raise ChecksumError(
                errno.EBADMSG, f"{name}: checksum {found}, expected {entry.checksum}", self._file.path,
                op="read", offset=entry.extent.offset, nbytes=entry.extent.nbytes,
            )  # fmt: skip
