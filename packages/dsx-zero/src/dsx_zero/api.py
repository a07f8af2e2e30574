"""`shard`: make a model and its optimizer share states among ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSets
from torch import nn

from ._version import __version__
from .access import OWNERS
from .alike import agree, hash_of, model_facts, optimizer_facts, telling
from .errors import ZeroConfigError, ZeroModelError, ZeroOptimizerError
from .gather.publishing import Gathering, Replicated, share_first
from .grads.averaging import Averaging, ByReduction, averaging_of
from .grads.gradients import Gradients, LocalGradients, ReducedGradients
from .grads.reduction import LocalReducer, Reducer, Reduction, ReductionEngine
from .grads.reductions import Reductions
from .grads.unused import IgnoreUnused, UnusedParameters
from .groups import LentGroups, join_launched_ranks
from .homes.chosen import (
    check_placement,
    check_room,
    is_stepped_by_host,
    late_update_after,
    makes_states_at_once,
    offload_ratio,
    place_units,
    placement_of,
    steps_during_backward,
    sub_group_size,
    transfers_beside_step,
)
from .homes.stored import TensorStore
from .homes.tiers import Placement, UnitPlacement
from .lanes import make_lane
from .optimizer import ZeroOptimizer
from .order.agreed import AgreedOrder, Channel, NullOrder, Order, ReuseLimits
from .order.backward import BackwardClock
from .order.channel import AskingChannel, ControlChannel, OneRank
from .order.executor import CollectiveExecutor
from .params.flat import FlatGroup, Unit
from .params.init import InitParameter
from .params.memory import Memory, OrdinaryMemory, memory_of
from .params.partitioned import PartitionedParameter
from .params.restored import current_parameter, restore_model
from .plan.leaves import fine_modules, named_leaves
from .plan.rank_sets import check_rank_sets, choose_rank_sets, is_plain, ranks_of_buffers, ranks_of_mesh
from .plan.secondary import SecondaryRanks
from .plan.units import ParameterInfo, Persistence, RanksOf, UnitPlan, find_parameters, plan_units
from .precision import Precision
from .resharding import release_model
from .runtime import Publisher, Runtime
from .step.masters import check_optimizer, make_masters, needs_whole_tensors, place_masters, replace_parameters
from .step.norm import groups_of_norm
from .step.param_groups import StepGroups
from .step.parts import may_be_cut, why_at_once
from .step.plan import Pipeline
from .step.runner import plan_step
from .step.states import OptimizerStates
from .transports.chosen import PlainTransports, Transports, transports_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .config import ZeroConfig

__all__ = ["shard"]

_log = logging.getLogger(__name__)

_CALL = "dsx_zero.shard"

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


class _NoOptimizer:
    """Stands where a model is sharded without an optimizer."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}
        self.defaults: dict[str, Any] = {}

    def step(self) -> None:
        raise ZeroOptimizerError("step(): the model was sharded without an optimizer; give one to dsx_zero.shard")


