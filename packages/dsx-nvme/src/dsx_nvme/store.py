"""`TensorStore`: tensors by name on disk, put and taken while a program runs.

One data file, grown as needed, with an extent per name; a tensor of the same size goes where the old one was, so that the disk does not
fill up with the steps. Writes and reads of one name keep their order; different names go in any order. The index (names, shapes,
checksums) is written by `flush`, as a whole, by an atomic rename; what was put after the last flush is gone after a crash, and what is
half-written shows in its checksum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .checksum import crc32
from .engine import Engine
from .errors import BudgetError, ChecksumError, FormatError, NvmeError, TensorError
from .files import sync_folder
from .memory import empty
from .tensor_file import DTYPES, NAMES, NO_SUM, PAGE, Extent, Reading
from .ticket import Ticket

DATA, INDEX = "tensors.dat", "index.json"
VERSION = 1


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its place, the room it was given, its checksum."""

    extent: Extent
    room: int
    checksum: str


class TensorStore:
    """Named tensors in a folder. Use as a context manager.

    `budget`: bytes the data file may take (None: what the disk has); `checksum`: whether to write and check CRC-32s; `keep`: False removes the
    files at `close` (swap space); `engine`: an `Engine` to share. A folder in use by another process is refused (NvmeError). One thread at a time calls
    it; what it returns may be waited for anywhere.
    """

    def __init__(
        self, folder: str | os.PathLike, *, engine: Engine | None = None, budget: int | None = None, checksum: bool = True,
        keep: bool = True,
    ) -> None:  # fmt: skip
        self.folder = os.fspath(folder)
        self.budget, self.checksum, self.keep = budget, checksum, keep
        os.makedirs(self.folder, exist_ok=True)
        self._own_engine, self._owner = engine is None, os.getpid()
        self.engine = engine if engine is not None else Engine()
        self._file = self.engine.open(os.path.join(self.folder, DATA), write=True)
        self._entries: dict[str, Entry] = {}
        self._holes: list[tuple[int, int]] = []  # (offset, bytes), sorted
        self._end = 0
        self._moving: dict[str, list[Ticket]] = {}
        try:
            self._lock_folder()
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
        """Start storing a tensor under `name`, in place of an older one. It must not be written to before the ticket's `wait`.

        Raises BudgetError when the store would outgrow its budget, OSError when the disk is full.
        """
        if tensor.dtype not in NAMES:
            raise TensorError(f"{name}: cannot store {tensor.dtype}; expected one of {', '.join(map(str, NAMES))}")
        self._finish(name)
        nbytes = tensor.numel() * tensor.element_size()
        room = max(PAGE, -(-nbytes // PAGE) * PAGE)
        old = self._entries.get(name)
        if old is not None and old.room == room:
            offset = old.extent.offset
        else:
            if old is not None:
                self.delete(name)
            offset = self._allocate(name, room)
        checksum = f"{crc32(tensor):08x}" if self.checksum else NO_SUM
        try:
            ticket = self.engine.write(tensor, self._file, offset)
        except BaseException:
            self._free(offset, room)
            self._entries.pop(name, None)
            raise
        self._entries[name] = Entry(Extent(tuple(tensor.shape), tensor.dtype, offset), room, checksum)
        self._moving[name] = [ticket]
        return ticket

    def get(self, name: str, out: torch.Tensor | None = None) -> Reading:
        """Start reading a tensor, into `out` (same number of elements and dtype) or a new page-aligned one. Raises KeyError."""
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
        check = self.checksum and entry.checksum != NO_SUM
        after = (lambda: self._check(name, entry, target)) if check else None
        ticket = self.engine.read(out, self._file, extent.offset, after=after)
        self._moving[name] = [*(t for t in self._moving.get(name, ()) if not t.settled), ticket]
        return Reading(ticket, out)

    def delete(self, name: str) -> None:
        """Forget a tensor; its room is used again. Raises KeyError."""
        entry = self._entry(name)
        self._finish(name)
        del self._entries[name]
        self._free(entry.extent.offset, entry.room)

    def flush(self, *, durable: bool = False) -> None:
        """Wait for all writes and write the index; `durable` also waits for the device. Raises the first error of a write."""
        for name in list(self._moving):
            self._finish(name)
        if durable:
            os.fsync(self._file.plain_fd)
        table = {
            name: {
                "shape": list(e.extent.shape), "dtype": NAMES[e.extent.dtype], "offset": e.extent.offset, "room": e.room,
                "crc32": e.checksum,
            }
            for name, e in self._entries.items()
        }  # fmt: skip
        temporary = os.path.join(self.folder, f".{INDEX}.{os.getpid()}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "tensors": table}, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, os.path.join(self.folder, INDEX))
        if durable:
            sync_folder(self.folder)

    def close(self) -> None:
        """Flush (or, with keep=False, wait and remove the files) and close. Closes even when a write failed."""
        if self._file.users < 1:
            return
        try:
            if self.keep:
                self.flush()
            else:
                for ticket in [t for tickets in self._moving.values() for t in tickets]:
                    ticket.exception()
        finally:
            self._shut()
            if not self.keep:
                for name in (DATA, INDEX):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.folder, name))

    def _shut(self) -> None:
        self._unlock_folder()
        self.engine.close_file(self._file)
        if self._own_engine:
            self.engine.close()

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"{self.folder} holds no tensor {name!r}; it holds {len(self._entries)} others")
        return self._entries[name]

    def _finish(self, name: str) -> None:
        """Wait for what is under way with a name; a failed write takes the tensor out of the store."""
        tickets = self._moving.pop(name, [])
        for ticket in tickets:
            ticket.exception()
        for ticket in tickets:
            if ticket.what.op == "write" and ticket.failed and name in self._entries:
                entry = self._entries.pop(name)
                self._free(entry.extent.offset, entry.room)
                ticket.wait()

    def _allocate(self, name: str, room: int) -> int:
        for index, (offset, nbytes) in enumerate(self._holes):
            if nbytes >= room:
                self._holes[index : index + 1] = [(offset + room, nbytes - room)] if nbytes > room else []
                return offset
        if self.budget is not None and self._end + room > self.budget:
            raise BudgetError(
                f"{name}: {room} bytes more than the store's {self._end} of {self.budget} bytes; delete tensors or give it a larger budget"
            )
        self._end += room
        return self._end - room

    def _free(self, offset: int, room: int) -> None:
        """Give room back, joined with its neighbours; room at the end shortens the file's use."""
        holes = sorted([*self._holes, (offset, room)])
        joined: list[tuple[int, int]] = []
        for start, nbytes in holes:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((start, nbytes))
        if joined and sum(joined[-1]) == self._end:
            self._end = joined.pop()[0]
        self._holes = joined

    def _load(self) -> None:
        path = os.path.join(self.folder, INDEX)
        if not os.path.exists(path):
            return
        size = os.fstat(self._file.plain_fd).st_size
        try:
            with open(path, encoding="utf-8") as file:
                table = json.load(file)
            if table["version"] != VERSION:
                raise FormatError(f"{path}: version {table['version']}, this package reads {VERSION}")
            for name, e in table["tensors"].items():
                extent = Extent(tuple(e["shape"]), DTYPES[e["dtype"]], int(e["offset"]))
                if extent.offset < 0 or extent.nbytes > e["room"] or extent.offset + extent.nbytes > size:
                    raise FormatError(f"{path}: {name!r} does not fit into {size} bytes of data")
                self._entries[name] = Entry(extent, int(e["room"]), str(e["crc32"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{path}: not an index of a TensorStore: {error!r}") from error
        used = sorted((e.extent.offset, e.room) for e in self._entries.values())
        for offset, room in used:
            if offset < self._end:
                raise FormatError(f"{path}: two tensors share bytes from {offset} on")
            if offset > self._end:
                self._holes.append((self._end, offset - self._end))
            self._end = offset + room

    def _lock_folder(self) -> None:
        if sys.platform == "win32":
            return
        import fcntl  # not of every platform

        try:
            fcntl.flock(self._file.plain_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NvmeError(
                f"{self.folder} is in use by another TensorStore; give each process a folder of its own"
            ) from error

    def _unlock_folder(self) -> None:
        if sys.platform == "win32" or os.getpid() != self._owner:
            return
        import fcntl  # not of every platform

        # Closing the descriptor does not always do it: a ring may hold the file of a request it has just finished for a moment longer, and
        # a forked child holds it for good.
        fcntl.flock(self._file.plain_fd, fcntl.LOCK_UN)

    def _check(self, name: str, entry: Entry, tensor: Any) -> None:
        found = f"{crc32(tensor):08x}"
        if found != entry.checksum:
            raise ChecksumError(
                errno.EBADMSG, f"{name}: checksum {found}, expected {entry.checksum}", self._file.path,
                op="read", offset=entry.extent.offset, nbytes=entry.extent.nbytes,
            )  # fmt: skip
