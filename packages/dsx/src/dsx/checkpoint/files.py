"""Moving bytes: ranges of tensors to and from files, with hashes, bounded memory and no silent short transfer."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from .errors import CheckpointCorruptError
from .format import DTYPES, Placed, Slice
from .plan import FilePlan

CHUNK = 16 << 20  # bytes copied from a device or read for hashing at a time


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor, closed at the end."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


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
    out = torch.empty(stop - start, dtype=getattr(torch, DTYPES[place.spec.dtype][0]))
    view = raw_bytes(out)
    offset = place.offset + start * place.spec.itemsize
    while view:
        got = os.preadv(fd, [view[:CHUNK]], offset)
        if got == 0:
            raise CheckpointCorruptError(
                f"{place.file}: ends at byte {offset}, but {place.spec.name!r} needs {len(view)} more; it was cut short"
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


def leftovers(folder: Path, mark: str, tag: str) -> list[Path]:
    """The folders `<mark><tag>-<12 hex digits>` in `folder`: of this tag alone, also where another one begins with the same words."""
    name = re.compile(re.escape(f"{mark}{tag}-") + "[0-9a-f]{12}")
    return sorted(path for path in folder.iterdir() if name.fullmatch(path.name)) if folder.is_dir() else []


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with opened(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as fd:
        write_all(fd, memoryview(text.encode()), 0)
        os.fsync(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)