def shard(
    model: nn.Module,
    optimizer: OptimizerLike,
    *,
    stage: int | None = None,
    process_group: Any = None,
    config: ZeroConfig | dict[str, Any] | None = None,
    precision: Precision | None = None,
    reduction: Reduction | None = None,
    mpu: Any = None,
    ranks_of: RankSets | RanksOf | None = None,
    placement: Placement | None = None,
    store: TensorStore | None = None,
    device: torch.device | None = None,
    transports: Transports | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, ZeroOptimizer]:
    """Divide a model's states among the ranks of a process group (collective).

    The model stays the same object with the same parameters; rank 0's parameters and buffers become everybody's. Train
    as before: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. A model that is sharded already is sharded
    anew: its optimizer is released with a warning (`release_model`).

    Args:
        model: any module; its parameters are materialised and of any dtypes.
        optimizer: an element-wise `torch.optim.Optimizer` over the model's parameters, or a callable that makes one of
            them; None for a model that is not trained. Parameters it does not hold are treated as frozen.
        stage: 0 nothing is divided, 1 optimizer states, 2 and gradients, 3 and parameters. Default: the
            configuration's.
        process_group: the ranks to divide among; default: the data-parallel ranks that `dsx_comm.parallel_groups`
            speaks of, which are all ranks unless a topology or an `mpu` was given to it. Where there is no process
            group yet, the ranks that a launcher started make one; without a launcher this process is alone.
        config: the `zero_optimization` section.
        precision: dtypes of gradients, messages and masters.
        reduction: mean or sum, and where the division happens.
        mpu: in the place of `process_group`: a Megatron-style object that tells the data- and model-parallel groups.
        ranks_of: chooses which ranks share the buffer of a parameter (`dsx_comm.RankSet`), given its facts
            (`info.name`, `info.marks`, ...). Default: `dsx_comm.RankSets` over the groups above, which follows the
            marks on the parameters (`tensor_model_parallel`, `allreduce=False` with `group_name`).

        placement: where shards, masters, gradients and optimizer states live between their uses. Default: what the
            configuration's `offload_optimizer` and `offload_param` say, else all of it on the device.
        device: where the model computes; default: where its parameters are. They are moved there unit by unit, so that
            at stage 3 the device never holds more than one whole unit and this rank's shards (none of those that
            `placement` keeps elsewhere). Buffers are not moved.
        store: for state on disk (`device: nvme`), such as a `dsx_nvme.TensorStore` of this rank.
        transports: how parameters and gradients travel between the ranks. Default: what the configuration says.
        mesh: in the place of `process_group`: a device mesh of one dimension, or of two for hybrid sharding: states are
            divided along the second, and copied along the first.

    Returns:
        The model and a `ZeroOptimizer`.

    Raises:
        ZeroConfigError: a setting that is wrong or not available yet.
        ZeroModelError: a model that cannot be sharded.
        ZeroOptimizerError: an optimizer that cannot work on slices, or with parameters the model does not have.
        RanksDifferError: the ranks have different models, optimizers or settings, or one of them raised one of the
            others.
    """
    process_group, mesh_shards = ranks_of_mesh(mesh, process_group)
    data = choose_rank_sets(process_group, mpu, ranks_of).data
    with telling(data.group):
        settings = _settings(stage, config)
        precision, reduction = precision or Precision(), reduction or Reduction()
        settings.check_combinations(mesh=mesh_shards > 0)
        _check_given(optimizer, stage=settings.stage)
        given = placement is not None
        placement = placement or placement_of(settings, store)
        check_placement(placement, settings.stage)
    join_launched_ranks()
    sets = choose_rank_sets(process_group, mpu, ranks_of)
    data = sets.data
    groups = LentGroups()
    plain = PlainTransports(precision.wire_dtype, settings.size("reduce_bucket_size"))
    transports = transports or transports_of(settings, plain, groups)
    facts = {
        **_setting_facts(settings, precision, reduction),
        "placement": str(placement),
        "transports": type(transports).__name__,
    }
    agree(_CALL, {**facts, **dict(model_facts(model))}, data.group)
    release_model(model)
    choose: RanksOf = sets if ranks_of is None else ranks_of
    with telling(data.group):
        _check_marked_in_time(model, choose)
        _check_values(model)
    choose = SecondaryRanks(
        choose,
        groups.take_part,
        shard_size=mesh_shards or settings.shard_ranks,
        near_size=settings.near_ranks,
        setting="mesh" if mesh_shards else "zero_optimization.mics_shard_size",
    )
    if settings.stage < 3:
        restore_model(model)
    with telling(data.group):
        inner: Any = _NoOptimizer() if optimizer is None else _inner(model, optimizer, stage=settings.stage)
        held = frozenset(id(p) for group in inner.param_groups for p in group["params"])
        infos = find_parameters(model, held)
        _check_model(model, infos)
        if device is not None:
            infos = tuple(replace(info, device=device) for info in infos)
        plans = plan_units(
            model,
            infos,
            stage=settings.stage,
            ranks_of=choose,
            reduce_bucket_size=_bucket_size(settings, infos, placement),
            persistence=Persistence(
                settings.size("stage3_param_persistence_threshold"), settings.stage3_model_persistence_threshold
            ),
            leaves=_leaves(model, settings),
            undivided=needs_whole_tensors(inner),
        )
        check_rank_sets(plans, data)
        check_room(placement, {str(p): _shard_numel(p) for p in plans if not p.resident})
        averaging = averaging_of(inner, reduction, stage=settings.stage, rank=data.rank, plain=is_plain(plans, data))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    agree(_CALL, {**dict(optimizer_facts(inner, names)), **_plan_facts(plans)}, data.group)
    sizes = [(plan.index, str(plan), _shard_numel(plan)) for plan in plans]
    placements = place_units(sizes, placement, ratio=1.0 if given else offload_ratio(settings))
    with telling(data.group):
        _check_late_update(settings, inner, placements)
    build = _Build(
        model,
        settings,
        precision,
        reduction,
        data,
        infos,
        plans,
        averaging,
        placement,
        placements,
        transports,
        groups,
    )
    runtime = build.partitioned(inner) if settings.stage == 3 else build.resident()
    for notice in settings.notices():
        if data.rank == 0:
            _log.warning(notice)
    for unit in runtime.trainable_units():
        for group in unit.trainable:
            group.make_master(precision.master, whole=runtime.whole, tier=build.placed(unit.index).masters)
    moves = any(record.placement.states is not None for record in placements) or any(
        group.master is not None and group.master.view() is None for unit in runtime.units for group in unit.groups
    )
    most = sub_group_size(settings, moves=moves) if may_be_cut(inner) else None
    early = _early_units(build, runtime, inner)
    masters = make_masters(runtime.units, whole=runtime.whole, most=most)
    faces = _faces(model, runtime)
    shown: list[list[torch.Tensor]] = [[faces.get(id(p), p) for p in g["params"]] for g in inner.param_groups]
    place_masters(inner, masters)
    stepped = [master for _, pieces in masters for master in pieces]
    unit_of = {id(group): unit.index for unit in runtime.units for group in unit.groups}
    states = OptimizerStates(inner, stepped, [build.placed(unit_of[id(m.group)]).states for m in stepped])
    groups_of_step = StepGroups(inner, shown)
    if makes_states_at_once(settings) and not states.make_now(groups_of_step.numbers()) and data.rank == 0:
        _log.warning(
            "zero_optimization.offload_optimizer.fast_init has no effect: %s makes its states in its first step",
            type(inner).__name__,
        )
    sharded = ZeroOptimizer(
        inner,
        runtime,
        stepped,
        _unused_check(runtime, settings),
        groups=groups_of_step,
        states=states,
        placements=placements,
        store=store,
        plan=plan_step(
            inner,
            runtime,
            stepped,
            most=most,
            moves=moves,
            by_unit=bool(early),
            pipeline=Pipeline(*transfers_beside_step(settings)),
        ),
        lane=build.lane,
        channel=build.channel,
        early_units=early,
        late_after=late_update_after(settings),
        faces=faces,
        owner_of=lambda parameter: None if (found := OWNERS.find(parameter)) is None else found[0],
    )
    if data.rank == 0:
        _report_padding(plans)
    if data.rank == 0 and not placement.on_device:
        _log.info("where state lives:\n%s", "\n".join(f"  {record}" for record in placements))
    dtypes = [group.key.dtype for unit in runtime.units for group in unit.trainable]
    averaging.announce(precision.wire_dtype(dtypes[0]) if dtypes else None)
    for unit in runtime.units:
        for group in unit.groups:
            for name, parameter in zip(group.layout.names, group.parameters):
                OWNERS.add(parameter, sharded, name)
    for info in infos:  # at stage 3 the model holds other objects than the gradients' between uses
        OWNERS.add(model.get_parameter(info.name), sharded, info.name)
    return model, sharded


