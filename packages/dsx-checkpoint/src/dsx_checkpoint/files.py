"""Reads and writes bytes of files; a short transfer is never silent. It needs no torch; `regions.py` moves tensors."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .crc import Chunks, extend
from .errors import CheckpointCorruptError, CheckpointError
from .format import Placed

PIECE_BYTES = 16 << 20  # copied from a device, written, read or hashed at a time
_MOST_TEXT = 1 << 30  # bytes; the index of 1 TB has 3 MB


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor of an ordinary file or a folder, closed at the end.

    Anything else is refused: opening a FIFO would wait for its other end, reading a device might never end.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(f"{path}: is no ordinary file ({stat.filemode(mode)})")
        yield fd
    finally:
        os.close(fd)


def read_text(path: Path) -> str:
    """The text of a small file. Raises `CheckpointCorruptError` if it is not text."""
    with opened(path, os.O_RDONLY) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > _MOST_TEXT:
            raise CheckpointCorruptError(f"{path}: has {size} bytes, expected text of at most {_MOST_TEXT}")
        data = file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{path}: is no text ({error}); the checkpoint is damaged") from error


def create(path: Path, header: bytes, size: int, *, sparse: bool = False) -> None:
    """Make a file with its full size, so that a full disk shows now (unless `sparse`), and write its header."""
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        if hasattr(os, "posix_fallocate") and not sparse:
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        write_all(fd, memoryview(header), 0)
        os.fsync(fd)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise `CheckpointError` where the file system says that it has no room for so many bytes."""
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    if free < nbytes:
        raise CheckpointError(
            f"{folder}: has {free / 1e9:,.1f} GB left, and the checkpoint needs {nbytes / 1e9:,.1f} GB; remove older "
            "checkpoints, or save to another file system"
        )


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Call `pwrite` until everything is written; errors of the operating system are passed on."""
    while data:
        done = os.pwrite(fd, data[:PIECE_BYTES], offset)
        data, offset = data[done:], offset + done


def read_into(fd: int, placed: Placed, at: int, data: memoryview) -> None:
    offset = placed.offset + at
    while data:
        got = os.preadv(fd, [data], offset)
        if got == 0:
            raise CheckpointCorruptError(f"{placed.file}: ends at byte {offset}; it was cut short")
        data, offset = data[got:], offset + got


def register_of_chunk(fd: int, placed: Placed, chunks: Chunks, number: int) -> int:
    """Read a chunk and give its register (see `crc.py`)."""
    start, stop = chunks.span(number)
    buffer = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
    register = 0
    for at in range(start, stop, PIECE_BYTES):
        data = buffer[: min(PIECE_BYTES, stop - at)]
        read_into(fd, placed, at, data)
        register = extend(register, data)
    return register
