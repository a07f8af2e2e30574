"""Checks whether the files of a checkpoint have the bytes that were written.

There are two separate checks: of sizes and headers of files (`check_files`, cheap, at every load), and of the bytes of
tensors. The bytes that a load reads are hashed while they are read (`Verification`), so that nothing is read twice: if
several ranks read parts of one chunk, they combine their registers (`crc.py`) instead of each reading the whole chunk.
`verify_all` reads everything.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .boxes import Region, why_not_a_tiling
from .crc import Sums
from .errors import CheckpointCorruptError, shown
from .files import opened, register_of_chunk
from .folder import foreign_files
from .format import FAMILIES, INDEX_NAME, NODE_NAME, Entry, Index
from .ranks import Ranks
from .spans import Spans
from .version1 import own_files

Key = tuple[str, str]  # family and name of a tensor
Parts = dict[Region, dict[int, int]]  # registers of the chunks that a region has a part of


@dataclass(frozen=True)
class Verified:
    """What was read without finding anything wrong. `foreign`: files in the folder that dsx did not write."""

    folder: Path
    tensors: int
    files: int
    nbytes: int
    foreign: tuple[str, ...]


def check_files(folder: Path, index: Index) -> None:
    """Compare sizes and headers of all files with the index.

    Raises:
        CheckpointCorruptError: a file is missing, no ordinary file, of another size, or its header is not what was
            written.
    """
    for name, file in index.files.items():
        path = folder / name
        try:
            with opened(path, os.O_RDONLY) as fd:
                size = os.fstat(fd).st_size
                header = os.pread(fd, min(file.header_bytes, size), 0)
        except OSError as error:
            raise CheckpointCorruptError(
                f"{path}: cannot be read ({error}); restore the file or load another tag"
            ) from error
        if size != file.nbytes:
            cut = "it was cut short" if size < file.nbytes else "something was added"
            raise CheckpointCorruptError(f"{path}: has {size} bytes, the index says {file.nbytes}; {cut}")
        if zlib.crc32(header) != file.header_crc:
            raise CheckpointCorruptError(
                f"{path}: its header is not the one that was saved; restore the file or load another tag"
            )


def verify_all(folder: Path, index: Index, progress: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Read every byte of a checkpoint and compare hashes.

    Args:
        progress: called with the bytes that are done, and all there are.

    Raises:
        CheckpointCorruptError: the first thing that is not as it was written.
    """
    check_files(folder, index)
    done, total = 0, sum(entry.spec.nbytes for family in FAMILIES for entry in index.tensors[family].values())
    for family in FAMILIES:
        for entry in index.tensors[family].values():
            verify_chunks(folder, entry, range(len(entry.chunks)))
            done += entry.spec.nbytes
            progress(done, total)
    own = {INDEX_NAME, NODE_NAME, *index.files, *(own_files(index) if index.version == 1 else ())}
    return Verified(
        folder=folder,
        tensors=sum(len(index.tensors[family]) for family in FAMILIES),
        files=len(index.files),
        nbytes=sum(file.nbytes for file in index.files.values()),
        foreign=foreign_files(folder, own),
    )


