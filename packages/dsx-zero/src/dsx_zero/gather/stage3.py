"""Stage 3 of one model: dividing it into units, and the object that publishes their values.

`partition` divides the model into units. From these `building` makes the gathers, their order, the lifetimes and the
reductions, and from all of them a `Stage3`, which installs the hooks.

Small parameters (``stage3_param_persistence_threshold``) are one unit that stays whole, as at stage 2: its shard is
a part of its whole buffer, and it is gathered once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import dsx_comm
import torch
from torch import nn

from ..homes.home import ReadsAhead, write
from ..homes.tiers import Tier
from ..order.ahead import GatherLimits
from ..order.protocol import Order
from ..params.flat import FlatGroup, Unit
from ..params.kept import KeptGroups
from ..params.memory import memory_of
from ..params.partitioned import PartitionedParameter
from ..params.partitioned_unit import PartitionedUnit
from ..params.restored import restore_parameter
from ..plan.units import ParameterInfo, UnitPlan
from .executor import GatherExecutor
from .external import take_pending, unit_index
from .hooks import UnitHooks
from .lifetime import GatherLifetime
from .publishing import Gathering, broadcast_first
from .read_ahead import ReadAhead
from .registry import remember

if TYPE_CHECKING:
    from ..config import ZeroConfig

__all__ = ["Partition", "Stage3", "partition", "read_ahead_of", "limits_of"]


class _HasHooks(Protocol):
    def remove_hooks(self) -> None: ...


@dataclass(frozen=True)
class Partition:
    """A model that is divided into units.

    Attributes:
        units: all units in the order of the plan, as gradients and optimizer see them.
        resident: the units that stay whole.
        partitioned: the units that are gathered and freed.
        plain_of: for each parameter that was in the model (by ``id``) the plain parameter that gets gradients from now
            on.
        external: pairs of a module and the index of a partitioned unit of other modules that its forward uses
            (`register_external_parameter`).
    """

    units: tuple[Unit, ...]
    resident: tuple[Unit, ...]
    partitioned: tuple[PartitionedUnit, ...]
    plain_of: Mapping[int, nn.Parameter]
    external: tuple[tuple[nn.Module, int], ...]


class Stage3:
    """The parts of stage 3 of one model; the ``runtime.Publisher`` of its optimizer and accessors."""

    def __init__(
        self,
        model: nn.Module,
        found: Partition,
        gathering: Gathering,
        executor: GatherExecutor,
        order: Order,
        lifetime: GatherLifetime,
        gradients: _HasHooks,
        hooks: UnitHooks | None = None,
    ) -> None:
        self._resident = frozenset(unit.index for unit in found.resident)
        self._units = {unit.index: unit for unit in found.partitioned}
        self.units, self.partitioned = found.units, found.partitioned
        self.lifetime, self.executor, self.order = lifetime, executor, order
        self._gathering, self._gradients = gathering, gradients
        if hooks is None:
            hooks = UnitHooks(model, found.partitioned, lifetime, keeps=self)
        else:  # hooks of the layout before: a forward that is about to begin runs them
            hooks.serve(found.partitioned, lifetime, keeps=self)
        self.hooks = hooks
        remember(model, self)
        for module, index in found.external:
            self.hooks.add(module, index)

    def unit_of(self, parameter: torch.Tensor) -> int | None:
        """Index of the unit that a parameter (plain or partitioned) belongs to; None if it is always whole."""
        for index, unit in self._units.items():
            if any(parameter is face for face in unit.faces()):
                return index
        return unit_index(parameter)

    def publish(self, unit: Unit) -> None:
        """See ``runtime.Publisher``: the small parameters are gathered now, the others at their next use."""
        for group in unit.groups:
            group.generation += 1
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
        if self._resident:
            self._gathering.finish()
        self.lifetime.parameters_changed()

    def write(self, group: FlatGroup, index: int, whole: torch.Tensor) -> None:
        """See ``runtime.Publisher``: write into the shard, and into the whole parameter if it is in memory."""
        group.note_replaced()
        name = group.layout.names[index]
        part = group.layout.local_slice(name, group.rank)
        with torch.no_grad():
            if part is not None:
                write(group.shard, whole.reshape(-1)[part.start : part.stop], part.offset)
            unit = next((u for u in self._units.values() if group in u.groups), None)
            if unit is None:
                group.parameters[index].detach().copy_(whole)
            else:
                unit.refresh(group.parameters[index], whole)

    def free_gathered(self) -> None:
        """See ``runtime.Publisher``."""
        self.lifetime.free_gathered()

    def tensors(self) -> list[torch.Tensor]:
        """The buffers that are gathered now, and the tensors that the transport keeps."""
        gathered = [t for unit in self._units.values() for store in unit.storages for t in store.tensors()]
        return gathered + self.executor.kept_tensors()

    def remove_hooks(self) -> None:
        """Remove the hooks from the model's modules."""
        self.hooks.remove()

    def end(self) -> None:
        """Remove all hooks and leave the modules with partitioned parameters: the model is about to be sharded again.

        It is needed if the optimizer was dropped without `release`: the hooks keep this object alive, and this object
        keeps the gradients.
        """
        self._gradients.remove_hooks()
        self.hooks.remove()
        self.executor.free_all()


