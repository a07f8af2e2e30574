"""Where flat buffers lie that take part in collectives: in ordinary memory, or in memory that the ranks of the host
share.

In shared memory an all-gather reads the peers' shards straight into its destination, and reductions read the peers'
gradients where they lie: nothing is staged. `dsx_comm` has such memory for host tensors on groups of the "dsx" backend;
everywhere else this is `torch.empty`. It has no name in the file system that a killed process could leave behind, and
goes with the last tensor over it. Each rank has a part of its own, which the others touch inside collectives only: no
parameter is one for two ranks.

Making it is collective. Buffers that last (parameters, shards) are made one by one; whole gradients, which come and go
as each rank computes, are taken from a pool, whose address space the ranks make together at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import dsx_comm
import torch

__all__ = ["BufferPool", "Kind", "Memory", "OrdinaryMemory", "SharedMemory", "memory_of"]

_log = logging.getLogger(__name__)

Kind = tuple[int, torch.dtype, torch.device]
"""Of a buffer: elements, dtype, device."""


class BufferPool(Protocol):
    """Gradient buffers to take and give back, for the length of a backward: activations need the memory most when it
    begins.
    """

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor with arbitrary contents."""
        ...

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back; nobody may use it any more."""
        ...

    def drop(self) -> None:
        """Give the idle buffers' memory back."""
        ...

    def idle_bytes(self) -> int:
        """Of memory that is held for buffers and not in use."""
        ...


class Memory(Protocol):
    """Makes flat buffers."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor with arbitrary contents. Collective."""
        ...

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """A pool for buffers of `kinds`, which may all be in use at once; `idle` of them are kept for reuse.
        Collective.
        """
        ...


class OrdinaryPool:
    """Buffers of this process' own: at most `limit` idle ones, the least recently used leave first.

    Blocks of a model have one size, so that two buffers serve all of them; how many units there are does not matter.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `BufferPool.take`."""
        for place, buffer in enumerate(self._idle):
            if buffer.numel() == numel and buffer.dtype == dtype and buffer.device == device:
                return self._idle.pop(place)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """See `BufferPool.give`."""
        self._idle.append(buffer)
        del self._idle[: -self._limit]

    def drop(self) -> None:
        """See `BufferPool.drop`."""
        self._idle.clear()

    def idle_bytes(self) -> int:
        """See `BufferPool.idle_bytes`."""
        return sum(buffer.nbytes for buffer in self._idle)


class SharedPool:
    """Host buffers from an arena of the ranks: what is given back serves buffers of any size.

    Pages of the first `keep` bytes stay when it is dropped: fresh ones for every backward cost more than shared memory
    gains.
    """

    def __init__(self, arena: dsx_comm.SymmetricArena, keep: int) -> None:
        self._arena, self._keep = arena, keep

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `BufferPool.take`."""
        return self._arena.take(numel, dtype=dtype)

    def give(self, buffer: torch.Tensor) -> None:
        """See `BufferPool.give`."""
        self._arena.give(buffer)

    def drop(self) -> None:
        """See `BufferPool.drop`."""
        self._arena.trim(keep=self._keep)

    def idle_bytes(self) -> int:
        """See `BufferPool.idle_bytes`."""
        return self._arena.idle_bytes()


class OrdinaryMemory:
    """This process' own."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        return torch.empty(numel, dtype=dtype, device=device)

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """See `Memory.pool`."""
        return OrdinaryPool(idle)


class SharedMemory:
    """Shared by the ranks of `group` where they can, ordinary where they cannot (on all ranks alike)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            return dsx_comm.empty(numel, dtype=dtype, group=self._group)
        except dsx_comm.SymmetricMemoryError as error:
            _log.warning("%s; this buffer lies in ordinary memory", error)
            return torch.empty(numel, dtype=dtype)

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """See `Memory.pool`; ordinary where a buffer is on a device."""
        kinds = list(kinds)
        if any(device.type != "cpu" for _, _, device in kinds):
            return OrdinaryPool(idle)
        sizes = sorted(
            (dsx_comm.SymmetricArena.space(numel * dtype.itemsize) for numel, dtype, _ in kinds), reverse=True
        )
        # In use at once: those on the wire, one being filled, and the root's, which is open for most of the backward.
        keep = sum(sizes[: idle + 2])
        # Twice, which costs only addresses: stage 0 sets reduced buffers aside, and buffers of different sizes leave
        # gaps.
        room = 2 * sum(sizes)
        try:
            return SharedPool(dsx_comm.SymmetricArena(room, group=self._group), keep)
        except dsx_comm.SymmetricMemoryError as error:
            _log.warning("%s; gradients lie in ordinary memory", error)
            return OrdinaryPool(idle)


def memory_of(ranks: dsx_comm.RankSet, group: Any = None) -> Memory:
    """The memory for buffers that these ranks communicate over `group` (None: the set's own)."""
    group = ranks.group if group is None else group
    return SharedMemory(group) if ranks.size > 1 and dsx_comm.get_backend(group) == "dsx" else OrdinaryMemory()
