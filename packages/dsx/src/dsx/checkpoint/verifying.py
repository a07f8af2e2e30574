"""Is a checkpoint what was written? The cheap part (sizes and headers), which every load does, and the whole (every byte)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointCorruptError, shown
from .files import hash_range, opened
from .folder import foreign_files
from .format import INDEX_NAME, MODEL, WEIGHT_MAP_NAME, Index, Placed
from .plan import FilePlan, plan_file


@dataclass(frozen=True)
class Verified:
    """What was read without finding anything wrong. `foreign`: files in the folder that dsx did not write, left alone."""

    folder: Path
    tensors: int
    files: int
    bytes: int
    foreign: tuple[str, ...]


def check_files(folder: Path, index: Index) -> tuple[FilePlan, ...]:
    """Compare sizes and safetensors headers of all files with the index, before anything else is read or allocated.

    Raises:
        CheckpointCorruptError: a file is missing, no ordinary file, of another size, or its header says something else.
    """
    plans = tuple(_planned(index))
    for plan in plans:
        path = folder / plan.name
        try:
            with opened(path, os.O_RDONLY) as fd:
                size = os.fstat(fd).st_size
                header = os.pread(fd, len(plan.header), 0)
        except OSError as error:
            raise CheckpointCorruptError(
                f"{path}: cannot be read ({error}); restore the file or load another tag"
            ) from error
        if size != plan.size:
            cut = "it was cut short" if size < plan.size else "something was added"
            raise CheckpointCorruptError(f"{path}: has {size} bytes, the index says {plan.size}; {cut}")
        if header != plan.header:
            raise CheckpointCorruptError(
                f"{path}: its header does not say what the index says; restore the file or load another tag"
            )
    return plans


def _planned(index: Index) -> Iterator[FilePlan]:
    by_file: dict[str, list[Placed]] = {}
    for placed in index.tensors.values():
        by_file.setdefault(placed.file, []).append(placed)
    for name, tensors in by_file.items():
        plan = plan_file(name, [placed.spec for placed in tensors])
        if list(plan.tensors) != tensors:
            raise CheckpointCorruptError(
                f"{INDEX_NAME}: the places of the tensors in {shown(name)} are not those of a file"
            )
        yield plan


def verify_all(folder: Path, index: Index) -> Verified:
    """Read every byte of a checkpoint and compare hashes.

    Raises:
        CheckpointCorruptError: the first thing that is not as it was written.
    """
    plans = check_files(folder, index)
    for plan in plans:
        with opened(folder / plan.name, os.O_RDONLY) as fd:
            for placed in plan.tensors:
                for part in index.slices[placed.spec.name]:
                    check_slice(fd, folder, placed, part.start, part.stop, part.hash)
    own = {INDEX_NAME, *(plan.name for plan in plans)}
    if sum(plan.name.startswith(MODEL) for plan in plans) > 1:
        own.add(WEIGHT_MAP_NAME)
    size = sum(plan.size for plan in plans)
    return Verified(folder, len(index.tensors), len(plans), size, foreign_files(folder, own))


def check_slice(fd: int, folder: Path, placed: Placed, start: int, stop: int, expected: int) -> None:
    """Read and hash elements `[start, stop)`. Raises `CheckpointCorruptError` unless the hash is `expected`."""
    if hash_range(fd, placed, start, stop) != expected:
        raise CheckpointCorruptError(
            f"{folder / placed.file}: the bytes of {placed.spec.name!r}, elements {start} to {stop}, are not "
            "those that were saved; restore the file or load another tag"
        )