def partition(
    model: nn.Module,
    infos: Sequence[ParameterInfo],
    plans: Sequence[UnitPlan],
    *,
    tier: Tier | None = None,
    kept: KeptGroups | None = None,
) -> Partition:
    """Partition the model's parameters unit by unit (collective).

    All ranks that share a parameter get the values of the first of these ranks.

    Args:
        infos: facts of every parameter.
        plans: the units to make.
        tier: where shards live; None: on the device.
        kept: units and groups of an earlier layout that stay as they are.
    """
    kept = kept or KeptGroups()
    by_name = {info.name: info for info in infos}
    units: list[Unit] = []
    resident: list[Unit] = []
    partitioned: list[PartitionedUnit] = []
    plain_of: dict[int, nn.Parameter] = {}
    registered = take_pending(model)  # it has the `id`s of the parameters that are replaced now
    unit_of_original: dict[int, int] = {}
    for plan in plans:
        if plan.resident:
            unit, originals = _resident(plan, model, by_name, kept)
            resident.append(unit)
        elif (same := kept.units.get(plan.groups)) is not None:
            same.renumber(plan)
            unit, originals = same.as_unit(), same.plain_of()
            partitioned.append(same)
        else:
            kind = _kind_of(plan)
            divided = kind(plan, tier=tier, memory=lambda ranks: memory_of(ranks, ranks.gather_group))
            originals = divided.adopt(model, by_name)
            unit = divided.as_unit()
            unit_of_original.update(dict.fromkeys(originals, plan.index))
            partitioned.append(divided)
        plain_of.update(originals)
        units.append(unit)
    units.sort(key=lambda unit: unit.index)
    external = tuple((module, unit_of_original[key]) for module, key in registered if key in unit_of_original)
    return Partition(tuple(units), tuple(resident), tuple(partitioned), plain_of, external)


def _kind_of(plan: UnitPlan) -> type[PartitionedUnit]:
    if not any(group.key.hooked for group in plan.groups):
        return PartitionedUnit
    from ..params.hooked_unit import HookedUnit  # lazy import: most models have none

    return HookedUnit


def read_ahead_of(units: Sequence[PartitionedUnit], tier: Tier | None) -> ReadAhead | None:
    """The object that reads shards from disk before their gathers; None if no shards are on disk."""
    homes = {unit.index: [g.shard for g in unit.groups if isinstance(g.shard, ReadsAhead)] for unit in units}
    found = {index: shards for index, shards in homes.items() if shards}
    if not found:
        return None
    return ReadAhead(found, elements=getattr(tier, "ahead", 0), count=getattr(tier, "ahead_count", 0))


def _resident(
    plan: UnitPlan, model: nn.Module, infos: Mapping[str, ParameterInfo], kept: KeptGroups
) -> tuple[Unit, dict[int, nn.Parameter]]:
    """A unit that stays whole, and the whole parameters that replaced partitioned ones, by the ``id`` of these."""
    groups, replaced = [], {}
    for group in plan.groups:
        if (same := kept.groups.get(group)) is not None:
            groups.append(same)
            continue
        own = []
        for name in group.layout.names:
            parameter = model.get_parameter(name)
            if isinstance(parameter, PartitionedParameter):
                whole = restore_parameter(model, (name, *infos[name].aliases), parameter)
                replaced[id(parameter)] = parameter = whole
            own.append(parameter)
        flat = FlatGroup.resident(group, own, memory=memory_of(group.key.ranks))
        if flat.visible is not None:
            broadcast_first(flat.visible, flat.ranks)
        groups.append(flat)
    return Unit(plan, tuple(groups)), replaced


def limits_of(units: Sequence[PartitionedUnit], settings: ZeroConfig) -> GatherLimits:
    """The number of elements of these units that may be gathered at once."""
    numel = {unit.index: unit.numel for unit in units}
    return GatherLimits(
        tuple(numel.get(index, 0) for index in range(max(numel, default=-1) + 1)),
        max_reuse_distance=settings.stage3_max_reuse_distance,
        max_live=settings.stage3_max_live_parameters,
        prefetch=settings.size("stage3_prefetch_bucket_size"),
    )
