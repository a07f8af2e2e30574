"""Facts about one parameter of stage 3: its name, the shape of the whole, this rank's part, and whether it is
gathered.

For programs that look at parameters from outside (adapters, summaries, loops for reinforcement learning). Nothing is
gathered, and no other rank takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .homes.home import read
from .params.flat import FlatGroup
from .params.init import InitParameter
from .params.partitioned import PartitionedParameter
from .params.partitioned_unit import UnitParameter, is_partitioned
from .params.restored import current_parameter
from .view import OWNERS

__all__ = ["Partition", "partition_of"]


@dataclass(frozen=True)
class Partition:
    """A parameter that stage 3 manages.

    Attributes:
        name: its first name in the model; of a parameter that `Init` has made, class and attribute.
        shape: of the whole parameter.
        gathered: whether the whole values are in this rank's memory now.
        key: a number of this parameter in this process; both objects that stand for a parameter have the same.
        sharded: whether its model is sharded; False for a parameter that only `Init` has divided.
    """

    name: str
    shape: torch.Size
    gathered: bool
    key: int
    _read: Callable[[], torch.Tensor] = field(repr=False, compare=False)
    sharded: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D; the whole parameter, flat, where every rank keeps it."""
        return self._read()


def partition_of(parameter: torch.Tensor) -> Partition | None:
    """The facts that stage 3, or `Init`, knows about a parameter; None for a tensor that neither manages.

    Small parameters that stage 3 keeps whole (`stage3_param_persistence_threshold`) are managed, too.
    """
    parameter = current_parameter(parameter)
    if isinstance(parameter, PartitionedParameter):
        source = parameter.source
        if isinstance(source, UnitParameter):
            return _of_group(source.group, source.name, source.local_shard)
        if isinstance(source, InitParameter):
            opened = source.borrow() is not None
            return Partition(source.name, parameter.shape, opened, id(source), source.local_shard, sharded=False)
        return None  # a view of a parameter
    found = OWNERS.find(parameter)
    if found is None or found[0].released or found[0].runtime.stage != 3:
        return None
    optimizer, name = found
    group = optimizer.layout.group_of(name)
    if not is_partitioned(group):
        return Partition(name, parameter.shape, True, id(parameter), lambda: parameter.detach().reshape(-1))
    return _of_group(group, name, lambda: _shard_of(group, name))


def _of_group(group: FlatGroup, name: str, shard: Callable[[], torch.Tensor]) -> Partition:
    plain = group.parameters[group.layout.index(name)]
    return Partition(name, plain.shape, plain.untyped_storage().nbytes() > 0 or plain.numel() == 0, id(plain), shard)


def _shard_of(group: FlatGroup, name: str) -> torch.Tensor:
    part = group.layout.local_slice(name, group.rank)
    return read(group.shard, *((0, 0) if part is None else (part.offset, part.offset + part.numel)))
