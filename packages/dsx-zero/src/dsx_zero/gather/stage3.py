"""Builds the parts of stage 3 for one model: units, the order of collectives, lifetime of gathered parameters, hooks.

Small parameters (``stage3_param_persistence_threshold``) are one unit that stays whole, as at stage 2: its shard is
part of its whole buffer, and it is gathered once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from torch import nn

from ..homes.home import write
from ..homes.tiers import Tier
from ..lanes import Lane, make_lane
from ..order.agreed import AgreedOrder, Channel, NullOrder, Order, ReuseLimits
from ..params.flat import FlatGroup, Unit
from ..params.memory import memory_of
from ..params.partitioned import PartitionedParameter
from ..params.partitioned_unit import PartitionedUnit, UnitState
from ..params.restored import restore_parameter
from ..plan.units import ParameterInfo, UnitPlan
from .external import take_pending, unit_index
from .hooks import UnitHooks
from .lifetime import GatherExecutor, GatherLifetime, GatherLimits
from .publishing import Gathering, share_first
from .registry import remember
from .transport import PlainGather

__all__ = ["Stage3", "Stage3Limits", "build_stage3"]


@dataclass(frozen=True)
class Stage3Limits:
    """The sizes of stage 3 (elements), as the ``zero_optimization`` section names them."""

    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    allgather_bucket_size: int = 500_000_000
    strict_order: bool = False


class Stage3:
    """Where whole parameters live at stage 3, for the optimizer and the accessors (``runtime.Publisher``)."""

    def __init__(
        self,
        resident: Sequence[Unit],
        partitioned: Sequence[PartitionedUnit],
        gathering: Gathering,
    ) -> None:
        self._resident = {unit.index: unit for unit in resident}
        self._units = {unit.index: unit for unit in partitioned}
        self._gathering = gathering
        self.lifetime: GatherLifetime
        self.order: Order
        self.executor: GatherExecutor
        self.hooks: UnitHooks
        self.gradients: Any
        self.pending: list[tuple[nn.Module, int]] = []
        self.unit_of_original: dict[int, int] = {}

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units in plan order, as gradients and optimizer see them."""
        found = [*self._resident.values(), *(unit.as_unit() for unit in self._units.values())]
        return tuple(sorted(found, key=lambda unit: unit.index))

    @property
    def partitioned(self) -> tuple[PartitionedUnit, ...]:
        """The units that are gathered and freed."""
        return tuple(self._units.values())

    def unit_of(self, parameter: torch.Tensor) -> int | None:
        """Index of the unit a parameter belongs to (either face); None if it is always whole."""
        for index, unit in self._units.items():
            if any(parameter is face for face in unit.faces()):
                return index
        return unit_index(parameter)

    def publish(self, unit: Unit) -> None:
        """See ``runtime.Publisher``: the small parameters are gathered, the others at their next use."""
        if unit.index in self._resident:
            self._gathering.publish(unit)
            for group in unit.groups:
                if group.ranks.size > 1 and not group.trainable and group.visible is not None and group.layout.numel:
                    # only after loading: steps do not publish frozen units
                    dsx_comm.all_gather_into_tensor(
                        group.visible, group.shard_of(group.visible), group=group.ranks.group
                    )

    def finish(self) -> None:
        """See ``runtime.Publisher``."""
        self._gathering.finish()
        self.lifetime.parameters_changed()

    def write(self, group: FlatGroup, index: int, whole: torch.Tensor) -> None:
        """See ``runtime.Publisher``: into the shard, and into the whole parameter where it is there."""
        name = group.layout.names[index]
        part = group.layout.local_slice(name, group.rank)
        with torch.no_grad():
            if part is not None:
                write(group.shard, whole.reshape(-1)[part.start : part.stop], part.offset)
            unit = next((u for u in self._units.values() if group in u.groups), None)
            if unit is None or unit.state is UnitState.GATHERED:
                group.parameters[index].detach().copy_(whole)

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """See ``runtime.Publisher``."""
        with self.lifetime.gathered([unit.index] if unit.index in self._units else []):
            yield

    def free_gathered(self) -> None:
        """See ``runtime.Publisher``."""
        self.lifetime.free_gathered()

    def tensors(self) -> list[torch.Tensor]:
        """What is gathered at the moment."""
        return [
            store.fill for unit in self._units.values() for store in unit.storages if store.numel and store.allocated
        ]

    def remove_hooks(self) -> None:
        """Take the hooks off the model's modules."""
        self.hooks.remove()

    def end(self) -> None:
        """Take all hooks off and leave the modules with partitioned parameters: the model is about to be sharded anew.

        Needed where the optimizer was dropped without `release`: the hooks keep this object, and it keeps the
        gradients.
        """
        self.gradients.remove_hooks()
        self.hooks.remove()
        self.executor.free_all()

    # The order, as the gradients see it: backward ends once, for gathers and reduces.

    def reduce(self, unit: int) -> None:
        """See ``gradients.ReduceOrder``."""
        self.order.reduce(unit)

    def end_backward(self) -> None:
        """See ``gradients.ReduceOrder``."""
        self.lifetime.end_backward_pass()

    def boundary(self, pending: Any) -> None:
        """See ``gradients.ReduceOrder``."""
        self.order.boundary(pending)

    def complete(self, pending: Any) -> None:
        """See ``gradients.ReduceOrder``."""
        self.order.complete(pending)

    def watch_edits(self, watch: Any) -> None:
        """See ``gradients.ReduceOrder``."""
        self.order.watch_edits(watch)

    def gradients_complete(self, unit: int) -> None:
        """See ``GatherLifetime.gradients_complete``."""
        self.lifetime.gradients_complete(unit)

    def connect(self, model: nn.Module, gradients: Any) -> None:
        """Complete the circle with the gradients and put the hooks on."""
        self.gradients = gradients
        self.executor.bind(gradients.run_reduce)
        self.lifetime.begin_backward = gradients.begin_backward
        self.hooks = UnitHooks(model, self.partitioned, self.lifetime, keeps=self)
        remember(model, self)
        for module, key in self.pending:
            index = self.unit_of_original.get(key)
            if index is not None:
                self.hooks.add(module, index)


