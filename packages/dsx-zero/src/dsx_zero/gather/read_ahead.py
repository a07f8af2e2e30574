"""Reads shards from disk into host memory before their gathers need them: the first of two levels of prefetching.

(The second level gathers whole parameters before their use, by the frozen order: `order.replay`.) Each rank reads its
own shards, so the ranks need not agree. The next unit is predicted from the last two gathers: it is the one that
followed them the last time. Two gathers are needed to tell forward from backward. A wrong prediction costs a read, and
never gives a wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..homes.home import ReadsAhead

__all__ = ["ReadAhead"]

_CHANGED = -1
"""Marks in the sequence of gathers that shards got new values. Nothing is read ahead across it."""


class ReadAhead:
    """Reads one rank's shards ahead.

    Args:
        homes: the homes of the shards of each unit that can be read ahead, by the unit's index.
        elements: most elements that may be read and not used yet.
        count: most homes that may be read and not used yet.
    """

    def __init__(self, homes: Mapping[int, Sequence[ReadsAhead]], *, elements: int, count: int) -> None:
        self._homes, self._elements, self._count = {u: list(found) for u, found in homes.items()}, elements, count
        self._before, self._last = _CHANGED, _CHANGED
        self._next: dict[tuple[int, int], int] = {}

    def note_gather(self, unit: int) -> None:
        """Note that the unit is about to be gathered. `read_next` then reads the shards of the units that follow."""
        if self._homes:
            self._next[self._before, self._last] = unit
            self._before, self._last = self._last, unit

    def read_next(self) -> None:
        """The gather has taken its shards: read those of the next units, as far as the limits allow."""
        ahead = [home for homes in self._homes.values() for home in homes if home.is_ahead] if self._homes else []
        elements, count = sum(home.numel for home in ahead), len(ahead)
        before, last, seen = self._before, self._last, set[int]()
        while (unit := self._next.get((before, last), _CHANGED)) != _CHANGED and unit not in seen:
            seen.add(unit)
            for home in self._homes.get(unit, ()):
                if home.is_ahead:
                    continue
                elements, count = elements + home.numel, count + 1
                if elements > self._elements or count > self._count:
                    return
                home.read_ahead()
            before, last = last, unit

    def blocks_host(self, unit: int) -> bool:
        """Whether a gather of the unit blocks the host until its shards are read."""
        return any(not home.is_direct for home in self._homes.get(unit, ()))

    def values_changed(self) -> None:
        """Note that shards have new values."""
        if self._homes and self._last != _CHANGED:
            self.note_gather(_CHANGED)
            self.read_next()

    def drop(self) -> None:
        """Free what was read and not used."""
        for homes in self._homes.values():
            for home in homes:
                home.forget_ahead()
