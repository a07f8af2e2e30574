"""Writes bytes at an offset of a file that already has its full size. If dsx-nvme can do it, without the page cache.

    with writing(path) as file:
        file.write(data, offset)      # may return before the bytes are written; `data` stays unchanged until the end
    # everything is on the disk here (fsync)

Full pages of large pieces are written by `dsx_nvme.Engine` with direct I/O, while the caller prepares the next piece.
At most `IN_FLIGHT` pieces are under way; the next one waits. The bytes of the first and the last page, small pieces,
and everything if dsx-nvme is missing, not compiled or has no direct I/O for this file system, are written with `pwrite`
through the page cache. The file has the same bytes in both cases.

Only full pages bypass the page cache, because several ranks write next to each other into one file. A page in which the
bytes of one rank end and those of another begin is written through the page cache by both. If one of them wrote its
part of the page directly, the other's write of the page could bring the old bytes back.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .files import opened, write_all

__all__ = ["IN_FLIGHT", "FileWriter", "writing"]

DIRECT_FROM = 1 << 20  # bytes; smaller pieces are not worth a submission
IN_FLIGHT = 4  # pieces of at most `files.PIECE_BYTES`
_PAGE = max(4096, mmap.PAGESIZE)


class _DirectFile:
    """Whole pages of one file, past the page cache."""

    def __init__(self, nvme: Any, engine: Any, file: Any) -> None:
        self._nvme, self._engine, self._file = nvme, engine, file
        self._tickets: deque[Any] = deque()

    @staticmethod
    def open(path: Path) -> _DirectFile | None:
        """Open the file; None if direct I/O is not possible."""
        try:
            import dsx_nvme
        except ImportError:
            return None
        if not dsx_nvme.access(path).direct:
            return None
        engine = dsx_nvme.Engine()
        try:
            return _DirectFile(dsx_nvme, engine, engine.open(path, write=True))
        except BaseException:
            engine.close()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Start writing; waits while `IN_FLIGHT` pieces are under way. Raises the `OSError` of an earlier piece."""
        import torch

        while len(self._tickets) >= IN_FLIGHT:
            self._tickets.popleft().wait()
        self._tickets.append(self._engine.write(torch.frombuffer(data, dtype=torch.uint8), self._file, offset))

    def wait(self) -> None:
        """Wait until all pieces are written. Raises `OSError`."""
        while self._tickets:
            self._tickets.popleft().wait()

    def close(self) -> None:
        """Wait for all pieces, also failed ones, and close the file and the engine."""
        for ticket in self._tickets:
            ticket.exception()
        self._engine.close_file(self._file)
        self._engine.close()


class FileWriter:
    """Writes pieces of one file; see `writing`."""

    def __init__(self, fd: int, path: Path, direct: bool = True) -> None:
        self._fd, self._path = fd, path
        self._direct: _DirectFile | None = None
        self._asked = not direct

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at byte `offset`. The memory must stay as it is until `wait`.

        Raises:
            OSError: this piece, or an earlier one, cannot be written.
        """
        head = -offset % _PAGE
        body = max(0, len(data) - head) // _PAGE * _PAGE
        direct = self._direct_file() if body >= DIRECT_FROM else None
        if direct is None:
            write_all(self._fd, data, offset)
            return
        write_all(self._fd, data[:head], offset)
        direct.write(data[head : head + body], offset + head)
        write_all(self._fd, data[head + body :], offset + head + body)

    def _direct_file(self) -> _DirectFile | None:
        if not self._asked:
            self._asked, self._direct = True, _DirectFile.open(self._path)
        return self._direct

    def wait(self) -> None:
        """Wait until everything is written. Raises `OSError`."""
        if self._direct is not None:
            self._direct.wait()

    def close(self) -> None:
        """Close the file and the engine of direct I/O."""
        if self._direct is not None:
            self._direct.close()


@contextmanager
def writing(path: Path, *, flush: bool = True, direct: bool = True) -> Iterator[FileWriter]:
    """A writer of an existing file; at the end everything is on the disk (fsync).

    Args:
        flush: False: another process of this host flushes the file later.
        direct: whether pages may be written past the page cache, which opens the file once more.

    Raises:
        OSError: something cannot be written.
    """
    with opened(path, os.O_WRONLY) as fd:
        writer = FileWriter(fd, path, direct)
        try:
            yield writer
            writer.wait()
            if flush:
                os.fsync(fd)
        finally:
            writer.close()
