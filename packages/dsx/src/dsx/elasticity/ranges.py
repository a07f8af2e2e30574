"""Which bytes of which files: sets of ranges, their union, difference and intersection. Pure arithmetic on integers.

    {"optimizer.safetensors": [(0, 64), (128, 256)]}     bytes 0 to 64 and 128 to 256 of that file

Ranges of a file are ascending, and neither empty nor touching each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Ranges", "intersection", "minus", "total", "union"]

Ranges = dict[str, list[tuple[int, int]]]
"""File -> (first byte, behind the last byte) of each range."""


def union(sets: Iterable[Mapping[str, Iterable[tuple[int, int]]]]) -> Ranges:
    """All bytes that any of `sets` has; they may be in any order and overlap."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for one in sets:
        for file, ranges in one.items():
            by_file.setdefault(file, []).extend((int(start), int(stop)) for start, stop in ranges)
    found = {file: _joined(sorted(ranges)) for file, ranges in by_file.items()}
    return {file: ranges for file, ranges in found.items() if ranges}


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def minus(left: Ranges, right: Ranges) -> Ranges:
    """The bytes of `left` that `right` does not have."""
    found: Ranges = {}
    for file, ranges in left.items():
        rest: list[tuple[int, int]] = []
        taken = right.get(file, [])
        for start, stop in ranges:
            for first, behind in taken:
                if behind <= start or first >= stop:
                    continue
                if first > start:
                    rest.append((start, first))
                start = max(start, behind)
            if start < stop:
                rest.append((start, stop))
        if rest:
            found[file] = rest
    return found


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """The bytes that both have."""
    return minus(left, minus(left, right))


def total(ranges: Ranges) -> int:
    """Number of bytes."""
    return sum(stop - start for parts in ranges.values() for start, stop in parts)
