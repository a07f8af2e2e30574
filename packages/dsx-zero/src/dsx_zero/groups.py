"""Auxiliary process groups: further groups of the ranks of the user's group, for collectives that run at the same time
as others, and for the small messages in host memory by which the ranks agree.

A group costs sockets, threads and, over shared memory, mappings. It is not destroyed when its model goes: peers may
still be reading from it, and shards may lie in its memory. Instead `release` gives it back, and the next model over the
same ranks takes it again. So a process that builds and drops models has as many groups as it has models at once.

Only members make a group, so that disjoint sets of ranks may shard models at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import dsx_comm

__all__ = ["AuxiliaryGroups"]

_IDLE: WeakKeyDictionary[Any, dict[tuple[str, int], Any]] = WeakKeyDictionary()
"""For each of the user's groups the auxiliary groups that were given back, by kind and a number that all ranks share.
"""

_MADE: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The number of auxiliary groups that were made for the user's group."""


class AuxiliaryGroups:
    """The auxiliary groups of one model.

    Args:
        device_type: where all its parameters are: groups for gathers, rows and norms make no connections for tensors of
            other devices. Empty: wherever the user's group carries tensors.
    """

    def __init__(self, device_type: str = "") -> None:
        self._device_type = device_type
        # by the user's group, the object itself: the default group may be made again
        self._taken: dict[Any, dict[tuple[str, int], Any]] = {}

    def take_for_gathers(self, ranks: dsx_comm.RankSet) -> dsx_comm.RankSet:
        """The rank set with a group of its own for gathers (collective). A set of one rank needs none."""
        if ranks.size == 1:
            return ranks
        return replace(ranks, gathers=self._take(ranks.group, self._backend(ranks)))

    def take_for_rows(self, ranks: dsx_comm.RankSet) -> Any:
        """A group of these ranks for gradients of rows, which are reduced beside all others (collective)."""
        return self._take(ranks.group, "rows", self._backend(ranks))

    def take_for_norms(self, ranks: dsx_comm.RankSet) -> Any:
        """A group of these ranks for norms of gradients, which ranks add up at different places among the other
        collectives (collective).
        """
        backend = self._backend(ranks)
        small = dsx_comm.ShmOptions(slice_bytes=4096, warn=False) if backend == "dsx" else None
        return self._take(ranks.group, "norms", backend, small)

    def take_control(self, ranks: dsx_comm.RankSet) -> Any:
        """A group of these ranks for messages of a few bytes in host memory (collective).

        Its backend is "dsx" where the ranks share memory, because a rank that ends is named at once there. Otherwise,
        and where the set's own group is on gloo, it is gloo.
        """
        if dsx_comm.get_backend(ranks.group) == "gloo":
            return self._take(ranks.group, "control", dsx_comm.host_backend(ranks.size))
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

    def _backend(self, ranks: dsx_comm.RankSet) -> str:
        """For a group that carries the parameters' tensors, and no others."""
        return dsx_comm.backend_for(self._device_type, ranks.group)

    def _take(
        self,
        parent: Any,
        kind: str,
        backend: str | None = None,
        options: dsx_comm.ShmOptions | None = None,
        members: Sequence[int] | None = None,
    ) -> Any:
        """A group of the same ranks as `parent`, or of `members` of them: one that was given back, if every rank has
        it, else a new one.
        """
        parent = dsx_comm.get_world_group() if parent is None else parent
        idle = _IDLE.setdefault(parent, {})
        mine = [number for known, number in idle if known == kind]
        by_rank: list[Any] = [None] * dsx_comm.get_world_size(parent)
        dsx_comm.all_gather_object(by_rank, mine, group=parent)
        common = set(mine).intersection(*by_rank)
        if common:
            key = (kind, min(common))
            group = idle.pop(key)
        else:
            key = (kind, _MADE.get(parent, 0))
            _MADE[parent] = key[1] + 1
            ranks = dsx_comm.get_all_ranks_from_group(parent) if members is None else members
            group = dsx_comm.new_group(list(ranks), backend=backend or kind, local=True, options=options)
        self._taken.setdefault(parent, {})[key] = group
        return group

    def give_back(self) -> None:
        """The model needs them no more: other models may take them. Calling it again does nothing."""
        taken, self._taken = self._taken, {}
        for parent, groups in taken.items():
            _IDLE.setdefault(parent, {}).update(groups)