def verify_part(
    folder: Path, index: Index, spans: Spans, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Read what one node has of a checkpoint (`nodes/`) and compare hashes, as far as whole chunks are there.

    Args:
        spans: the bytes that are there.
        progress: called with the bytes that are done, and all there are.

    Returns:
        How many bytes of tensors were compared.

    Raises:
        CheckpointCorruptError: the first thing that is not as it was written.
    """
    check_files(folder, index)
    done = 0
    for family in FAMILIES:
        for entry in index.tensors[family].values():
            numbers = [number for number in range(len(entry.chunks)) if _is_there(entry, number, spans)]
            verify_chunks(folder, entry, numbers)
            done += sum(stop - start for start, stop in map(entry.chunks.span, numbers))
            progress(done, spans.nbytes)
    return done


def _is_there(entry: Entry, number: int, spans: Spans) -> bool:
    begin, end = (entry.placed.offset + edge for edge in entry.chunks.span(number))
    return spans.covers(entry.placed.file, begin, end)


def verify_chunks(folder: Path, entry: Entry, numbers: Iterable[int]) -> None:
    """Read chunks of a tensor and compare their hashes. Raises `CheckpointCorruptError`."""
    with opened(folder / entry.placed.file, os.O_RDONLY) as fd:
        for number in numbers:
            if register_of_chunk(fd, entry.placed, entry.chunks, number) != entry.chunks.expected(number):
                _report(folder, entry, number)


def _report(folder: Path, entry: Entry, number: int) -> NoReturn:
    start, stop = entry.chunks.span(number)
    raise CheckpointCorruptError(
        f"{folder / entry.placed.file}: bytes {start} to {stop} of {shown(entry.spec.name)} are not those that were "
        "saved; restore the file or load another tag"
    )


class Verification:
    """The hashes of what a reader reads.

    Chunks that one region covers wholly are compared at once. Of others the registers are kept, until `settle` puts
    those of all ranks together, or `settle_alone` reads these chunks.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._open: dict[Key, Parts] = {}
        self._good: dict[Key, set[int]] = {}  # chunks that were compared

    def _entry(self, key: Key) -> Entry:
        return self._index.tensors[key[0]][key[1]]

    def add(self, key: Key, region: Region, sums: Sums) -> None:
        """Take in a region that was read. Raises `CheckpointCorruptError` where a whole chunk of it is wrong."""
        entry, complete, registers = self._entry(key), sums.complete(), sums.registers()
        for number in complete:
            if registers[number] != entry.chunks.expected(number):
                _report(self._folder, entry, number)
        good = self._good.setdefault(key, set())
        good |= complete
        if region.numel != entry.spec.numel:
            parts = {number: register for number, register in registers.items() if number not in good}
            self._open.setdefault(key, {})[region] = parts

    def settle_alone(self) -> None:
        """Read the chunks of which only parts have been read so far. Raises `CheckpointCorruptError`."""
        for key in list(self._open):
            self._settle_alone(key)
        self._open.clear()

    def _settle_alone(self, key: Key) -> None:
        numbers = {number for parts in self._open[key].values() for number in parts} - self._good[key]
        verify_chunks(self._folder, self._entry(key), sorted(numbers))
        self._good[key] |= numbers

    def settle(self, ranks: Ranks) -> None:
        """Compare the chunks that ranks have read together; collective, and the same error on all ranks.

        Only where the ranks' regions do not make up the whole tensor does a rank read a chunk for itself.
        """
        everyone = ranks.gather(self._open)
        merged: dict[Key, Parts] = {}
        contradiction = None
        for parts_of in everyone:
            for key, regions in parts_of.items():
                for region, parts in regions.items():
                    if merged.setdefault(key, {}).setdefault(region, parts) != parts:
                        contradiction = contradiction or (key, min(parts, default=0))
        if contradiction is not None:  # two ranks have read one region, and not the same bytes
            _report(self._folder, self._entry(contradiction[0]), contradiction[1])
        alone = [key for key, regions in sorted(merged.items()) if not self._compare(key, regions)]
        if alone:
            mine = [key for key in alone if key in self._open]
            ranks.all_or_none(f"verifying {self._folder}", lambda: [self._settle_alone(key) for key in mine])
        self._open.clear()

    def _compare(self, key: Key, regions: Mapping[Region, Mapping[int, int]]) -> bool:
        """Compare what all ranks have read of a tensor; False if that is not the whole tensor, once."""
        entry = self._entry(key)
        if why_not_a_tiling(entry.spec.shape, regions):
            return False
        registers: dict[int, int] = {}
        for parts in regions.values():
            for number, register in parts.items():
                registers[number] = registers.get(number, 0) ^ register
        for number, register in registers.items():
            if register != entry.chunks.expected(number):
                _report(self._folder, entry, number)
        return True
