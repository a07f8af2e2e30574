"""The nearest known name for a mistyped one.

There are two rules. The first: the fewest single-character edits (insert, delete, replace, swap neighbours). If no name
is close, the second: a known name that contains the given one or is contained in it (``prefetch_bucket_size`` for
``stage3_prefetch_bucket_size``). All names that are equally near are returned, because one guess alone could mislead.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["edits", "nearest"]

_LONGEST = 100
"""No known name is nearly as long. A longer name is not compared, because that takes time in proportion to its length
times that of every known name.
"""


def edits(left: str, right: str) -> int:
    """Return the number of single-character edits between two words (optimal string alignment distance)."""
    before_last: list[int] = []
    last = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before_last, last = last, row
    return last[-1]


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return at most ``limit`` known names that are nearest to ``name``, in alphabetical order; empty if none is
    near.
    """
    if len(name) > _LONGEST:
        return []
    names = sorted(set(known))
    lowered = name.lower()
    tolerated = max(2, len(name) // 3) if len(name) > 2 else 1
    ranked = sorted((edits(lowered, other.lower()), other) for other in names)
    if ranked and ranked[0][0] <= tolerated:
        best = ranked[0][0]
        return [other for distance, other in ranked if distance == best][:limit]
    if len(name) < 4:
        return []
    contained = [other for other in names if lowered in other.lower() or (other.lower() in lowered and len(other) > 3)]
    return sorted(contained, key=lambda other: (abs(len(other) - len(name)), other))[:limit]
