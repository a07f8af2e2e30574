"""Moving bytes: regions of tensors to and from files, with hashes, bounded memory and no silent short transfer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from .boxes import Region
from .crc import Chunks, Sums, extend
from .errors import CheckpointCorruptError, CheckpointError, shown
from .format import DTYPES, Placed, TensorSpec

PIECE_BYTES = 16 << 20  # copied from a device, written, read or hashed at a time


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
    """The text of a small file. Raises `CheckpointCorruptError` where it is none."""
    with opened(path, os.O_RDONLY) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{path}: is no text ({error}); the checkpoint is damaged") from error


def create(path: Path, header: bytes, size: int) -> None:
    """Make a file at its full size (so that a full disk shows now) and write its header."""
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        write_all(fd, memoryview(header), 0)
        os.fsync(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until everything is written; the operating system's error is raised as it is."""
    while data:
        done = os.pwrite(fd, data[:PIECE_BYTES], offset)
        data, offset = data[done:], offset + done


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy."""
    if not flat.numel():
        return memoryview(b"")
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())).cast("B")


def write_region(fd: int, placed: Placed, region: Region, values: torch.Tensor, sums: Sums) -> None:
    """Write 1-D `values` (any device) as a region of the tensor at `placed`, and add their bytes to `sums`."""
    for at, data in _pieces(placed.spec, region, values):
        sums.add(at, data)
        write_all(fd, data, placed.offset + at)


def hash_region(spec: TensorSpec, region: Region, values: torch.Tensor, sums: Sums) -> None:
    """Like `write_region`, without the file."""
    for at, data in _pieces(spec, region, values):
        sums.add(at, data)


def _pieces(spec: TensorSpec, region: Region, values: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """Values in pieces on the host, each with the byte of the tensor at which it lies, ascending."""
    step = max(1, PIECE_BYTES // spec.itemsize)
    begin, host = 0, raw_bytes(values[:0])  # elements [begin, ...) of `values` that lie on the host
    for run in region.runs(spec.shape):
        done = 0
        while done < run.numel:
            first = run.first + done
            if (first - begin) * spec.itemsize >= len(host):
                begin, host = first, raw_bytes(values[first : first + step].contiguous().cpu())
            data = host[(first - begin) * spec.itemsize :][: (run.numel - done) * spec.itemsize]
            yield (run.at + done) * spec.itemsize, data
            done += len(data) // spec.itemsize


def read_region(fd: int, placed: Placed, region: Region, sums: Sums) -> torch.Tensor:
    """A region as a new 1-D CPU tensor of the stored dtype; its bytes are added to `sums`.

    Raises:
        CheckpointCorruptError: the file is too short.
    """
    spec = placed.spec
    missing = placed.offset + spec.nbytes - os.fstat(fd).st_size
    if missing > 0:  # before anything is allocated: a damaged index may speak of any size
        raise CheckpointCorruptError(
            f"{placed.file}: ends {missing} bytes before the end of {shown(spec.name)}; it was cut short"
        )
    out = torch.empty(region.numel, dtype=getattr(torch, DTYPES[spec.dtype][0]))
    view = raw_bytes(out)
    for run in region.runs(spec.shape):
        begin, end = run.first * spec.itemsize, (run.first + run.numel) * spec.itemsize
        for first in range(begin, end, PIECE_BYTES):
            data = view[first : min(end, first + PIECE_BYTES)]
            at = run.at * spec.itemsize + first - begin
            _read_into(fd, placed, at, data)
            sums.add(at, data)
    return out


def _read_into(fd: int, placed: Placed, at: int, data: memoryview) -> None:
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
        _read_into(fd, placed, at, data)
        register = extend(register, data)
    return register


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with opened(folder, os.O_RDONLY) as fd:
        os.fsync(fd)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # `folder.py` knows this form as a leftover
    with opened(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as fd:
        write_all(fd, memoryview(text.encode()), 0)
        os.fsync(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)
