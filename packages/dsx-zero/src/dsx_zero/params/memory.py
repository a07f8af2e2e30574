"""Memory of the flat buffers that take part in collectives: ordinary memory, or memory that the ranks of a host share.

In shared memory an all-gather reads the peers' shards directly into its destination, and reductions read the peers'
gradients in place, without a staging copy. `dsx_comm` has such memory for host tensors on groups of the "dsx" backend;
otherwise `torch.empty` is used. Shared memory has no name in the file system, so that a killed process leaves
no files, and it is freed with the last tensor over it. Each rank has its own part, which other ranks read
and write only inside collectives: ranks never share a parameter.

Allocation is collective. Long-lived buffers (parameters, shards) are allocated one by one. Whole gradients are
allocated and freed at different times on each rank; they come from a pool, whose address space the ranks reserve
together at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import dsx_comm
import torch
from dsx_core import with_code

__all__ = ["BufferPool", "Kind", "Memory", "OrdinaryMemory", "SharedMemory", "memory_of"]

_log = logging.getLogger(__name__)

_CODE = "DSX359"
"""Of both warnings: there is too little shared memory, and messages are copied once more."""

Kind = tuple[int, torch.dtype, torch.device]
"""Elements, dtype and device of a buffer."""


class BufferPool(Protocol):
    """Gradient buffers that are taken and given back during a backward.

    They are not kept between backwards, because activations need the most memory when a backward begins.
    """

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor with arbitrary contents."""
        ...

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back. It must not be used after that."""
        ...

    def drop(self) -> None:
        """Free the memory of idle buffers."""
        ...

    def idle_bytes(self) -> int:
        """Bytes of memory that is kept for buffers and not in use."""
        ...


class Memory(Protocol):
    """Makes flat buffers."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor with arbitrary contents. Collective."""
        ...

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """A pool for buffers. Collective.

        Args:
            kinds: the buffers that may be in use at the same time.
            idle: how many idle buffers are kept for reuse.
        """
        ...


class OrdinaryPool:
    """Buffers in memory of this process. At most `limit` idle ones are kept; the least recently used are freed first.

    The blocks of a model have equal sizes, so that two buffers are enough for any number of units.
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
    """Host buffers from an arena that the ranks share. Memory that is given back can be used for buffers of any size.

    Args:
        arena: the memory.
        keep: bytes at the start of the arena whose pages `drop` keeps: new pages for every backward would cost more
            time than shared memory saves.
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
    """Memory of this process."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        return torch.empty(numel, dtype=dtype, device=device)

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """See `Memory.pool`."""
        return OrdinaryPool(idle)


class SharedMemory:
    """Memory that the ranks of `group` share. If they cannot share memory, all of them use ordinary memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Memory.empty`."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            return dsx_comm.empty(numel, dtype=dtype, group=self._group)
        except dsx_comm.SymmetricMemoryError as error:
            _log.warning(with_code("%s; this buffer lies in ordinary memory", _CODE), error)
            return torch.empty(numel, dtype=dtype, device="cpu")

    def pool(self, kinds: Iterable[Kind], *, idle: int) -> BufferPool:
        """See `Memory.pool`. If a buffer is on a device, the pool has ordinary memory."""
        kinds = list(kinds)
        if any(device.type != "cpu" for _, _, device in kinds):
            return OrdinaryPool(idle)
        sizes = sorted(
            (dsx_comm.SymmetricArena.space(numel * dtype.itemsize) for numel, dtype, _ in kinds), reverse=True
        )
        # In use at the same time: the buffers in flight, one that is being filled, and that of the root, which is in
        # use for most of the backward.
        keep = sum(sizes[: idle + 2])
        # Twice the size, which costs only address space: stage 0 keeps reduced buffers, and buffers of different sizes
        # leave gaps.
        room = 2 * sum(sizes)
        try:
            return SharedPool(dsx_comm.SymmetricArena(room, group=self._group), keep)
        except dsx_comm.SymmetricMemoryError as error:
            _log.warning(with_code("%s; gradients lie in ordinary memory", _CODE), error)
            return OrdinaryPool(idle)


def memory_of(ranks: dsx_comm.RankSet, group: Any = None) -> Memory:
    """The memory for buffers that these ranks send over `group` (None: the group of the rank set)."""
    group = ranks.group if group is None else group
    return SharedMemory(group) if ranks.size > 1 and dsx_comm.get_backend(group) == "dsx" else OrdinaryMemory()