def _check_late_update(settings: ZeroConfig, inner: Any, placements: Sequence[UnitPlacement]) -> None:
    """Refuse late updates that a thread of the host cannot make. Raises ZeroConfigError."""
    if late_update_after(settings) is None or isinstance(inner, _NoOptimizer):
        return
    why = why_at_once(inner)
    if not all(is_stepped_by_host(record.placement) for record in placements):
        why = "not all masters, gradients and optimizer states are in host memory"
    if why is not None:
        raise ZeroConfigError(
            "zero_optimization.offload_optimizer.late_update_after",
            f"got {late_update_after(settings)}, but {why}; expected null, or an element-wise optimizer whose state is"
            " in host memory",
        )


def _early_units(build: _Build, runtime: Runtime, inner: Any) -> list[int]:
    """The units that may be stepped while backward goes on, the same on all ranks."""
    safe = hasattr(inner, "step_flat") and why_at_once(inner) is None and isinstance(runtime.averaging, ByReduction)
    if not safe or runtime.checks_overflow or not steps_during_backward(build.settings):
        return []
    return [
        unit.index
        for unit in runtime.trainable_units()
        if is_stepped_by_host(build.placed(unit.index))
        and all(group.own_master is not None for group in unit.trainable)
    ]


_RATIO_UNITS = 16
"""Units that a ratio of offload divides, at least: at stages 1 and 2 a unit is as large as a message."""

