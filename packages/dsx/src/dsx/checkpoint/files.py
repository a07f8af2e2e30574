"""Moving bytes: ranges of tensors to and from files, with hashes, bounded memory and no silent short transfer."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from .errors import CheckpointCorruptError, CheckpointError, shown
from .format import DTYPES, Placed, Slice
from .plan import FilePlan

CHUNK = 16 << 20  # bytes copied from a device or read for hashing at a time


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


def create(folder: Path, plan: FilePlan) -> None:
    """Make the file at its full size (so that a full disk shows now) and write its header."""
    with opened(folder / plan.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, plan.size)
        else:
            os.ftruncate(fd, plan.size)
        write_all(fd, memoryview(plan.header), 0)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until everything is written; the operating system's error is raised as it is."""
    while data:
        done = os.pwrite(fd, data[:CHUNK], offset)
        data, offset = data[done:], offset + done


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy."""
    if not flat.numel():
        return memoryview(b"")
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())).cast("B")


def write_range(fd: int, place: Placed, start: int, data: torch.Tensor) -> Slice:
    """Write 1-D `data` as elements `[start, start + numel)` of the tensor at `place`; returns the hashed slice."""
    flat = data.detach().reshape(-1)
    step = max(1, CHUNK // place.spec.itemsize)
    digest = 0
    for begin in range(0, flat.numel(), step):
        piece = raw_bytes(flat[begin : begin + step].contiguous().cpu())
        digest = zlib.crc32(piece, digest)
        write_all(fd, piece, place.offset + (start + begin) * place.spec.itemsize)
    return Slice(start, start + flat.numel(), digest)


def read_range(fd: int, place: Placed, start: int, stop: int) -> torch.Tensor:
    """Elements `[start, stop)` as a new 1-D CPU tensor of the stored dtype. Raises when the file is too short."""
    missing = place.offset + stop * place.spec.itemsize - os.fstat(fd).st_size
    if missing > 0:  # before anything is allocated: a damaged index may speak of any size
        raise CheckpointCorruptError(
            f"{place.file}: ends {missing} bytes before the end of {shown(place.spec.name)}; it was cut short"
        )
    out = torch.empty(stop - start, dtype=getattr(torch, DTYPES[place.spec.dtype][0]))
    view = raw_bytes(out)
    offset = place.offset + start * place.spec.itemsize
    while view:
        got = os.preadv(fd, [view[:CHUNK]], offset)
        if got == 0:
            raise CheckpointCorruptError(
                f"{place.file}: ends at byte {offset}, but {shown(place.spec.name)} needs {len(view)} more; it was cut short"
            )
        view, offset = view[got:], offset + got
    return out


def hash_range(fd: int, place: Placed, start: int, stop: int) -> int:
    """Hash of the stored bytes of `[start, stop)`, read in chunks."""
    step = max(1, CHUNK // place.spec.itemsize)
    digest = 0
    for begin in range(start, stop, step):
        digest = zlib.crc32(raw_bytes(read_range(fd, place, begin, min(stop, begin + step))), digest)
    return digest


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
