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
    """The groups of one model beside `process_group` (None: all ranks)."""

    def __init__(self, process_group: Any) -> None:
        self._beside = process_group  # the object itself from the first `take` on: the default group may be made anew
        self._lent: dict[tuple[str, int], Any] = {}

    def take(self, backend: str) -> Any:
        """A group of the same ranks (collective). One that was handed back, if every rank has it."""
        return self._take(backend, backend)

    def take_control(self) -> Any:
        """As `take`: a group for words of a few bytes in host memory.

        In shared memory where the ranks have that (a rank that ends is named on the others at once), else gloo; gloo
        too where the user's group is.
        """
        if dsx_comm.get_backend(self._parent()) == "gloo":
            return self._take("control", "gloo")
        return self._take("control", "dsx", dsx_comm.ShmOptions(slice_bytes=4096, warn=False))

    def _parent(self) -> Any:
        if self._beside is None:
            self._beside = dsx_comm.get_world_group()
        return self._beside

    def _take(self, kind: str, backend: str, options: dsx_comm.ShmOptions | None = None) -> Any:
        beside = self._parent()
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
            ranks = dsx_comm.get_all_ranks_from_group(beside)
            group = dsx_comm.new_group(ranks, backend=backend, local=True, options=options)
        self._lent[key] = group
        return group

    def give_back(self) -> None:
        """The model is done with them: others may take them. Twice is once."""
        lent, self._lent = self._lent, {}
        if lent:
            _IDLE.setdefault(self._beside, {}).update(lent)
