"""Hashes of parts of tensors by their bytes in files: are two copies equal, and which one is right?

A chunk's hash is the xor of the registers of its parts (`crc.py`), on whichever node they are computed. So four bytes
describe the part of a chunk that a node has, and all nodes together can check whether these are the saved bytes.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from ..crc import Chunks, Sums
from ..format import FAMILIES, Entry, Index, Placed, TensorSpec
from ..planning import WritePlan
from ..spans import Range

__all__ = ["HEADER", "ChunkKey", "ChunkRegisters", "Layout"]

ChunkKey = tuple[str, str, int]
"""Family and name of a tensor, and the number of a chunk."""

HEADER = "header"
"""Used like a family: the header of a file is one chunk of bytes, under the name of the file."""

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
    """The tensors of each file: file -> tensors by ascending place, those without bytes left out."""

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
    def of_index(index: Index) -> Layout:
        """Of a checkpoint that is there, with the headers of its files."""
        sizes = {name: (file.header_bytes, file.header_crc) for name, file in index.files.items() if file.header_bytes}
        headers = (
            (HEADER, Placed(TensorSpec(name, "U8", (size,)), name, 0), Chunks.grid(size, size, [crc]))
            for name, (size, crc) in sizes.items()
        )
        tensors = (
            (family, entry.placed, entry.chunks) for family in FAMILIES for entry in index.tensors[family].values()
        )
        return Layout.of(chain(headers, tensors))

    @functools.cached_property
    def as_bytes(self) -> Mapping[tuple[str, str], Entry]:
        """Family and name of each tensor -> the same bytes as a tensor of numbers of 8 bits, in the order of places."""
        return {
            (one.family, one.placed.spec.name): Entry(
                Placed(TensorSpec(one.placed.spec.name, "U8", (one.placed.spec.nbytes,)), file, one.placed.offset),
                one.chunks,
            )
            for file, here in self.by_file.items()
            for one in here
        }

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