def build_stage3(
    model: nn.Module,
    infos: Sequence[ParameterInfo],
    plans: Sequence[UnitPlan],
    *,
    channel: Channel | None,
    limits: Stage3Limits,
    lane: Lane | None = None,
    tier: Tier | None = None,
) -> tuple[Stage3, dict[int, nn.Parameter]]:
    """Partition the model's parameters unit by unit (collective; the values of the first of the ranks that share a
    parameter become everybody's). The ranks agree over `channel` on what comes next; None: there is one.

    Returns:
        The parts, and for each parameter that was in the model (by ``id``) the plain one that takes gradients from now
        on.
    """
    by_name = {info.name: info for info in infos}
    resident, partitioned, plain_of = [], [], {}
    pending, unit_of_original = take_pending(model), {}
    for plan in plans:
        if plan.resident:
            unit, originals = _resident(plan, model, by_name)
            plain_of.update(originals)
            resident.append(unit)
            continue
        unit = PartitionedUnit(plan, tier=tier, memory=lambda ranks: memory_of(ranks, ranks.gather_group))
        originals = unit.adopt(model, by_name)
        plain_of.update(originals)
        unit_of_original.update(dict.fromkeys(originals, plan.index))
        partitioned.append(unit)
    stage = Stage3(resident, partitioned, Gathering(limits.allgather_bucket_size))
    stage.pending, stage.unit_of_original = pending, unit_of_original
    stage.executor = GatherExecutor(
        partitioned,
        transport=PlainGather(),
        lane=lane or make_lane(infos[0].device if infos else torch.device("cpu")),
        limits=GatherLimits(limits.prefetch_bucket_size, limits.max_live_parameters),
    )
    stage.order = NullOrder(stage.executor)
    if channel is not None:
        stage.order = AgreedOrder(
            stage.executor,
            channel,
            limits=_reuse(partitioned, limits),
            strict=limits.strict_order,
            names={plan.index: str(plan) for plan in plans},
        )
    stage.lifetime = GatherLifetime(partitioned, executor=stage.executor, order=stage.order)
    for unit in partitioned:
        unit.lender = stage.lifetime
    return stage, plain_of


def _resident(
    plan: UnitPlan, model: nn.Module, infos: Mapping[str, ParameterInfo]
) -> tuple[Unit, dict[int, nn.Parameter]]:
    """A unit that stays whole, and the whole parameters that took the places of partitioned ones (by the ``id`` of
    those).
    """
    groups, replaced = [], {}
    for group in plan.groups:
        own = []
        for name in group.layout.names:
            parameter = model.get_parameter(name)
            if isinstance(parameter, PartitionedParameter):
                whole = restore_parameter(model, (name, *infos[name].aliases), parameter)
                replaced[id(parameter)] = parameter = whole
            own.append(parameter)
        flat = FlatGroup.resident(group, own, memory=memory_of(group.key.ranks))
        if flat.visible is not None:
            share_first(flat.visible, flat.ranks)
        groups.append(flat)
    return Unit(plan, tuple(groups)), replaced


def _reuse(units: Sequence[PartitionedUnit], limits: Stage3Limits) -> ReuseLimits:
    numel = {unit.index: unit.numel for unit in units}
    top = max(numel, default=-1) + 1
    return ReuseLimits(
        [numel.get(index, 0) for index in range(top)],
        max_reuse_distance=limits.max_reuse_distance,
        max_live=limits.max_live_parameters,
    )
