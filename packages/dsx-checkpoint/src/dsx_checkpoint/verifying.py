"""Checks whether the files of a checkpoint have the bytes that were written.

There are two separate checks: of sizes and headers of files (`check_files`, cheap, at every load), and of the bytes of
tensors. The bytes that a load reads are hashed while they are read (`Verification`), so that nothing is read twice: if
several ranks read parts of one chunk, their registers are put together on the way to rank 0 (`reads.py`), instead of
each rank reading the whole chunk. `verify_all` reads everything, on several threads.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .boxes import Region
from .crc import Sums
from .errors import CheckpointCorruptError, shown
from .files import opened, register_of_chunk
from .folder import foreign_files
from .format import FAMILIES, INDEX_NAME, NODE_NAME, Entry, Index
from .ranks import Ranks
from .reads import Reads
from .spans import Spans
from .version1 import own_files

Key = tuple[str, str]  # family and name of a tensor
_MOST_THREADS = 16
_CHUNKS_AT_ONCE = 16  # of one tensor, by one thread
Parts = dict[Region, dict[int, int]]  # registers of the chunks that a region has a part of


@dataclass(frozen=True)
class Verified:
    """The files that were read and are right. `foreign`: files in the folder that dsx did not write."""

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
    entries = [entry for family in FAMILIES for entry in index.tensors[family].values()]
    total = sum(entry.spec.nbytes for entry in entries)
    _verify_side_by_side(folder, [(entry, range(len(entry.chunks))) for entry in entries], total, progress)
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
    there = [
        (entry, [number for number in range(len(entry.chunks)) if _is_there(entry, number, spans)])
        for family in FAMILIES
        for entry in index.tensors[family].values()
    ]
    return _verify_side_by_side(folder, there, spans.nbytes, progress)


def _verify_side_by_side(
    folder: Path, wanted: Iterable[tuple[Entry, Sequence[int]]], total: int, progress: Callable[[int, int], None]
) -> int:
    """Compare chunks of tensors on several threads: reading and hashing need no lock of the interpreter.

    Returns:
        How many bytes were compared.

    Raises:
        CheckpointCorruptError: the first thing, in the given order, that is not as it was written.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    running: deque[tuple[Future[None], int]] = deque()
    done = 0

    def finish_first() -> None:
        nonlocal done
        future, nbytes = running.popleft()
        future.result()
        done += nbytes
        progress(done, total)

    with ThreadPoolExecutor(threads, thread_name_prefix="dsx-verify") as pool:
        try:
            for entry, numbers in wanted:
                for at in range(0, len(numbers), _CHUNKS_AT_ONCE):
                    some = numbers[at : at + _CHUNKS_AT_ONCE]
                    nbytes = sum(stop - start for start, stop in map(entry.chunks.span, some))
                    running.append((pool.submit(verify_chunks, folder, entry, some), nbytes))
                    if len(running) >= 4 * threads:  # so that few wait, however large the checkpoint is
                        finish_first()
            while running:
                finish_first()
        except BaseException:
            for future, _ in running:
                future.cancel()
            raise
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
            parts = {number: register for number, register in registers.items() if number not in complete}
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
        keys = [(family, name) for family in FAMILIES for name in self._index.tensors[family]]  # the same on all ranks
        entries = [self._entry(key) for key in keys]
        doing = f"verifying {self._folder}"

        def answer(found: Reads) -> list[list[int]]:
            alone = found.judge(entries.__getitem__)
            if found.wrong:
                tensor, chunk = min(found.wrong)
                _report(self._folder, entries[tensor], chunk)
            return [alone] * ranks.world_size

        alone = ranks.joined_first(
            doing, lambda: self._read(keys), lambda one, other: Reads.joined(one, other, entries.__getitem__), answer
        )
        if alone:
            mine = [keys[number] for number in alone if keys[number] in self._open]
            ranks.keep(doing, lambda: [self._settle_alone(key) for key in mine])
        self._open.clear()

    def _read(self, keys: Sequence[Key]) -> Reads:
        """The parts that this rank has read, of tensors that it has not read whole."""
        numbers = {key: number for number, key in enumerate(keys)} if self._open else {}
        found = Reads()
        for key, regions in self._open.items():
            for region, parts in regions.items():
                found.add(numbers[key], region, parts)
        return found
