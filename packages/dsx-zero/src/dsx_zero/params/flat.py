"""One flat buffer at run time: the parameters of a unit that share a dtype, this rank's shard of them, and its masters.

At stages 0-2 `full` holds the values all the time, the parameters are views into it and `shard` is this rank's part of
it. So it is with the small parameters of stage 3. The others' groups have no `full`: their parameters are views of a
storage that has memory only around a use (`GatheredStorage`), and `shard` is memory of its own.

Masters are what the optimizer updates. Where the parameter's dtype is already the master's (fp32 training), the master
is the parameter's own memory and nothing is copied in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..plan.layout import FlatLayout, LocalSlice
from ..plan.units import GroupKey, GroupPlan, UnitPlan
from .memory import Memory

__all__ = ["UNFREEZE", "FlatGroup", "Unit", "local_parts"]

UNFREEZE = (
    "it was frozen when the model was sharded and has no place for gradients; unfreeze it before dsx_zero.shard, with"
    " lr 0 in a group of its own if it shall start later, or save a checkpoint and load it into a model that is sharded"
    " anew"
)


@dataclass(frozen=True)
class Part:
    """The local part of one parameter: where it lies in the parameter and in this rank's shard."""

    name: str
    slice: LocalSlice


def local_parts(layout: FlatLayout, rank: int) -> tuple[Part, ...]:
    """The parameters of which `rank` owns something, in layout order."""
    found = ((name, layout.local_slice(name, rank)) for name in layout.names)
    return tuple(Part(name, part) for name, part in found if part is not None)


class FlatGroup:
    """A flat buffer: its layout, its `nn.Parameter`s (in layout order), the whole (`full`) and this rank's shard.

    `full` has `layout.numel` elements, in a partitioned group (`PartitionedGroup`) always none. `shard` has
    `layout.shard_numel`.
    """

    def __init__(
        self, plan: GroupPlan, parameters: Sequence[nn.Parameter], *, rank: int, full: torch.Tensor, shard: torch.Tensor
    ) -> None:
        self.key: GroupKey = plan.key
        self.layout: FlatLayout = plan.layout
        self.parameters = tuple(parameters)
        self.rank = rank
        self.full = full
        self.shard = shard
        self.parts = local_parts(plan.layout, rank)
        self.master: torch.Tensor | None = None

    @classmethod
    def resident(cls, plan: GroupPlan, parameters: Sequence[nn.Parameter], *, rank: int, memory: Memory) -> FlatGroup:
        """Move the parameters' values into one new buffer in `memory` and make the parameters views of it
        (collective).
        """
        full = memory.empty(plan.layout.numel, plan.key.dtype, plan.key.device)
        start, stop = plan.layout.shard_range(rank)
        group = cls(plan, parameters, rank=rank, full=full, shard=full[start:stop])
        with torch.no_grad():
            for begin, end in plan.layout.gaps:
                full[begin:end].zero_()
            for parameter, view in zip(group.parameters, group.views(full)):
                view.copy_(parameter)
                parameter.data = view
        return group

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parameters' places in a buffer of `layout.numel` elements, in their logical shapes."""
        layout = self.layout
        return tuple(
            buffer.narrow(0, offset, size).view(shape)
            for offset, size, shape in zip(layout.offsets, layout.sizes, layout.shapes)
        )

    def make_master(self, dtype: torch.dtype, *, whole: bool) -> None:
        """Create the master values of the shard (or of everything, `whole`, where every rank steps everything).

        Parameters whose dtype is at least as wide as `dtype` are their own masters.
        """
        source = self.full if whole else self.shard
        self.master = source if self.master_is_parameter(dtype) else source.to(dtype)

    def master_is_parameter(self, dtype: torch.dtype) -> bool:
        """Would a master of this dtype be the parameter's own memory?"""
        return self.key.dtype.itemsize >= dtype.itemsize

    def own_master(self, visible: torch.Tensor) -> torch.Tensor | None:
        """The master, if it is memory of its own and not that of `visible` (the buffer the parameters show)."""
        master = self.master
        if master is None or master.untyped_storage().data_ptr() == visible.untyped_storage().data_ptr():
            return None
        return master

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

    @property
    def index(self) -> int:
        return self.plan.index

    @property
    def trainable(self) -> tuple[FlatGroup, ...]:
        """The groups that take part in reducing and stepping."""
        return tuple(group for group in self.groups if group.trainable and group.layout.numel)
