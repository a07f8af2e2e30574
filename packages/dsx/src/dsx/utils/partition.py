"""Cuts a list of layers into consecutive parts of equal length or equal weight.

Pure functions over numbers; a result is the list of the parts' borders, `parts + 1` of them: part i holds the items
from `borders[i]` up to, not including, `borders[i + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..errors import DsxError

__all__ = ["PartitionError", "partition_balanced", "partition_uniform"]


class PartitionError(DsxError, ValueError):
    """A list that cannot be cut as asked."""


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the borders of parts whose lengths differ by at most one item; the first parts are the longer ones.

    With fewer items than parts, each item is a part, and the other parts are empty.

    Raises:
        PartitionError: a negative number of items, or less than one part.
    """
    _check(num_items, num_parts)
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    chunk, rest = divmod(num_items, num_parts)
    return [part * chunk + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the borders of parts with the smallest difference between the heaviest and the lightest.

    This is dynamic programming: for every number of leading items and of parts it keeps the split with the smallest
    difference between the largest and the smallest sum so far; of equally good splits the one with the later border.
    O(n² parts).

    Args:
        weights: weight of every item, at least 0.
        num_parts: number of parts, at least 1.

    Raises:
        PartitionError: a negative weight, or less than one part.
    """
    count = len(weights)
    _check(count, num_parts)
    if any(weight < 0 for weight in weights):
        raise PartitionError(f"partition_balanced: got a weight of {min(weights)}, expected at least 0")
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    before = [0.0, *accumulate(weights)]
    infinite = float("inf")
    # best[items] = (difference, largest sum, smallest sum, borders) of the parts so far
    start: tuple[float, float, float, list[int]] = (0.0, -infinite, infinite, [0])
    best = {0: start}
    for _ in range(num_parts):
        following: dict[int, tuple[float, float, float, list[int]]] = {}
        for end in range(count + 1):
            for begin in range(end):  # so no part is empty if there are enough items
                if begin not in best:
                    continue
                _, largest, smallest, borders = best[begin]
                weight = before[end] - before[begin]
                largest, smallest = max(largest, weight), min(smallest, weight)
                if end not in following or following[end][0] >= largest - smallest:
                    following[end] = (largest - smallest, largest, smallest, [*borders, end])
        best = following
    return best[count][3]


def _check(items: int, parts: int) -> None:
    if items < 0 or parts < 1:
        raise PartitionError(f"got {items} items and {parts} parts, expected at least 0 items and 1 part")