_EARLY_UNIT = 1 << 20
"""Elements of a unit that is stepped while backward goes on: smaller ones would cost more than they hide."""


def _bucket_size(settings: ZeroConfig, infos: Sequence[ParameterInfo], placement: Placement) -> int:
    """Elements of a unit at stages 1 and 2, and of a reduction."""
    size, ratio = settings.size("reduce_bucket_size"), offload_ratio(settings)
    total = sum(info.numel for info in infos if info.trainable)
    if ratio not in (0.0, 1.0):
        return max(1, min(size, total // _RATIO_UNITS))
    if is_stepped_by_host(placement) and steps_during_backward(settings):
        return min(size, max(_EARLY_UNIT, total // _RATIO_UNITS))
    return size


_PADDING = 1.25
"""Buffers this many times as large as their parameters are reported."""


def _report_padding(plans: Sequence[UnitPlan]) -> None:
    """Say so where ownership by whole tensors needs much more than the tensors: one of them is as large as a shard."""
    layouts = [group.layout for plan in plans for group in plan.groups if group.layout.undivided]
    needed, held = sum(sum(layout.sizes) for layout in layouts), sum(layout.numel for layout in layouts)
    if held > _PADDING * needed:
        _log.warning(
            "the optimizer needs whole tensors, which %d ranks cannot own in equal parts: buffers have %.2f times the"
            " elements of their parameters, in memory and in messages; use fewer ranks or larger units (at stage 3"
            " stage3_module_granularity_threshold or leaf modules)",
            max(layout.world_size for layout in layouts), held / needed,
        )  # fmt: skip


def _shard_numel(plan: UnitPlan) -> int:
    return sum(group.layout.shard_numel for group in plan.groups)


def _setting_facts(settings: ZeroConfig, precision: Precision, reduction: Reduction) -> dict[str, str]:
    """What is asked for, as facts that all ranks must have in common. Folders may differ."""
    given = settings.model_dump(mode="json", exclude={"offload_param", "offload_optimizer"})
    return {
        **{f"zero_optimization.{key}": repr(value) for key, value in given.items()},
        **{f"precision.{key}": str(value) for key, value in vars(precision).items()},
        **{f"reduction.{key}": str(value) for key, value in vars(reduction).items()},
        "torch": torch.__version__.split("+")[0],
        "dsx-zero": __version__,
    }


def _plan_facts(plans: Sequence[UnitPlan]) -> dict[str, str]:
    """The units: they depend on marks and on the hidden structure of modules too."""
    return {
        f"unit {plan.index}": (
            f"{plan.module or 'root'}, {len(plan.names)} parameters, {hash_of(plan.names)}"
            f" ({', '.join(str(group.key.ranks) for group in plan.groups)})"
        )
        for plan in plans
    }


def _faces(model: nn.Module, runtime: Runtime) -> dict[int, torch.Tensor]:
    """What the model holds between uses, for the `id` of each plain parameter that only takes its place meanwhile
    (stage 3).
    """
    plain = {
        name: p
        for unit in runtime.units
        for group in unit.groups
        for name, p in zip(group.layout.names, group.parameters)
    }
    return {id(p): face for name, p in plain.items() if (face := model.get_parameter(name)) is not p}


def _settings(stage: int | None, config: ZeroConfig | dict[str, Any] | None) -> ZeroConfig:
    from pydantic import ValidationError  # late: pydantic costs import time

    from .config import PATH, ZeroConfig

    try:
        settings = config if isinstance(config, ZeroConfig) else ZeroConfig.model_validate(config or {})
        if stage is not None:
            if settings.stage != stage and "stage" in settings.model_fields_set:
                raise ZeroConfigError(
                    f"{PATH}.stage", f"got {settings.stage} in the config and stage={stage}; give one"
                )
            settings = ZeroConfig.model_validate({**settings.model_dump(exclude_unset=True), "stage": stage})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in (PATH, *first["loc"]))
        raise ZeroConfigError(path, f"{first['msg']} (got {first['input']!r})") from error
    settings.check_available()
    return settings


def _unused_check(runtime: Runtime, settings: ZeroConfig) -> UnusedParameters | IgnoreUnused:
    if settings.ignore_unused_parameters:
        return IgnoreUnused()
    return UnusedParameters(runtime.trainable_units(), runtime.ranks)


def _leaves(model: nn.Module, settings: ZeroConfig) -> frozenset[str]:
    chosen = settings.leaf_module
    named = frozenset() if chosen is None else named_leaves(model, chosen.classes, chosen.names, chosen.name_suffixes)
    return named | fine_modules(model, settings.stage3_module_granularity_threshold)


def _check_given(optimizer: OptimizerLike, *, stage: int) -> None:
    """Refuse an optimizer that cannot be used, before anything is changed."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ZeroOptimizerError("the optimizer is sharded already; give dsx_zero.shard the plain one")
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, stage=stage)
    elif optimizer is not None and not callable(optimizer):
        raise ZeroOptimizerError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer, a callable that makes one of"
            " parameters, or None"
        )


def _inner(model: nn.Module, optimizer: Any, *, stage: int) -> torch.optim.Optimizer:
    made: Any = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(_trainable(model))
    if not hasattr(made, "param_groups") or not hasattr(made, "step"):
        raise ZeroOptimizerError(
            f"the optimizer callable returned {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    check_optimizer(made, stage=stage)
    replace_parameters(made, current_parameter)
    known = {id(p) for p in model.parameters()}
    for index, group in enumerate(made.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ZeroOptimizerError(
                    f"param_groups[{index}]['params'][{place}] (shape {tuple(parameter.shape)}) is not a parameter of"
                    " the model; build the optimizer over model.parameters() after all changes to the model"
                )
    return made


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _check_model(model: nn.Module, infos: Sequence[ParameterInfo]) -> None:
    for info in infos:
        if info.device.type == "meta":
            raise ZeroModelError(
                f"{info.name}: is on the meta device and has no values; materialise the model (model.to_empty and"
                " initialise) first"
            )
        if info.trainable and not info.dtype.is_floating_point:
            raise ZeroModelError(
                f"{info.name}: trainable parameters must be of a real floating-point dtype, got {info.dtype}"
            )
    trainable = {info.name: info.trainable for info in infos}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise ZeroModelError(f"{name}: is a DTensor; a model that is divided by DTensors cannot be sharded again")
        partitioned = isinstance(parameter, PartitionedParameter) and not isinstance(parameter.source, InitParameter)
        if partitioned or _is_taken(parameter, trainable[name]):
            raise ZeroModelError(
                f"{name}: is sharded already, as part of another model whose optimizer is in use; two optimizers cannot"
                " share a parameter. Give one optimizer all groups at once, or call release() of the other one"
                " (destroy() of its engine) before"
            )


def _check_marked_in_time(model: nn.Module, ranks_of: RanksOf) -> None:
    """Refuse experts that `Init` has divided among all ranks: it has given every rank the values of the first one."""
    for info in find_parameters(model):
        parameter = model.get_parameter(info.name)
        if info.marks.expert is None or not isinstance(parameter, PartitionedParameter):
            continue
        source, holders = parameter.source, ranks_of(info).size
        if isinstance(source, InitParameter) and source.ranks.size != holders:
            raise ZeroModelError(
                f"{info.name}: is an expert's (allreduce=False), but dsx_zero.Init divided it among {source.ranks.size}"
                f" ranks before it was marked, and only {holders} hold it: all experts have the values of one. Build"
                " and mark experts inside `with dsx_zero.Init.paused():`, which may lie in a constructor"
            )


def _check_values(model: nn.Module) -> None:
    """Refuse parameters that `Init` made on the meta device and nobody has written."""
    empty = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, PartitionedParameter)
        and isinstance(parameter.source, InitParameter)
        and not parameter.source.has_values
    ]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        raise ZeroModelError(
            f"{', '.join(empty[:5])}{more}: made on the meta device under dsx_zero.Init, and without values; fill the"
            " model with dsx_zero.load(model, path) first, or write these parameters on every rank (p.data.normal_())"
        )


def _is_taken(parameter: torch.Tensor, trainable: bool) -> bool:
    """Whether sharding would take a parameter's memory from another optimizer that steps it, or give it a second one
    that does. What both leave frozen may be shared.
    """
    owner = OWNERS.find(parameter)
    if owner is None or owner[0].released:
        return False
    return trainable or owner[0].group_of(owner[1]).trainable


class _Build:
    """Makes the parts of a `Runtime` in the right order."""

    def __init__(
        self,
        model: nn.Module,
        settings: ZeroConfig,
        precision: Precision,
        reduction: Reduction,
        data: dsx_comm.RankSet,
        infos: tuple[ParameterInfo, ...],
        plans: tuple[UnitPlan, ...],
        averaging: Averaging,
        placement: Placement,
        placements: Sequence[UnitPlacement],
        transports: Transports,
        groups: LentGroups,
    ) -> None:
        self.averaging, self.placement, self.transports = averaging, placement, transports
        self._placed = {record.unit: record.placement for record in placements}
        self.device = infos[0].device if infos else torch.device("cpu")
        self.lane = make_lane(self.device)
        """For what comes and goes between tiers. Gathers and reductions have lanes of their own."""
        self.model, self.settings, self.precision, self.reduction = model, settings, precision, reduction
        self.data, self.infos, self.plans = data, infos, plans
        self.groups = groups
        self.channel: AskingChannel = OneRank()
        """Carries the words of the order."""

    def placed(self, unit: int) -> Placement:
        """Where the state of a unit lives."""
        return self._placed[unit]

    def resident(self) -> Runtime:
        """Stages 0-2: whole parameters stay in memory."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def memory(ranks: dsx_comm.RankSet) -> Memory:  # at stage 0 nobody gathers parameters
            return memory_of(ranks) if self.settings.stage > 0 else OrdinaryMemory()

        units = tuple(
            Unit(
                plan,
                tuple(
                    FlatGroup.resident(
                        group, [parameters[name] for name in group.layout.names], memory=memory(group.key.ranks)
                    )
                    for group in plan.groups
                ),
            )
            for plan in self.plans
        )
        for unit in units:
            for group in unit.groups:
                if group.visible is not None:
                    share_first(group.visible, group.ranks)
        self._share_buffers()
        alone = self.data.size == 1
        publisher: Publisher = Replicated()
        if self.settings.stage > 0 and not alone:
            publisher = Gathering(self.settings.allgather_bucket_size)
        whole = alone and self.placement.on_device  # one rank without offload has nothing to divide
        stage = 0 if whole else self.settings.stage
        return self._runtime(units, stage, publisher, self._gradients(units, stage))

    def partitioned(self, inner: Any) -> Runtime:
        """Stage 3: the modules get other parameters, which take the places of the old ones in the optimizer."""
        from .gather.executor import GatherExecutor, GatherLimits  # late: stages 0-2 need none of it
        from .gather.lifetime import GatherLifetime
        from .gather.stage3 import Stage3, partition, read_ahead_of, reuse_limits

        settings = self.settings
        sets = dict.fromkeys(group.key.ranks for plan in self.plans for group in plan.groups)
        with_gathers = {ranks: self.groups.take_for_gathers(ranks) for ranks in sets}
        plans = [plan.on(with_gathers.__getitem__) for plan in self.plans]
        if self.data.size > 1:
            self.channel = ControlChannel(self.groups.take_control(self.data), self.data.rank, self.data.size)
        found = partition(self.model, self.infos, plans, tier=self.placement.parameters)
        replace_parameters(inner, lambda old: found.plain_of.get(id(old), old))
        self._share_buffers()
        gathers = GatherExecutor(
            found.partitioned,
            transport=self.transports.gather(tuple(with_gathers.values())),
            lane=make_lane(self.device),
            limits=GatherLimits(settings.size("stage3_prefetch_bucket_size"), settings.stage3_max_live_parameters),
            ahead=read_ahead_of(found.partitioned, self.placement.parameters),
        )
        limits = reuse_limits(
            found.partitioned,
            max_reuse_distance=settings.stage3_max_reuse_distance,
            max_live=settings.stage3_max_live_parameters,
        )
        reductions = self._reductions(found.units, 3, lambda: gradients.complete())
        order = self._order(CollectiveExecutor(reductions.run_reduce, gathers), self.channel, limits)
        clock = BackwardClock(order)
        # Before the gradients: a backward begins for it first, and ends for it last.
        lifetime = GatherLifetime(found.partitioned, executor=gathers, order=order, clock=clock)
        gradients = ReducedGradients(
            self.model,
            reductions,
            order,
            clock,
            on_complete=lifetime.gradients_complete,
            keeps_local=self.averaging.local,
        )
        gathering = Gathering(settings.allgather_bucket_size)
        stage = Stage3(self.model, found, gathering, gathers, order, lifetime, gradients)
        return self._runtime(found.units, 3, stage, gradients)

    def _runtime(self, units: tuple[Unit, ...], stage: int, publisher: Publisher, gradients: Gradients) -> Runtime:
        dtypes = {group.key.dtype for unit in units for group in unit.trainable}
        return Runtime(
            model=self.model,
            stage=stage,
            ranks=self.data,
            norm_groups=self._norm_groups(units, stage),
            groups=self.groups,
            infos=self.infos,
            units=units,
            gradients=gradients,
            publisher=publisher,
            averaging=self.averaging,
            checks_overflow=self.precision.checks_overflow(dtypes),
            resident=self.settings.stage < 3,
            load_masters=self.settings.load_from_fp32_weights,
        )

    def _norm_groups(self, units: tuple[Unit, ...], stage: int) -> tuple[Any, ...]:
        sets = {group.ranks for unit in units for group in unit.trainable}
        return groups_of_norm(sets, self.data, whole=stage == 0)

    def _gradients(self, units: tuple[Unit, ...], stage: int) -> Gradients:
        """Of stages 0-2."""
        precision = self.precision
        dtypes = {group.key.dtype for unit in units for group in unit.trainable}
        if stage == 0 and self.data.size == 1 and all(precision.gradient_dtype(dtype) == dtype for dtype in dtypes):
            return LocalGradients(units)
        reductions = self._reductions(units, stage, lambda: gradients.complete())
        if self.data.size > 1:
            self.channel = ControlChannel(self._control_group(), self.data.rank, self.data.size)
        order = self._order(CollectiveExecutor(reductions.run_reduce), self.channel if self.data.size > 1 else None)
        clock = BackwardClock(order)
        gradients = ReducedGradients(self.model, reductions, order, clock, keeps_local=self.averaging.local)
        return gradients

    def _reductions(self, units: tuple[Unit, ...], stage: int, complete: Callable[[], None]) -> Reductions:
        lane = make_lane(self.device)

        def reducer(ranks: dsx_comm.RankSet) -> ReductionEngine:
            if ranks.size == 1:
                return LocalReducer.of(ranks, self.reduction)
            return Reducer(ranks, self.reduction, partial(self.transports.reduce, scatters=stage > 0), lane)

        return Reductions(
            units,
            stage=stage,
            precision=self.precision,
            reducer=reducer,
            complete=complete,
            expose=self.reduction.op == "mean",
            norm_groups=self._norm_groups(units, stage),
            overlap=self.settings.overlap_comm is not False,
            memory=memory_of,
            tier=lambda unit: self.placed(unit).gradients,
            lane=self.lane,
        )

    def _order(self, executor: CollectiveExecutor, channel: Channel | None, limits: ReuseLimits | None = None) -> Order:
        """What the ranks agree on over the channel; None: every need is executed as it comes."""
        if channel is None:
            return NullOrder(executor)
        names = {plan.index: str(plan) for plan in self.plans}
        return AgreedOrder(executor, channel, limits=limits, names=names, alone=self.data.size == 1)

    def _control_group(self) -> Any:
        """A group for words of a few bytes in host memory."""
        if dsx_comm.get_backend(self.data.group) == "gloo":
            return self.data.group
        return self.groups.take_control(self.data)

    def _share_buffers(self) -> None:
        """The first rank's buffers become everybody's who holds the module."""
        held = {name: group.key.ranks for plan in self.plans for group in plan.groups for name in group.layout.names}
        aliases = {alias: held[info.name] for info in self.infos for alias in info.aliases}
        for buffer, ranks in ranks_of_buffers(self.model, {**held, **aliases}, self.data):
            share_first(buffer, ranks)
