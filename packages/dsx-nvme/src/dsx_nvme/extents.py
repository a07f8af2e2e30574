"""Ranges of free bytes: allocated first fit, and joined with their neighbours when they are freed. Pure arithmetic.

`BufferPool` divides its memory with it, `TensorStore` its data file.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

__all__ = ["FreeRanges"]


class FreeRanges:
    """Free ranges as (start, size), sorted by start and never adjacent."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = list(ranges)

    @property
    def total(self) -> int:
        """Bytes that are free."""
        return sum(size for _, size in self._ranges)

    def copy(self) -> FreeRanges:
        """A copy of the ranges, to try allocations on."""
        return FreeRanges(self._ranges)

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the first range that is large enough; returns their start, or None if none is."""
        for index, (start, room) in enumerate(self._ranges):
            if room >= size:
                self._ranges[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Return [start, start + size) to the free ranges."""
        index = bisect.bisect_left(self._ranges, (start, 0))
        if index < len(self._ranges) and start + size == self._ranges[index][0]:
            size += self._ranges.pop(index)[1]
        if index > 0 and sum(self._ranges[index - 1]) == start:
            start, before = self._ranges.pop(index - 1)
            size += before
            index -= 1
        self._ranges.insert(index, (start, size))

    def cut(self, end: int) -> int:
        """Remove the free range that ends at `end`. Returns its start, or `end` if there is no such range."""
        if self._ranges and sum(self._ranges[-1]) == end:
            return self._ranges.pop()[0]
        return end
