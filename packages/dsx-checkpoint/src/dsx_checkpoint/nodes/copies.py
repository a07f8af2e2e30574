"""Hashes of parts of tensors by their bytes in files: are two copies equal, and which one is right?

A chunk's hash is the xor of the registers of its parts (`crc.py`), on whichever node they are computed. So four bytes
describe the part of a chunk that a node has, and all nodes together can check whether these are the saved bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..crc import Chunks, Sums
from ..format import FAMILIES, Entry, Placed
from ..planning import WritePlan
from ..spans import Range

__all__ = ["ChunkKey", "Layout", "ChunkRegisters"]

ChunkKey = tuple[str, str, int]
"""Family and name of a tensor, and the number of a chunk."""

ChunkRegisters = dict[ChunkKey, int]


@dataclass(frozen=True)
class _Here:
    """A tensor in a file."""

    family: str
    placed: Placed
    chunks: Chunks

    @property
    def end(self) -> int:
        """The byte of the file behind it."""
        return self.placed.offset + self.placed.spec.nbytes


@dataclass(frozen=True)
class Layout:
    """Which tensors lie where: file -> tensors by ascending place, those without bytes left out."""

    by_file: Mapping[str, tuple[_Here, ...]]
    _starts: Mapping[str, tuple[int, ...]] = field(repr=False)

    @staticmethod
    def of(tensors: Iterable[tuple[str, Placed, Chunks]]) -> Layout:
        """Of family, place and chunks of each tensor."""
        found: dict[str, list[_Here]] = {}
        for family, placed, chunks in tensors:
            if placed.spec.nbytes:
                found.setdefault(placed.file, []).append(_Here(family, placed, chunks))
        by_file = {file: tuple(sorted(here, key=lambda one: one.placed.offset)) for file, here in found.items()}
        return Layout(by_file, {file: tuple(one.placed.offset for one in here) for file, here in by_file.items()})

    @staticmethod
    def of_plan(plan: WritePlan) -> Layout:
        """Of a save that is being written."""
        return Layout.of(
            (family, placed, plan.chunks(family, name))
            for family, members in plan.placed.items()
            for name, placed in members.items()
        )

    @staticmethod
    def of_index(tensors: Mapping[str, Mapping[str, Entry]]) -> Layout:
        """Of a checkpoint that is there."""
        return Layout.of(
            (family, entry.placed, entry.chunks) for family in FAMILIES for entry in tensors[family].values()
        )

    def parts(self, file: str, begin: int, end: int) -> Iterator[tuple[ChunkKey, int, int]]:
        """The parts of chunks that lie in bytes [begin, end) of a file: the chunk, and the bytes of the file."""
        here = self.by_file.get(file, ())
        number = max(0, bisect_right(self._starts.get(file, ()), begin) - 1)
        while number < len(here) and here[number].placed.offset < end:
            one = here[number]
            offset, first, last = one.placed.offset, max(begin, one.placed.offset), min(end, one.end)
            while first < last:
                chunk = one.chunks.at(first - offset)
                stop = min(last, offset + one.chunks.span(chunk)[1])
                yield (one.family, one.placed.spec.name, chunk), first, stop
                first = stop
            number += 1

    def place_of(self, file: str, begin: int) -> tuple[Placed, Chunks]:
        """The tensor in which a byte of a file lies."""
        one = self.by_file[file][bisect_right(self._starts[file], begin) - 1]
        return one.placed, one.chunks

    def add(self, registers: ChunkRegisters, item: Range, data: memoryview) -> None:
        """Take the bytes of a range of a file into the registers of the chunks."""
        file, begin, end = item
        for key, first, stop in self.parts(file, begin, end):
            placed, chunks = self.place_of(file, first)
            sums = Sums(chunks)
            sums.add(first - placed.offset, data[first - begin : stop - begin])
            registers[key] = registers.get(key, 0) ^ sums.registers()[key[2]]
