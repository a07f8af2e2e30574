"""A unit of stage 3 at run time: its shards, the storage its parameters are gathered into, and the two objects of each
parameter.

Every parameter has two permanent objects: a plain ``nn.Parameter``, a view into the gathered storage, which modules
hold while the unit is in use, and a ``PartitionedParameter``, which they hold otherwise. ``swap_in`` and ``swap_out``
exchange them wherever the model has the parameter (a tied one has several places).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from dsx_comm import RankSet
from torch import nn

from ..homes.home import read
from ..homes.tiers import DeviceTier, Tier
from ..plan.layout import LocalSlice
from ..plan.units import GroupKey, GroupPlan, ParameterInfo, UnitPlan
from .flat import FlatGroup, Unit, make_shard
from .memory import Memory, OrdinaryMemory
from .partitioned import PartitionedParameter, PartitionedParameterError
from .restored import note_replaced
from .shard_view import Part, ShardView
from .sources import SourceWithPlain
from .whole import joining, read_whole, write_all, write_whole

__all__ = ["GatheredStorage", "PartitionedUnit", "Place", "UnitState", "is_partitioned"]


class GatheredStorage:
    """A flat buffer of ``numel`` elements whose memory can be freed and allocated again under the same views.

    Autograd saves *tensors*, and a tensor keeps its storage object. If the object stays and only its memory is freed
    and filled again, all tensors saved during forward (parameters, transposes, slices of them) have their data again
    after the refill. Two rules make that exact: bytes are written through ``fill``, a tensor over the same storage with
    a version counter of its own, so that a refill is not an in-place change to what autograd saved; and after an
    optimizer step the counter of ``base``, which is that of all views, is moved, so that a backward through a graph
    from before the step raises torch's own error, as it does without sharding.

    Reading a view while ``allocated`` is false crashes the process; no such view may be reachable then. After
    construction the memory is allocated (with undefined contents), so that views can be made.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.base = torch.empty(numel, dtype=dtype, device=device)
        """The tensor whose version counter all views share."""
        self._storage = self.base.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.numel = numel
        # `.data` shares the storage but not the version counter.
        self.fill = self.base.data

    @property
    def nbytes(self) -> int:
        """Bytes of the memory while it is allocated."""
        return self._nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def allocated(self) -> bool:
        """Whether the memory is allocated. For an empty buffer it is always True."""
        return self._nbytes == 0 or self._storage.nbytes() > 0

    def view(self, start: int, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """A tensor of ``shape`` over the elements from ``start`` on. Make and read it only while ``allocated``."""
        size = torch.Size(shape)
        return self.base[start : start + size.numel()].view(size)

    def allocate(self) -> None:
        """Allocate the memory, with undefined contents, unless it is allocated."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Free the memory. The views stay, and must not be read."""
        if self._storage.nbytes():
            self._storage.resize_(0)

    def tensors(self) -> list[torch.Tensor]:
        """The memory, while it is allocated."""
        return [self.fill] if self.numel and self.allocated else []

    def poison(self) -> None:
        """Fill allocated memory of a floating-point dtype with NaN. Tests use it to find reads after `free`."""
        if self.allocated and self.dtype.is_floating_point:
            self.fill.fill_(float("nan"))


class UnitState(Enum):
    """The memory that a unit has besides its shards."""

    PARTITIONED = "none"
    GATHERING = "the whole parameters, whose values are on their way"
    GATHERED = "the whole parameters"


@dataclass(frozen=True)
class Place:
    """One attribute of a module that holds a parameter."""

    module: nn.Module
    attribute: str
    plain: nn.Parameter
    partitioned: PartitionedParameter


class UnitParameter(SourceWithPlain):
    """The ``ParameterSource`` of a parameter of a sharded model."""

    def __init__(self, name: str, unit: PartitionedUnit, group: FlatGroup) -> None:
        self.name, self.unit, self.group = name, unit, group
        self._index = group.layout.index(name)
        self._opened = False
        self.on_refresh: list[Callable[[], object]] = []
        """Called when dsx-zero itself has written a new value into the gathered parameter."""

    def local_shard(self) -> torch.Tensor:
        part = self.group.layout.local_slice(self.name, self.group.rank)
        return read(self.group.shard, *((0, 0) if part is None else (part.offset, part.offset + part.numel)))

    def full_tensor(self) -> torch.Tensor:
        group = self.group
        return read_whole(group.layout, self.name, group.shard, group.ranks, device=group.key.device)

    def shard_view(self) -> ShardView:
        """This rank's elements for torch's checkpoints, over the shard's memory (a copy if it is on disk)."""
        group, values = self.group, self.local_shard()
        part = group.layout.local_slice(self.name, group.rank) or LocalSlice(0, 0, 0)
        of = group.global_of(self.name)
        whole = joining(group.layout, self.name, group.ranks, values.dtype, group.key.device, of)
        shape = Part.of_range(group.layout.shapes[self._index], part.start, part.stop, of)
        mine = None if group.shard.view() is None else id(group)

        def on_load() -> None:  # no method: a stager of torch would copy the object behind it
            if group.before_load is not None:
                group.before_load()

        return ShardView(values, shape, whole=whole, on_load=on_load, mine=mine)

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        if self._opened:
            edit(self.plain.detach())
            return
        whole = self.full_tensor()
        edit(whole)
        whole = self._replace(whole)
        if self.unit.state is UnitState.GATHERED:
            self.plain.detach().copy_(whole)

    def open(self) -> torch.Tensor:
        """From now on apply operations on the partitioned parameter to the plain one, whose unit must be gathered."""
        self._opened = True
        return self.plain.detach()

    def close(self, *, source_rank: int | None) -> None:
        """End ``open``. With a ``source_rank`` all ranks keep that rank's values (collective)."""
        self._opened = False
        if source_rank is not None:
            whole = self._replace(self.plain.detach(), source_rank=source_rank)
            self.plain.detach().copy_(whole)

    def _replace(self, whole: torch.Tensor, *, source_rank: int = 0) -> torch.Tensor:
        """Make an edit the parameter's value, in shard and master (collective). Returns that rank's tensor."""
        if self.group.before_edit is not None:
            self.group.before_edit()
        whole = write_whole(self.group, self.name, whole, source_rank=source_rank)
        self.group.note_replaced()
        return whole

    @property
    def plain(self) -> nn.Parameter:
        """The plain parameter. Read it only while its unit is gathered."""
        return self.group.parameters[self._index]

    def borrow(self) -> torch.Tensor | None:
        if self._opened:
            return self.plain
        gather_on_use = self.unit.gather_on_use
        return self.plain if gather_on_use is not None and gather_on_use.gather_for_use(self.unit) else None

    def watch_output(self, output: Any) -> Any:
        gather_on_use = self.unit.gather_on_use
        return output if gather_on_use is None or self._opened else gather_on_use.watch(self.unit, output)

    def set_requires_grad(self, value: bool) -> str | None:
        self.plain.requires_grad_(value)  # if the layout has it as frozen, the next forward notices the change
        return None


class GatherOnUse:
    """Gathers units for operations outside their own modules. ``GatherLifetime`` implements it."""

    def gather_for_use(self, unit: PartitionedUnit) -> bool:
        """Gather the unit until the running forward or backward ends. Returns False if none runs."""
        raise NotImplementedError

    def gathered(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """Inside the context the units' whole parameters are in memory."""
        raise NotImplementedError

    def discard(self, unit: PartitionedUnit) -> None:
        """Free the unit, unless it is in use."""
        raise NotImplementedError

    def watch(self, unit: PartitionedUnit, output: Any) -> Any:
        """Return ``output``, watched so that the unit is gathered for its backward."""
        raise NotImplementedError


class PartitionedGroup(FlatGroup):
    """A flat group whose parameters have no memory between uses. Copying it would read memory that is not there."""

    def __deepcopy__(self, memo: dict) -> FlatGroup:
        raise self._refusal("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refusal("pickled")

    def _refusal(self, what: str) -> PartitionedParameterError:
        return PartitionedParameterError(
            f"a model sharded at stage 3 cannot be {what} (its parameter '{next(iter(self.layout.names), '')}' is"
            " partitioned over the ranks): copy the model before it is sharded, or save it with"
            " dsx_zero.full_state_dict(optimizer) or engine.save_checkpoint"
        )


def is_partitioned(group: FlatGroup) -> bool:
    """Whether the group's parameters have memory only while they are in use."""
    return isinstance(group, PartitionedGroup)


class PartitionedUnit:
    """A unit of stage 3: its shards, its gathered storage, and the two objects of each of its parameters.

    Args:
        plan: groups and parameters of the unit.
        gather_on_use: gathers the unit for operations outside its modules.
        memory: gives the memory for shards on the device, for the ranks that share them.
        tier: where shards live; None: on the device.
    """

    stale = False
    """Whether what is gathered is not the value of the shards any more, so that it must not be kept for a later use."""

    def __init__(
        self,
        plan: UnitPlan,
        *,
        gather_on_use: GatherOnUse | None = None,
        memory: Callable[[RankSet], Memory] = lambda ranks: OrdinaryMemory(),
        tier: Tier | None = None,
    ) -> None:
        tier = tier or DeviceTier()
        self.plan = plan
        self.index = plan.index
        self.state = UnitState.PARTITIONED
        self.uses = 0
        """Number of forwards and backwards that use the unit. Its memory stays while it is above 0."""
        self.storages = tuple(self._storage(group.key, group.layout.numel) for group in plan.groups)
        self.groups = tuple(
            _partitioned_group(group, store, memory(group.key.ranks), tier)
            for group, store in zip(plan.groups, self.storages)
        )
        self.numel = sum(store.numel for store in self.storages)
        """Elements of the gathered parameters, padding included."""
        self.name = str(plan)
        self.gather_on_use = gather_on_use
        self._places: list[Place] = []

    @staticmethod
    def _storage(key: GroupKey, numel: int) -> GatheredStorage:
        return GatheredStorage(numel, dtype=key.dtype, device=key.device)

    def _source(self, name: str, group: FlatGroup) -> UnitParameter:
        return UnitParameter(name, self, group)

    def renumber(self, plan: UnitPlan) -> None:
        """Take the index of `plan`, which has the same groups: the model gets a new layout."""
        self.plan, self.index, self.name = plan, plan.index, str(plan)

    def plain_of(self) -> dict[int, nn.Parameter]:
        """The plain parameters, by the ``id`` of the partitioned ones."""
        return {id(place.partitioned): place.plain for place in self._places}

    def as_unit(self) -> Unit:
        """The unit in the form in which gradients and optimizer use it."""
        return Unit(self.plan, self.groups)

    def adopt(self, model: nn.Module, infos: Mapping[str, ParameterInfo]) -> dict[int, nn.Parameter]:
        """Take over the model's parameters: values into the shards, partitioned parameters into the modules.

        The values are those of rank 0, in few messages. Partitioned parameters of ``Init`` are gathered one at a time.

        Returns:
            The plain parameters, by the ``id`` of the parameters that were replaced.
        """
        plain_of = {}
        for group in self.groups:
            key = group.key

            def whole_of(name: str, device: torch.device = key.device) -> torch.Tensor:
                original = model.get_parameter(infos[name].name)
                whole = (
                    original.source.full_tensor() if isinstance(original, PartitionedParameter) else original.detach()
                )
                return whole.to(device)

            with torch.no_grad():
                write_all(group, group.layout.names, whole_of, dtype=key.dtype, device=key.device)
            for index, name in enumerate(group.layout.names):
                original = self._adopt_one(model, group, index, infos[name])
                plain_of[id(original)] = group.parameters[index]
        return plain_of

    def _adopt_one(self, model: nn.Module, group: FlatGroup, index: int, info: ParameterInfo) -> torch.Tensor:
        original = model.get_parameter(info.name)
        plain = group.parameters[index]
        attributes = {k: v for k, v in vars(original).items() if k not in ("_source", "_is_param")}
        _move_hooks(original, plain)
        partitioned = self._face(original, self._source(info.name, group), info)
        for face in (plain, partitioned):
            vars(face).update(attributes)
        if original is not partitioned:
            note_replaced(original, partitioned)
        for name in (info.name, *info.aliases):
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            module._parameters[attribute] = partitioned  # type: ignore[assignment]
            self._places.append(Place(module, attribute, plain, partitioned))
        return original

    @staticmethod
    def _face(original: torch.Tensor, source: UnitParameter, info: ParameterInfo) -> PartitionedParameter:
        """The partitioned parameter. It keeps the `requires_grad` that its user set.

        One that exists already (from `Init`, or from an earlier layout) is used again, so that objects outside the
        model that refer to it still refer to the model's parameter.
        """
        if not isinstance(original, PartitionedParameter):
            return PartitionedParameter(
                source, info.shape, dtype=info.dtype, device=info.device, requires_grad=info.requires_grad
            )
        original._source = source
        return original

    def swap_in(self) -> None:
        """Put the plain parameters into the modules. The unit must be gathered.

        A place that holds another tensor keeps it: `torch.func.functional_call` computes with tensors of its caller.
        """
        for place in self._places:
            if place.module._parameters.get(place.attribute) is place.partitioned:
                place.module._parameters[place.attribute] = place.plain

    def swap_out(self) -> None:
        """Put the partitioned parameters into the modules."""
        for place in self._places:
            if place.module._parameters.get(place.attribute) is place.plain:
                place.module._parameters[place.attribute] = place.partitioned  # type: ignore[assignment]

    def refresh(self, plain: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the new value of a parameter whose shard has it already, if the unit is gathered."""
        if self.state is not UnitState.GATHERED:
            return
        plain.detach().copy_(whole)
        for place in self._places:
            source = place.partitioned.source
            if place.plain is plain and isinstance(source, UnitParameter):
                for tell in source.on_refresh:
                    tell()

    def allocate(self) -> None:
        """Allocate the memory of the gathered parameters."""
        for storage in self.storages:
            storage.allocate()

    def faces(self) -> Iterator[torch.Tensor]:
        """Both objects of every parameter."""
        for place in self._places:
            yield place.plain
            yield place.partitioned


def _move_hooks(original: torch.Tensor, plain: nn.Parameter) -> None:
    """Move hooks that users registered on a parameter of an earlier layout to the parameter that replaces it."""
    if not isinstance(original, PartitionedParameter) or (leaf := original.source.leaf()) is None:
        return
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(leaf, kind, None)
        if hooks and plain.requires_grad:
            setattr(plain, kind, hooks)


def _partitioned_group(plan: GroupPlan, storage: GatheredStorage, memory: Memory, tier: Tier) -> FlatGroup:
    layout = plan.layout
    parameters = [
        nn.Parameter(storage.view(offset, shape), requires_grad=plan.key.trainable)
        for offset, shape in zip(layout.offsets, layout.shapes)
    ]
    storage.free()
    return PartitionedGroup(plan, parameters, visible=None, shard=make_shard(plan, memory, tier), tier=tier)
