"""Bytes of files: for each file, sorted ranges `(begin, end)` that neither touch nor overlap.

    have = Spans.of([("model.safetensors", 0, 100), ("model.safetensors", 100, 150)])
    have == Spans({"model.safetensors": ((0, 150),)})

Pure arithmetic.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import columns
from .boxes import Region
from .format import Placed

__all__ = ["PackedRanges", "Range", "Spans", "pack_ranges", "spans_of_region", "unpack_ranges"]

Range = tuple[str, int, int]
"""File, first byte, and the byte behind the last."""


@dataclass(frozen=True)
class Spans:
    """A set of bytes of named files. Supports `|`, `-`, `&` and iteration over `Range`s."""

    by_file: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @staticmethod
    def of(ranges: Iterable[Range]) -> Spans:
        """The union of any ranges; empty ones count for nothing."""
        found: dict[str, list[tuple[int, int]]] = {}
        for file, begin, end in ranges:
            if begin < end:
                found.setdefault(file, []).append((begin, end))
        return Spans({file: tuple(_merged(sorted(items))) for file, items in sorted(found.items())})

    def __iter__(self) -> Iterator[Range]:
        for file, items in self.by_file.items():
            for begin, end in items:
                yield file, begin, end

    def __bool__(self) -> bool:
        return any(self.by_file.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(end - begin for _, begin, end in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, pack_ranges(self)

    def __or__(self, other: Spans) -> Spans:
        return Spans.of([*self, *other])

    def __and__(self, other: Spans) -> Spans:
        return Spans.of(
            (file, begin, end)
            for file, items in self.by_file.items()
            for begin, end in _common(items, other.by_file.get(file, ()))
        )

    def __sub__(self, other: Spans) -> Spans:
        return Spans.of(
            (file, begin, end)
            for file, items in self.by_file.items()
            for begin, end in _without(items, other.by_file.get(file, ()))
        )

    def covers(self, file: str, begin: int, end: int) -> bool:
        """Are all bytes of one range there?"""
        items = self.by_file.get(file, ())
        number = bisect_right(items, begin, key=lambda item: item[0]) - 1
        return begin >= end or (number >= 0 and end <= items[number][1])

    def pieces(self, most: int) -> Iterator[Range]:
        """The ranges, cut into pieces of at most so many bytes."""
        for file, begin, end in self:
            for at in range(begin, end, most):
                yield file, at, min(end, at + most)


PackedRanges = tuple[tuple[str, ...], bytes]
"""Ranges as they are sent: the names of files, and columns of numbers (`columns`)."""

_WIDTH = 3


def pack_ranges(ranges: Iterable[Range]) -> PackedRanges:
    """Ranges as a few bytes, in the given order."""
    numbers: dict[str, int] = {}
    rows = array("q")
    for file, begin, end in ranges:
        rows.extend((numbers.setdefault(file, len(numbers)), begin, end))
    return tuple(numbers), columns.to_bytes(rows, _WIDTH)


def unpack_ranges(files: Sequence[str], data: bytes) -> list[Range]:
    """The ranges."""
    numbers = iter(columns.from_bytes(data, _WIDTH))
    return [(files[file], begin, end) for file, begin, end in zip(numbers, numbers, numbers)]


def _restored(files: Sequence[str], data: bytes) -> Spans:
    found: dict[str, list[tuple[int, int]]] = {}
    for file, begin, end in unpack_ranges(files, data):
        found.setdefault(file, []).append((begin, end))
    return Spans({file: tuple(items) for file, items in found.items()})


def spans_of_region(placed: Placed, region: Region) -> Iterator[Range]:
    """The bytes of a tensor's region in its file."""
    size = placed.spec.itemsize
    for run in region.runs(placed.spec.shape):
        begin = placed.offset + run.at * size
        yield placed.file, begin, begin + run.numel * size


def _merged(items: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in items:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    left = right = 0
    while left < len(one) and right < len(other):
        begin, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if begin < end:
            yield begin, end
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1


def _without(items: tuple[tuple[int, int], ...], holes: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    first = 0
    for begin, end in items:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        number = first
        while number < len(holes) and holes[number][0] < end:
            if begin < holes[number][0]:
                yield begin, holes[number][0]
            begin = holes[number][1]
            number += 1
        if begin < end:
            yield begin, end
