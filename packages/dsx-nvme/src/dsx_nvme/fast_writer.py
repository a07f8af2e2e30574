"""A file object for `torch.save` and other code that writes bytes in order.

It collects the bytes in two buffers, and writes one buffer while the other is being filled.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from .engine import Engine
from .errors import OptionError
from .memory import empty
from .ticket import Ticket


class FastFileWriter:
    """`write`, `flush`, `close` of a file opened for writing; use as a context manager.

    The file holds exactly the bytes that were written. `buffer_bytes` is the memory of both buffers together. An error
    in writing a buffer is raised by the next `write`, `flush` or `close`.

    Args:
        path: of the file; what it held is cut off.
        buffer_bytes: at least 8192.
        engine: an `Engine` to share; without one the file has its own.

    Raises:
        OptionError: too small a buffer.
        TransferError: an `OSError` with file, offset and number.
    """

    def __init__(self, path: str | os.PathLike, *, buffer_bytes: int = 64 << 20, engine: Engine | None = None) -> None:
        half = buffer_bytes // 2 // 4096 * 4096
        if half < 4096:
            raise OptionError(f"buffer_bytes={buffer_bytes}: expected at least 8192")
        self._own_engine = engine is None
        self._engine = engine if engine is not None else Engine()
        self._file = self._engine.open(path, write=True)
        os.ftruncate(self._file.plain_fd, 0)
        self._halves = [empty(half, dtype=torch.uint8, pin="auto") for _ in range(2)]
        # Views of the same memory as bytes. Making a tensor of the data instead would warn, because `bytes` cannot be
        # written to.
        self._rooms = [memoryview((ctypes.c_char * half).from_address(t.data_ptr())).cast("B") for t in self._halves]
        self._tickets: list[Ticket | None] = [None, None]
        self._which = self._filled = self._written = 0
        self.closed = False

    def __enter__(self) -> FastFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: Any) -> int:
        """Write bytes (or any object with a buffer); returns how many."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            room = self._rooms[self._which]
            count = min(len(view) - done, len(room) - self._filled)
            room[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == len(room):
                self._send()
        return len(view)

    def flush(self) -> None:
        """Wait until all bytes so far are in the file."""
        self._send()
        for which in (0, 1):
            self._wait(which)

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._written + self._filled

    def close(self) -> None:
        """Flush and close."""
        if self.closed:
            return
        self.closed = True
        try:
            self.flush()
        finally:
            for ticket in self._tickets:
                if ticket is not None:
                    ticket.exception()
            self._engine.close_file(self._file)
            if self._own_engine:
                self._engine.close()

    def _send(self) -> None:
        if self._filled == 0:
            return
        which, half = self._which, self._halves[self._which]
        self._tickets[which] = self._engine.write(half[: self._filled], self._file, self._written)
        self._written += self._filled
        self._which, self._filled = 1 - which, 0
        self._wait(self._which)

    def _wait(self, which: int) -> None:
        ticket, self._tickets[which] = self._tickets[which], None
        if ticket is not None:
            ticket.wait()
