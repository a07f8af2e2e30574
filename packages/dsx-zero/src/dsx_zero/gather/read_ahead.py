"""Shards on disk are read into host memory before their gathers ask for them: the first of two tiers of look-ahead.

(The second, from host memory to whole parameters on the device, is the frozen order's: `Order.run_ahead`.) Each rank
reads for itself, so the ranks need not agree. It expects the unit that followed the last two gathers the last time; two
are needed to tell forward from backward. A wrong guess costs a read, and never gives a wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..homes.home import ReadsAhead

__all__ = ["ReadAhead"]

_CHANGED = -1
"""Stands in the sequence of gathers where shards got new values: nothing is read ahead across it."""


class ReadAhead:
    """Reads ahead for one rank.

    Args:
        homes: the shards of each unit that can be read ahead, by the unit's number.
        elements: that may be read and not taken, at most.
        count: homes that may be so, at most.
    """

    def __init__(self, homes: Mapping[int, Sequence[ReadsAhead]], *, elements: int, count: int) -> None:
        self._homes, self._elements, self._count = {u: list(found) for u, found in homes.items()}, elements, count
        self._before, self._last = _CHANGED, _CHANGED
        self._next: dict[tuple[int, int], int] = {}

    def gathers(self, unit: int) -> None:
        """The unit is about to be gathered; what follows it begins to be read with `taken`."""
        if self._homes:
            self._next[self._before, self._last] = unit
            self._before, self._last = self._last, unit

    def taken(self) -> None:
        """It has taken its shards: read what comes next, as far as there is room."""
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

    def holds_up(self, unit: int) -> bool:
        """Whether a gather of the unit makes the host wait for its shards."""
        return any(not home.is_direct for home in self._homes.get(unit, ()))

    def changed(self) -> None:
        """Shards have new values."""
        if self._homes and self._last != _CHANGED:
            self.gathers(_CHANGED)
            self.taken()

    def drop(self) -> None:
        """Give back what was read and not taken."""
        for homes in self._homes.values():
            for home in homes:
                home.forget_ahead()
