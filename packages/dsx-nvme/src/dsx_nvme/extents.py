"""Ranges of free bytes, given out first fit and joined with their neighbours when they come back: pure arithmetic.

`BufferPool` cuts its memory with it, `TensorStore` its data file.
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
        """The same ranges, to try something out."""
        return FreeRanges(self._ranges)

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the first range that has them; its start, or None when no range has."""
        for index, (start, room) in enumerate(self._ranges):
            if room >= size:
                self._ranges[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Give [start, start + size) back."""
        index = bisect.bisect_left(self._ranges, (start, 0))
        if index < len(self._ranges) and start + size == self._ranges[index][0]:
            size += self._ranges.pop(index)[1]
        if index > 0 and sum(self._ranges[index - 1]) == start:
            start, before = self._ranges.pop(index - 1)
            size += before
            index -= 1
        self._ranges.insert(index, (start, size))

    def cut(self, end: int) -> int:
        """Remove the range that reaches up to `end`. Returns where it began, or `end` when there is no such range."""
        if self._ranges and sum(self._ranges[-1]) == end:
            return self._ranges.pop()[0]
        return end
