"""`Runtime`: the parts of one sharded model, and the protocols between them.

`api.py` makes it once; the optimizer, the accessors and the states work through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from dsx_comm import RankSet

from .grads.averaging import ByOptimizer
from .grads.gradients import Gradients
from .groups import AuxiliaryGroups
from .params.flat import FlatGroup, Unit
from .plan.units import ParameterInfo
from .transports.errors import KeepsErrors

__all__ = ["Publisher", "Runtime"]


class Publisher(Protocol):
    """Makes new values of parameters visible. `dsx_zero.gather.publishing` has those of stages 0-2,
    `dsx_zero.gather.stage3.Stage3` is that of stage 3.
    """

    def publish(self, unit: Unit) -> None:
        """This rank's shard of a unit has new values: start making them visible."""
        ...

    def finish(self) -> None:
        """All units are published: after this every parameter that is visible has its new values."""
        ...

    def write(self, group: FlatGroup, index: int, whole: torch.Tensor) -> None:
        """Give parameter `index` of a group this value, in the shard and wherever it is visible. Masters are not
        touched.
        """
        ...

    def tensors(self) -> list[torch.Tensor]:
        """Buffers held beside the groups' own."""
        ...

    def free_gathered(self) -> None:
        """Free parameters that are gathered only for a while."""
        ...

    def remove_hooks(self) -> None:
        """Take hooks of its own off the model."""
        ...


@dataclass(frozen=True)
class Runtime:
    """The parts of one sharded model.

    `stage` says what each rank holds, and nothing else does: at stage 0 (one rank alone may have it in place of 1 or 2)
    every rank steps everything; below stage 3 whole parameters are in every rank's memory all the time.
    `ranks` are all data-parallel ranks: over them collectives are put in order and models compared. Which ranks share a
    parameter is its flat group's to say. `norm_groups`: over which the squares of gradients are summed.
    """

    model: torch.nn.Module
    stage: int
    ranks: RankSet
    norm_groups: tuple[Any, ...]
    groups: AuxiliaryGroups
    infos: tuple[ParameterInfo, ...]
    units: tuple[Unit, ...]
    gradients: Gradients
    publisher: Publisher
    averaging: ByOptimizer | None
    """The optimizer, if it averages gradients itself in some steps."""
    checks_overflow: bool
    load_masters: bool = True
    errors: tuple[KeepsErrors, ...] = ()
    """The objects that keep errors of quantised messages."""

    @property
    def numel(self) -> int:
        """Elements of all flat buffers."""
        return sum(group.layout.numel for unit in self.units for group in unit.groups)

    def trainable_units(self) -> Iterator[Unit]:
        """Units with something to step."""
        return (unit for unit in self.units if unit.trainable)
