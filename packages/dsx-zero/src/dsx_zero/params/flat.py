"""One flat buffer at run time: the parameters of a unit that share a dtype, this rank's shard of them, and its masters.

At stages 0-2 the parameters are views into one buffer, `visible`, which holds the values all the time; `shard` is this
rank's part of it. The small parameters of stage 3 are kept in the same way. The other groups of stage 3 have no visible
buffer: their parameters are views of a storage that has memory only around a use (`GatheredStorage`), and `shard` has a
home of its own, on the device or elsewhere.

Masters are what the optimizer updates. Where the parameter's dtype is already the master's (fp32 training) and both
have the same tier, the master is the parameter's own home and nothing is copied in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import torch
from dsx_comm import RankSet
from torch import nn

from ..homes.blocks import HostBlocks
from ..homes.home import Cuttable, DeviceHome, Home, read, write
from ..homes.tiers import DeviceTier, Tier
from ..plan.layout import FlatLayout, LocalSlice
from ..plan.units import GroupKey, GroupPlan, UnitPlan
from .dtensors import GlobalTensor, global_of
from .memory import Memory, OrdinaryMemory

__all__ = ["FlatGroup", "Unit", "cut_at_parts", "cut_parts", "label_of", "local_parts", "make_shard"]


@dataclass(frozen=True)
class Part:
    """The part of one parameter that this rank steps: its range in the parameter, and its place in what is stepped."""

    name: str
    slice: LocalSlice


def local_parts(layout: FlatLayout, rank: int) -> tuple[Part, ...]:
    """The parts that `rank` owns, in layout order. Parameters of which it owns nothing are left out."""
    found = ((name, layout.local_slice(name, rank)) for name in layout.names)
    return tuple(Part(name, part) for name, part in found if part is not None)


def label_of(plan: GroupPlan) -> str:
    """A name for stored data of a group. No other group of the model has it, in any layout."""
    names, key = plan.layout.names, plan.key
    return f"{names[0] if names else ''}.{crc32(repr((names, key.trainable, str(key.dtype))).encode()):08x}"


def cut_at_parts(home: Home, parts: Sequence[Part]) -> None:
    """Cut a home that can consist of pieces where the parameters begin and end."""
    if isinstance(home, Cuttable):
        places = [(part.slice.offset, part.slice.offset + part.slice.numel) for part in parts]
        home.cut_at(place for pair in places for place in pair)


def make_shard(plan: GroupPlan, memory: Memory, tier: Tier) -> Home:
    """The home of this rank's shard of a group that has no visible buffer, filled with zeros if it is in memory."""
    layout, key = plan.layout, plan.key
    shard = tier.home(f"shard.{label_of(plan)}", layout.shard_numel, key.dtype, key.device, memory)
    if shard.view() is None:
        cut_at_parts(shard, local_parts(layout, key.ranks.rank))
    else:
        write(shard, torch.zeros(layout.shard_numel, dtype=key.dtype, device="cpu"))  # the padding, too
    return shard


class FlatGroup:
    """A flat buffer: its layout, its `nn.Parameter`s (in layout order), and where its values are.

    Attributes:
        ranks: the ranks that share the buffer.
        visible: the buffer of `layout.numel` elements of which the parameters are views; None in a partitioned group
            (`PartitionedGroup`).
        shard: the `layout.shard_numel` elements that this rank owns.
        stepped: the elements that this rank's optimizer updates: the shard, at stage 0 all of them.
        parts: the parts of the parameters in `stepped`, in layout order.
        master: the values that the optimizer updates, laid out like `stepped`; `stepped` itself if there are no
            separate masters.
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
        """Counts all changes of the values, equally on all ranks. Data computed from an earlier generation is stale."""
        self.replaced = 0
        """Counts the changes that no step has made (edits, loads): values may be far from the earlier ones."""
        self.before_edit: Callable[[], object] | None = None
        """Called before an edit is written into a partitioned parameter and its master."""
        self.before_load: Callable[[], object] | None = None
        """Called before a checkpoint is read into the shard itself; its master follows with the next step."""

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
        """Count a change that no step has made (an edit, a load). All ranks call it."""
        self.generation += 1
        self.replaced += 1

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a buffer of `layout.numel` elements: one for each parameter, in its logical shape."""
        layout, found = self.layout, []
        for offset, size, shape in zip(layout.offsets, layout.sizes, layout.shapes):  # a loop: no call per parameter
            found.append(buffer.narrow(0, offset, size).view(shape))
        return tuple(found)

    def make_master(self, dtype: torch.dtype, *, whole: bool, tier: Tier | None = None) -> None:
        """Create the master values.

        Parameters whose dtype is at least as wide as `dtype` are their own masters, if they live in `tier` already.

        Args:
            dtype: dtype of the masters.
            whole: every rank steps all elements, so that masters are needed for all of them; else for the shard.
            tier: where the masters live; None: on the device.
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
        for part in self.parts:  # one after the other, without the padding
            start = part.slice.offset
            write(self.master, read(self.stepped, start, start + part.slice.numel), start)

    @property
    def own_master(self) -> Home | None:
        """The master, if the parameters are not their own masters; else None."""
        return None if self.master is self.stepped else self.master

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype in which the optimizer works; before there are masters that of the parameters."""
        return self.key.dtype if self.master is None else self.master.dtype

    def whole_slice(self, index: int) -> LocalSlice:
        """The slice of all of parameter `index` in a buffer of `layout.numel` elements."""
        return LocalSlice(0, self.layout.sizes[index], self.layout.offsets[index])

    def global_of(self, name: str) -> GlobalTensor | None:
        """The tensor of which parameter `name` is a part, where tensor parallelism by torch has cut it."""
        return global_of(self.parameters[self.layout.index(name)])

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of parameter `name`, or of the tensor of which it is a part (`global_of`)."""
        of = self.global_of(name)
        return tuple(self.layout.shapes[self.layout.index(name)]) if of is None else of.shape

    def all_visible(self) -> Home:
        """The home of the whole parameters if every rank has them, else that of the shard."""
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


def cut_parts(
    values: Home, group: FlatGroup, parts: Sequence[Part], blocks: HostBlocks | None = None, *, as_kept: bool = False
) -> tuple[torch.Tensor, ...]:
    """Parts (at least one, in order of their offsets) of the reduced gradients of a group, 1-D, in the dtype and on the
    device of its masters; in another dtype than they are kept in memory of `blocks`, if given and on the host.
    `as_kept`: on the host in the dtype in which they are kept.
    """
    first, last = parts[0].slice.offset, parts[-1].slice.offset + parts[-1].slice.numel
    block = read(values, first, last)
    master = group.master
    if master is not None and not (as_kept and block.device.type == master.device.type == "cpu"):
        if blocks is not None and block.device.type == master.device.type == "cpu":
            block = blocks.converted(block, master.dtype)
        else:
            block = block.to(device=master.device, dtype=master.dtype)
    found = []
    for part in parts:  # a loop: no call per parameter
        found.append(block.narrow(0, part.slice.offset - first, part.slice.numel))
    return tuple(found)
