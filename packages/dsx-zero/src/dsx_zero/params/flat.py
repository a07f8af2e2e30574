"""One flat buffer at run time: the parameters of a unit that share a dtype, this rank's shard of them, and its masters.

At stages 0-2 the parameters are views into one buffer, `visible`, which holds the values all the time; `shard` is this
rank's part of it. The small parameters of stage 3 are kept in the same way. The other groups of stage 3 have no visible
buffer: their parameters are views of a storage that has memory only around a use (`GatheredStorage`), and `shard` has a
home of its own, on the device or elsewhere.

Masters are what the optimizer updates. Where the parameter's dtype is already the master's (fp32 training) and both
have the same tier, the master is the parameter's own home and nothing is copied in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import torch
from dsx_comm import RankSet
from torch import nn

from ..homes.home import Cuttable, DeviceHome, Home, read, write
from ..homes.tiers import DeviceTier, Tier
from ..plan.layout import FlatLayout, LocalSlice
from ..plan.units import GroupKey, GroupPlan, UnitPlan
from .memory import Memory, OrdinaryMemory

__all__ = ["FlatGroup", "Unit", "cut_at_parts", "label_of", "local_parts"]


@dataclass(frozen=True)
class Part:
    """The local part of one parameter: where it lies in the parameter and in what this rank steps."""

    name: str
    slice: LocalSlice


def local_parts(layout: FlatLayout, rank: int) -> tuple[Part, ...]:
    """The parameters of which `rank` owns something, in layout order."""
    found = ((name, layout.local_slice(name, rank)) for name in layout.names)
    return tuple(Part(name, part) for name, part in found if part is not None)


def label_of(plan: GroupPlan) -> str:
    """A name for stored data of a group: no other group of the model has it, in any layout."""
    names, key = plan.layout.names, plan.key
    return f"{names[0] if names else ''}.{crc32(repr((names, key.trainable, str(key.dtype))).encode()):08x}"


def cut_at_parts(home: Home, parts: Sequence[Part]) -> None:
    """Let a home that lies in pieces be cut where the parameters begin and end."""
    if isinstance(home, Cuttable):
        places = [(part.slice.offset, part.slice.offset + part.slice.numel) for part in parts]
        home.cut_at(place for pair in places for place in pair)


class FlatGroup:
    """A flat buffer: its layout, its `nn.Parameter`s (in layout order), and where its values are.

    Attributes:
        ranks: who shares it.
        visible: the buffer of `layout.numel` elements that the parameters are views of; None in a partitioned group
            (`PartitionedGroup`).
        shard: the `layout.shard_numel` elements that this rank owns.
        stepped: the elements that this rank's optimizer updates: the shard, at stage 0 all of them.
        parts: where the parameters lie in `stepped`, in layout order, those of which this rank steps nothing left out.
        master: the values that the optimizer updates, laid out as `stepped`; `stepped` itself where there are no
            others.
    """

    def __init__(
        self,
        plan: GroupPlan,
        parameters: Sequence[nn.Parameter],
        *,
        visible: torch.Tensor | None,
        shard: Home,
        tier: Tier | None = None,
    ) -> None:
        self.plan = plan
        self.key: GroupKey = plan.key
        self.layout: FlatLayout = plan.layout
        self.parameters = tuple(parameters)
        self.ranks: RankSet = plan.key.ranks
        self.rank = self.ranks.rank
        self.visible = visible
        self.shard = self.stepped = shard
        self._tier = tier or DeviceTier()
        self.parts = local_parts(plan.layout, self.rank)
        self.master: Home | None = None
        self.generation = 0
        """Grows with every change of the values, on all ranks alike: what was made of earlier values is old."""
        self.replaced = 0
        """Grows with the changes that no step has made: values may be far from what they were."""

    @classmethod
    def resident(cls, plan: GroupPlan, parameters: Sequence[nn.Parameter], *, memory: Memory) -> FlatGroup:
        """Move the parameters' values into one new buffer in `memory` and make the parameters views of it
        (collective).
        """
        buffer = memory.empty(plan.layout.numel, plan.key.dtype, plan.key.device)
        start, stop = plan.layout.shard_range(plan.key.ranks.rank)
        group = cls(plan, parameters, visible=buffer, shard=DeviceHome(buffer[start:stop]))
        with torch.no_grad():
            for begin, end in plan.layout.gaps:
                buffer[begin:end].zero_()
            for parameter, view in zip(group.parameters, group.views(buffer)):
                view.copy_(parameter)
                parameter.data = view
        return group

    def note_replaced(self) -> None:
        """Values were written that no step has made (an edit, a load); on all ranks alike."""
        self.generation += 1
        self.replaced += 1

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parameters' places in a buffer of `layout.numel` elements, in their logical shapes."""
        layout, found = self.layout, []
        for offset, size, shape in zip(layout.offsets, layout.sizes, layout.shapes):  # a loop: no call per parameter
            found.append(buffer.narrow(0, offset, size).view(shape))
        return tuple(found)

    def make_master(self, dtype: torch.dtype, *, whole: bool, tier: Tier | None = None) -> None:
        """Create the master values of the shard (or of everything, `whole`, where every rank steps everything).

        Parameters whose dtype is at least as wide as `dtype` are their own masters, if they live in `tier` already.
        """
        if whole and self.visible is not None:
            self.stepped = DeviceHome(self.visible)
            self.parts = tuple(Part(name, self.whole_slice(i)) for i, name in enumerate(self.layout.names))
        tier = tier or DeviceTier()
        wide_enough = self.key.dtype.itemsize >= dtype.itemsize
        if wide_enough and tier == self._tier:
            self.master = self.stepped
            return
        dtype = self.key.dtype if wide_enough else dtype
        self.master = tier.home(
            f"master.{label_of(self.plan)}", self.stepped.numel, dtype, self.key.device, OrdinaryMemory()
        )
        if self.master.view() is not None:
            write(self.master, read(self.stepped))
            return
        cut_at_parts(self.master, self.parts)
        for part in self.parts:  # one after the other, and no padding
            start = part.slice.offset
            write(self.master, read(self.stepped, start, start + part.slice.numel), start)

    @property
    def own_master(self) -> Home | None:
        """The master, if it is not the parameters' own home."""
        return None if self.master is self.stepped else self.master

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype that the optimizer works in; the parameters' own before there are masters."""
        return self.key.dtype if self.master is None else self.master.dtype

    def whole_slice(self, index: int) -> LocalSlice:
        """Parameter `index` in a buffer of `layout.numel` elements, all of it."""
        return LocalSlice(0, self.layout.sizes[index], self.layout.offsets[index])

    def all_visible(self) -> Home:
        """The home of the whole parameters, where every rank has them."""
        return self.shard if self.visible is None else DeviceHome(self.visible)

    @property
    def trainable(self) -> bool:
        return self.key.trainable

    def shard_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's part of a buffer of `layout.numel` elements."""
        start, stop = self.layout.shard_range(self.rank)
        return buffer[start:stop]


@dataclass(frozen=True)
class Unit:
    """A unit at run time."""

    plan: UnitPlan
    groups: tuple[FlatGroup, ...]

    @cached_property
    def index(self) -> int:
        return self.plan.index

    @cached_property
    def trainable(self) -> tuple[FlatGroup, ...]:
        """The groups that take part in reducing and stepping."""
        return tuple(group for group in self.groups if group.trainable and group.layout.numel)
