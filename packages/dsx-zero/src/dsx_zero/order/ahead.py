"""Gathers ahead of their use, and units that stay gathered between two uses: decided once, when an order
is frozen, and the same on all ranks.

Whether a unit may be gathered early depends on what is in memory then. A rank that looked at its own memory could
decide otherwise than the others, and the ranks would issue gathers and reduces in different orders. So while the ranks
agree, each one says with its need what it holds (`Need`), as a checksum in its words. Where all say the same, it is
known what all of them will hold at that place of the schedule.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .schedule import Kind, Operation, Schedule, elide_gathers, passes

__all__ = ["GatherLimits", "Need", "gathers_ahead"]


@dataclass(frozen=True)
class Need:
    """A rank's words about itself when it needs the gather of a unit.

    Attributes:
        held: the units that it holds at this moment.
        waits: its host would wait for its shard of the unit, which is on a disk.
    """

    held: frozenset[int]
    waits: bool = False

    def checksum(self) -> int:
        """Equal for equal needs, on every machine."""
        return zlib.crc32(struct.pack(f"<?{len(self.held)}i", self.waits, *sorted(self.held)))


@dataclass(frozen=True)
class GatherLimits:
    """Limits on the elements that may be gathered at once. Without `numel` no unit is kept or gathered ahead.

    Attributes:
        numel: elements of each unit, by its index.
        max_reuse_distance: see `elide_gathers`.
        max_live: most gathered elements with which a unit is gathered ahead or kept for reuse. A unit that is needed
            now is gathered in any case.
        prefetch: most elements that are gathered ahead of their use; one unit is always allowed, unless this is 0.
    """

    numel: tuple[int, ...] = ()
    max_reuse_distance: int = 0
    max_live: int = 0
    prefetch: int = 0

    def apply(self, entries: Sequence[Operation], needs: Sequence[Need | None] = ()) -> Schedule:
        """The schedule of these operations, with uses instead of the gathers that are not necessary and with the
        gathers that run ahead.

        Args:
            entries: what all ranks asked for.
            needs: for every entry what all ranks said alike with it; None where they did not, or where it is no gather.
        """
        schedule = Schedule(tuple(entries))
        if not self.numel:
            return schedule
        if self.max_reuse_distance > 0:
            schedule = elide_gathers(
                schedule, self.numel, max_reuse_distance=self.max_reuse_distance, max_live=self.max_live
            )
        return replace(schedule, ahead=gathers_ahead(schedule, needs, self)) if self.prefetch > 0 else schedule


def gathers_ahead(
    schedule: Schedule, needs: Sequence[Need | None], limits: GatherLimits
) -> tuple[tuple[int, ...], ...]:
    """For every place of the schedule the places of the gathers that are issued when a rank has come to it.

    Gathers keep their order. None is issued ahead across the end of a backward, after which parameters may change, nor
    while its unit is still held, nor if the host would wait for it.
    """
    entries, kept = schedule.entries, _kept(schedule)
    gathers = [place for place, entry in enumerate(entries) if entry.kind is Kind.GATHER]
    found: list[tuple[int, ...]] = [()] * len(entries)
    early: set[int] = set()  # units that are gathered and not needed yet
    following = 0
    for place, entry in enumerate(entries):
        if entry.kind is Kind.GATHER:
            early.discard(entry.unit)
            following += following < len(gathers) and gathers[following] == place
        elif entry.kind is not Kind.USE:
            continue
        need = needs[place] if place < len(needs) else None
        if need is None:
            continue
        held, now = need.held | {entry.unit} | kept[place], list[int]()
        while following < len(gathers) and gathers[following] < schedule.backward_ends[place]:
            wanted, unit = needs[gathers[following]], entries[gathers[following]].unit
            if wanted is None or wanted.waits or unit in held or unit in early or not _fits(unit, held, early, limits):
                break
            early.add(unit)
            now.append(gathers[following])
            following += 1
        found[place] = tuple(now)
    return tuple(found)


def _fits(unit: int, held: frozenset[int], early: set[int], limits: GatherLimits) -> bool:
    numel = limits.numel
    if sum(numel[other] for other in held | early) + numel[unit] > limits.max_live:
        return False
    return not early or sum(numel[other] for other in early) + numel[unit] <= limits.prefetch


def _kept(schedule: Schedule) -> list[frozenset[int]]:
    """For every place the units that are kept over it until their next use."""
    kept: list[set[int]] = [set() for _ in schedule.entries]
    for start, stop in passes(schedule.entries):
        last: dict[int, int] = {}
        for place in range(start, stop):
            entry = schedule.entries[place]
            if entry.kind is Kind.USE:
                for between in range(last[entry.unit], place):
                    kept[between].add(entry.unit)
            if entry.kind in (Kind.GATHER, Kind.USE):
                last[entry.unit] = place
    return [frozenset(units) for units in kept]
