"""Process groups of our own beside the user's: the same ranks, for collectives that run beside others and for words in
host memory.

A group costs sockets, threads and, over shared memory, mappings. It is not destroyed when its model goes: peers may
still be reading from it, and shards may lie in its memory. It is lent: `release` hands it back, and the next model over
the same ranks takes it again, so that a process that builds and drops models holds as many groups as it has models at
once.

Only members make a group, so that disjoint sets of ranks may shard models at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import dsx_comm
from dsx_comm.discovery import discover

__all__ = ["LentGroups", "join_launched_ranks"]

_IDLE: WeakKeyDictionary[Any, dict[tuple[str, int], Any]] = WeakKeyDictionary()
"""By the user's group: what was handed back, by kind and a number that is the same on all ranks."""

_MADE: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many groups were made beside the user's group."""


def join_launched_ranks() -> None:
    """Make the default process group if a launcher started this process as one of several ranks and there is none yet.

    Without it each rank would work for itself: a model that was meant to be divided would be whole everywhere, and
    train alone.
    """
    if dsx_comm.is_initialized():
        return
    found = discover(os.environ)
    if found is not None and found.world_size > 1:
        dsx_comm.init_distributed()


class LentGroups:
    """The groups of one model beside those of its rank sets."""

    def __init__(self) -> None:
        # by the user's group, the object itself: the default group may be made anew
        self._lent: dict[Any, dict[tuple[str, int], Any]] = {}

    def take_for_gathers(self, ranks: dsx_comm.RankSet) -> dsx_comm.RankSet:
        """The rank set with a group of its own for gathers (collective). One of one rank needs none."""
        if ranks.size == 1:
            return ranks
        return replace(ranks, gathers=self._take(ranks.group, dsx_comm.get_backend(ranks.group)))

    def take_control(self, ranks: dsx_comm.RankSet) -> Any:
        """A group of these ranks for words of a few bytes in host memory (collective).

        In shared memory where the ranks have that (a rank that ends is named on the others at once), else gloo; gloo
        too where the set's group is.
        """
        if dsx_comm.get_backend(ranks.group) == "gloo":
            return self._take(ranks.group, "control", "gloo")
        return self._take(ranks.group, "control", "dsx", dsx_comm.ShmOptions(slice_bytes=4096, warn=False))

    def take_part(self, ranks: dsx_comm.RankSet, places: Sequence[int], kind: str) -> dsx_comm.RankSet:
        """Some of the ranks of a set, with this one among them, and a group of their own (collective over the set).

        Args:
            ranks: the set.
            places: of the wanted ranks in it, in order. All ranks of the set call; those with equal `places` get one
                group.
            kind: what the group is for, the same word on all ranks.
        """
        held = dsx_comm.get_all_ranks_from_group(ranks.group)
        backend = dsx_comm.get_backend(ranks.group)
        group = self._take(ranks.group, kind, backend, members=[held[place] for place in places])
        return dsx_comm.RankSet(group, list(places).index(ranks.rank), len(places), kind=kind)

    def _take(
        self,
        beside: Any,
        kind: str,
        backend: str | None = None,
        options: dsx_comm.ShmOptions | None = None,
        members: Sequence[int] | None = None,
    ) -> Any:
        """A group of the same ranks as `beside`, or of `members` of them. One that was handed back, if every rank has
        it.
        """
        beside = dsx_comm.get_world_group() if beside is None else beside
        idle = _IDLE.setdefault(beside, {})
        mine = [number for known, number in idle if known == kind]
        everybody: list[Any] = [None] * dsx_comm.get_world_size(beside)
        dsx_comm.all_gather_object(everybody, mine, group=beside)
        common = set(mine).intersection(*everybody)
        if common:
            key = (kind, min(common))
            group = idle.pop(key)
        else:
            key = (kind, _MADE.get(beside, 0))
            _MADE[beside] = key[1] + 1
            ranks = dsx_comm.get_all_ranks_from_group(beside) if members is None else members
            group = dsx_comm.new_group(list(ranks), backend=backend or kind, local=True, options=options)
        self._lent.setdefault(beside, {})[key] = group
        return group

    def give_back(self) -> None:
        """The model is done with them: others may take them. Calling it again does nothing."""
        lent, self._lent = self._lent, {}
        for beside, groups in lent.items():
            _IDLE.setdefault(beside, {}).update(groups)
