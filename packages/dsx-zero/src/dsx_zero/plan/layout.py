"""The arithmetic of flat buffers, which says the owner of each element, without tensors and without communication.

The parameters of one unit (of one dtype) lie one after the other in a flat buffer. Every parameter starts at a multiple
of 64 bytes, so that kernels on a parameter or on its gradient see aligned memory. The buffer's end is padded so that it
divides into `world_size` equal shards whose size is a multiple of 16 bytes; rank `r` owns elements `[r * S, (r + 1) *
S)`. A shard boundary may cut a parameter; `local_slice` says where. A rank may own no element of a parameter, such as
one with fewer elements than there are ranks.

Where an optimizer keeps one scale per block of elements (`block`), parameters and shards begin at multiples of a block,
so that no boundary cuts one: a rank has at most one block of padding per parameter and shard.

Where an optimizer has to see whole tensors (`undivided`), no boundary cuts a parameter: parameters are assigned to
ranks, the largest first, each to the rank that owns the fewest elements so far. Every shard is as large as the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

__all__ = ["PARAMETER_ALIGNMENT", "SHARD_ALIGNMENT", "FlatLayout", "LocalSlice"]

PARAMETER_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""
SHARD_ALIGNMENT = 16
"""Bytes: a shard's size is a multiple of this, for collectives and vector loads."""


@dataclass(frozen=True)
class LocalSlice:
    """The part of one parameter that one rank owns.

    `start` and `stop` count the parameter's elements in row-major order, `offset` is where they begin in the rank's
    shard.
    """

    start: int
    stop: int
    offset: int

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class FlatLayout:
    """Places of parameters in a flat buffer that is divided among `world_size` ranks. Counts are elements."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int
    """Elements of the whole buffer, padding included; a multiple of `world_size`."""
    world_size: int
    undivided: bool = False
    """Does every parameter lie in one shard?"""

    @classmethod
    def build(
        cls,
        parameters: Iterable[tuple[str, tuple[int, ...]]],
        *,
        world_size: int,
        itemsize: int,
        undivided: bool = False,
        block: int = 1,
    ) -> FlatLayout:
        """Lay out `(name, shape)` pairs in the given order, by ranks where they are `undivided`; `itemsize` is the
        size of an element in bytes, `block` the number of elements that no boundary may cut.
        """
        if world_size < 1 or itemsize < 1:
            raise ValueError(f"world_size and itemsize must be at least 1, got {world_size} and {itemsize}")
        align = lcm(max(1, PARAMETER_ALIGNMENT // itemsize), block)
        if undivided:
            return cls._by_ranks([(name, tuple(shape)) for name, shape in parameters], world_size, align)
        names, shapes, offsets, position = [], [], [], 0
        for name, shape in parameters:
            names.append(name)
            shapes.append(tuple(shape))
            offsets.append(position)
            position = _round_up(position + prod(shape), align)
        if len(set(names)) != len(names):
            raise ValueError(f"parameter names must be unique, got {names}")
        end = max((o + prod(s) for o, s in zip(offsets, shapes)), default=0)
        numel = _round_up(end, world_size * lcm(max(1, SHARD_ALIGNMENT // itemsize), block))
        return cls(tuple(names), tuple(shapes), tuple(offsets), numel, world_size)

    @classmethod
    def _by_ranks(cls, parameters: list[tuple[str, tuple[int, ...]]], world_size: int, align: int) -> FlatLayout:
        if len({name for name, _ in parameters}) != len(parameters):
            raise ValueError(f"parameter names must be unique, got {[name for name, _ in parameters]}")
        loads, owned = [0] * world_size, [list[int]() for _ in range(world_size)]
        for index in sorted(range(len(parameters)), key=lambda i: -prod(parameters[i][1])):
            rank = min(range(world_size), key=loads.__getitem__)
            owned[rank].append(index)
            loads[rank] += _round_up(prod(parameters[index][1]), align)
        shard, order, offsets = max(loads), [], []
        for rank, indices in enumerate(owned):
            position = rank * shard
            for index in sorted(indices):
                order.append(parameters[index])
                offsets.append(position)
                position += _round_up(prod(parameters[index][1]), align)
        names, shapes = tuple(name for name, _ in order), tuple(shape for _, shape in order)
        return cls(names, shapes, tuple(offsets), shard * world_size, world_size, undivided=True)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard."""
        return self.numel // self.world_size

    def index(self, name: str) -> int:
        """Position of a parameter in `names`. Raises `KeyError` for an unknown one."""
        return self._index[name]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements `[start, stop)` of the buffer that `rank` owns."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local_slice(self, name: str, rank: int) -> LocalSlice | None:
        """The part of a parameter that `rank` owns; None if it owns nothing of it."""
        i = self.index(name)
        begin, end = self.shard_range(rank)
        start, stop = max(begin, self.offsets[i]), min(end, self.offsets[i] + self.sizes[i])
        if start >= stop:
            return None
        return LocalSlice(start - self.offsets[i], stop - self.offsets[i], start - begin)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: ranges of the buffer that belong to no parameter."""
        found, position = [], 0
        for offset, size in zip(self.offsets, self.sizes):
            if offset > position:
                found.append((position, offset))
            position = max(position, offset + size)
        if self.numel > position:
            found.append((position, self.numel))
        return tuple(found)


def pieces(numel: int, limit: int) -> tuple[tuple[int, int], ...]:
    """Cut `[0, numel)` into ranges of at most `limit` elements (at least 1 per range)."""
    step = max(1, limit)
    return tuple((start, min(start + step, numel)) for start in range(0, numel, step))
