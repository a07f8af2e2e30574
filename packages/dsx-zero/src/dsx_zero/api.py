"""`shard`: make a model and its optimizer share states among ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSets
from dsx_comm.lanes import CudaLane, Lane
from dsx_core import with_code
from torch import nn

from .alike import agree, model_facts, optimizer_facts, telling
from .asked_settings import bucket_size, setting_facts, settings_of, without_tiny_pieces
from .assembling import assemble
from .building import Builder
from .checks import check_given, check_marked_in_time, check_model, check_not_wrapped, check_values
from .errors import HAS_NO_EFFECT, ZeroConfigError, ZeroOptimizerError
from .from_codes import check_codes, codes_of, is_taken_apart
from .from_dtensors import TensorRanks, parts_of
from .from_hooks import check_hooks, values_of
from .grads.reduction import Reduction
from .groups import AuxiliaryGroups
from .homes.chosen import (
    check_placement,
    late_update_after,
    may_step_during_backward,
    offload_ratio,
    placement_of,
    states_at_once,
)
from .homes.stored import TensorStore
from .homes.tiers import DiskTier, HostTier, Placement, UnitPlacement
from .locked_pages import ask_for_locked_pages
from .optimizer import ZeroOptimizer
from .params.restored import current_parameter, restore_model
from .plan.leaves import fine_modules, named_leaves
from .plan.rank_sets import choose_rank_sets, ranks_of_mesh
from .plan.secondary import SecondaryRanks
from .plan.sparse import sparse_parameters
from .plan.units import RanksOf, UnitPlan, find_parameters
from .precision import Precision
from .recipe import Recipe, plan_facts
from .replanning import Replanner
from .resharding import release_model
from .step.inner import why_at_once
from .step.masters import check_optimizer, replace_parameters
from .step.sparse import check_dense_gradients
from .step.trial import check_divisible
from .torch_forms import TorchForms
from .transports.chosen import PlainTransports, Transports, transports_of
from .view import OWNERS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .config import ZeroConfig

__all__ = ["shard"]

_log = logging.getLogger(__name__)

_CALL = "dsx_zero.shard"

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


class _NoOptimizer:
    """Takes the optimizer's place where a model is sharded without one."""

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
    sparse_gradients: bool = False,
) -> tuple[nn.Module, ZeroOptimizer]:
    """Divide a model's states among the ranks of a process group (collective).

    The model stays the same object with the same parameters; all ranks get the values of rank 0's parameters and
    buffers. Train as before: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. A model that is sharded
    already is sharded again: its first optimizer is released with a warning (`release_model`).

    Args:
        model: any module; its parameters are materialised and of any dtypes.
        optimizer: an element-wise `torch.optim.Optimizer` over the model's parameters, or a callable that makes one of
            them; None for a model that is not trained. Parameters it does not hold are treated as frozen.
        stage: 0 nothing is divided, 1 optimizer states, 2 and gradients, 3 and parameters. Default: the
            configuration's.
        process_group: the ranks to divide among; default: the data-parallel ranks of `dsx_comm.parallel_groups`, which
            are all ranks unless a topology or an `mpu` was given to it. If there is no process group yet, the ranks
            that a launcher started make one; without a launcher this process is the only rank.
        config: the `zero_optimization` section. Of a dict, keys without effect are warned of; those of a `ZeroConfig`
            are its `notices()`.
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
        transports: how parameters and gradients are sent between the ranks. Default: the configured transports.
        mesh: in the place of `process_group`: a device mesh of one dimension, or of two for hybrid sharding: states are
            divided along the second, and copied along the first. For a model whose parameters are DTensors (torch's
            `parallelize_module`, a `tp_plan`) the dimensions beside theirs.
        sparse_gradients: stage 0: of embeddings with `sparse=True` only rows that have a gradient are sent.

    Returns:
        The model and a `ZeroOptimizer`.

    Raises:
        ZeroConfigError: a setting that is wrong or not available yet.
        ZeroStateError: page-locked host memory is refused. Nothing has changed then.
        ZeroModelError: a model that cannot be sharded.
        ZeroOptimizerError: an optimizer that cannot work on slices, or with parameters the model does not have.
        RanksDifferError: the ranks have different models, optimizers or settings, or one of them raised one of the
            others.
    """
    parallel = TensorRanks.of(model)
    mesh = mesh if parallel is None else parallel.data_mesh(mesh)
    process_group, mesh_shards = ranks_of_mesh(mesh, process_group)
    data = choose_rank_sets(process_group, mpu, ranks_of).data
    with telling(data.group):
        settings = settings_of(stage, config)
        precision, reduction = precision or Precision(), reduction or Reduction()
        settings.check_combinations(mesh=mesh_shards > 0)
        _check_sparse(sparse_gradients, settings.stage)
        check_given(optimizer, stage=settings.stage)
        check_not_wrapped(model)
        given = placement is not None
        placement = placement or placement_of(settings, store)
        check_placement(placement, settings.stage)
    dsx_comm.join_launched_ranks()
    sets = choose_rank_sets(process_group, mpu, ranks_of)
    if parallel is not None:
        sets = parallel.joined(sets, given=process_group is not None, ranks_of=ranks_of)
    data = sets.data
    groups = AuxiliaryGroups(_device_type(model, device))
    settings = without_tiny_pieces(settings, model, data)
    plain = PlainTransports(precision.wire_dtype, settings.size("reduce_bucket_size"))
    transports = transports or transports_of(settings, plain, groups)
    facts = {
        **setting_facts(settings, precision, reduction),
        "placement": str(placement),
        "transports": type(transports).__name__,
        "sparse_gradients": str(sparse_gradients),
        **({} if parallel is None else parallel.facts()),
    }
    agree(_CALL, {**facts, **dict(model_facts(model))}, data.group)
    release_model(model)
    holders: RanksOf = sets if ranks_of is None or parallel is not None else ranks_of
    with telling(data.group):
        check_marked_in_time(model, holders)
        check_values(model)
        check_codes(model)
        check_hooks(model)

    def choose(settings: ZeroConfig) -> RanksOf:
        return SecondaryRanks(
            holders,
            groups.take_part,
            shard_size=mesh_shards or settings.shard_ranks,
            near_size=settings.near_ranks,
            setting="mesh" if mesh_shards else "zero_optimization.mics_shard_size",
        )

    if settings.stage < 3:
        restore_model(model)
    with parts_of(model, parallel), codes_of(model, device), values_of(model):
        with telling(data.group):
            inner: Any = _NoOptimizer()
            if optimizer is not None:
                inner = _inner(model, optimizer, stage=settings.stage, ranks=data.size)
            held = frozenset(id(p) for group in inner.param_groups for p in group["params"])
            infos = find_parameters(model, held)
            check_model(model, infos)
            recipe = Recipe(
                model=model,
                settings=settings,
                precision=precision,
                reduction=reduction,
                data=data,
                ranks_of=choose(settings),
                placement=placement,
                ratio=1.0 if given else offload_ratio(settings),
                device=device,
                leaves=_leaves(model, settings),
                bucket_size=bucket_size(settings, infos, placement),
                transports=transports,
                groups=groups,
                sparse=_sparse_names(model, inner, sparse_gradients, data.rank),
            )
            planned = recipe.plan(infos, inner)
            _check_late_update(settings, inner, planned.placements)
            ask_for_locked_pages(planned, stage=settings.stage, precision=precision)
            names = {id(parameter): name for name, parameter in model.named_parameters()}
        agree(_CALL, {**dict(optimizer_facts(inner, names)), **plan_facts(planned.plans)}, data.group)
    if data.rank == 0 and isinstance(config, dict):  # the owner of a `ZeroConfig` has its notices
        for notice in settings.notices():
            _log.warning(with_code(notice, HAS_NO_EFFECT))
    builder = Builder(recipe, planned.infos[0].device if planned.infos else torch.device("cpu"))
    parts = assemble(builder, planned, builder.build(planned, inner), inner)
    sharded = ZeroOptimizer(
        inner, parts, store=store, owners=OWNERS, replanner=Replanner(builder), torch_state=TorchForms()
    )
    if data.rank == 0:
        _report_padding(planned.plans)
    if data.rank == 0 and not placement.on_device:
        _log.info("where state lives:\n%s", "\n".join(f"  {record}" for record in planned.placements))
        _warn_of_unlocked_memory(planned.placements, builder.lane)
        on_disk = sum(r.elements for r in planned.placements if isinstance(r.placement.masters, DiskTier))
        if on_disk and why_at_once(inner) is None and (warning := states_at_once(settings, on_disk)):
            _log.warning(warning)
    dtypes = [group.key.dtype for unit in parts.runtime.units for group in unit.trainable]
    if planned.averaging is not None:
        planned.averaging.announce(precision.wire_dtype(dtypes[0]) if dtypes else None)
    return model, sharded


def _device_type(model: nn.Module, device: torch.device | None) -> str:
    """The kind of device on which all parameters are communicated; "" where they are on several, or not made yet."""
    found = {torch.device(device).type} if device is not None else {p.device.type for p in model.parameters()}
    return found.pop() if len(found) == 1 and found != {"meta"} else ""


def _warn_of_unlocked_memory(placements: Sequence[UnitPlacement], lane: Lane) -> None:
    """Copies between a device and pages that are not locked go through other memory, and some make the host wait."""
    tiers = [tier for record in placements for tier in record.placement.tiers]
    if isinstance(lane, CudaLane) and any(isinstance(tier, HostTier | DiskTier) and not tier.pin for tier in tiers):
        _log.warning(
            "offload_optimizer or offload_param has pin_memory false: gradients reach host memory through a small"
            " page-locked buffer, all other copies between device and host are slower than from locked pages, and some"
            " make the host wait in the step. Set pin_memory to true, if the system allows that much"
            " page-locked memory (`ulimit -l`)"
        )


def _check_late_update(settings: ZeroConfig, inner: Any, placements: Sequence[UnitPlacement]) -> None:
    """Refuse late updates that a thread of the host cannot make. Raises ZeroConfigError."""
    if late_update_after(settings) is None or isinstance(inner, _NoOptimizer):
        return
    why = why_at_once(inner)
    if not all(may_step_during_backward(record.placement) for record in placements):
        why = "not all masters and optimizer states are in host memory, or in one store"
    waiting = sum(r.elements for r in placements if isinstance(r.placement.masters, DiskTier))
    section = settings.offload_optimizer
    if why is None and section is not None and waiting > section.max_in_cpu:
        why = (
            f"new values of {waiting:,} elements whose masters are on disk would wait in host memory, where"
            f" max_in_cpu gives room for {section.max_in_cpu:,}"
        )
    if why is not None:
        raise ZeroConfigError(
            "zero_optimization.offload_optimizer.late_update_after",
            f"got {late_update_after(settings)}, but {why}; expected null, or an element-wise optimizer with masters"
            " and states of all units in host memory or on disk, and room (max_in_cpu) for new values of those on disk",
        )


def _check_sparse(sparse_gradients: Any, stage: int) -> None:
    if not isinstance(sparse_gradients, bool):
        raise ZeroConfigError("sparse_gradients", f"got {sparse_gradients!r}, expected True or False")
    if sparse_gradients and stage > 0:
        raise ZeroConfigError(
            "sparse_gradients",
            f"got True at stage {stage}, which divides dense buffers among the ranks: each rank would need rows that"
            " others have. Use stage 0, or build embeddings with sparse=False",
        )


def _sparse_names(model: nn.Module, inner: Any, sparse_gradients: bool, rank: int) -> frozenset[str]:
    """Names of the parameters whose gradients are to be rows. Raises ZeroOptimizerError for an optimizer of sparse
    gradients where some are dense.
    """
    found = sparse_parameters(model) if sparse_gradients else frozenset[str]()
    check_dense_gradients(inner, {id(p): name for name, p in model.named_parameters()}, found)
    if sparse_gradients and not found and rank == 0:
        text = (
            "sparse_gradients has no effect: no nn.Embedding or nn.EmbeddingBag of the model has sparse=True and a"
            " weight that nothing else uses"
        )
        _log.warning(with_code(text, HAS_NO_EFFECT))
    return found


_PADDING = 1.25
"""Buffers this many times as large as their parameters are reported."""


def _report_padding(plans: Sequence[UnitPlan]) -> None:
    """Warn where ownership by whole tensors needs much more memory than the tensors: a shard is as large as the
    largest.
    """
    layouts = [group.layout for plan in plans for group in plan.groups if group.layout.undivided]
    needed, held = sum(sum(layout.sizes) for layout in layouts), sum(layout.numel for layout in layouts)
    if held > _PADDING * needed:
        text = (
            "the optimizer needs whole tensors, which %d ranks cannot own in equal parts: buffers have %.2f times the"
            " elements of their parameters, in memory and in messages; use fewer ranks or larger units (at stage 3"
            " stage3_module_granularity_threshold or leaf modules)"
        )
        _log.warning(with_code(text, "DSX354"), max(layout.world_size for layout in layouts), held / needed)


def _leaves(model: nn.Module, settings: ZeroConfig) -> frozenset[str]:
    chosen = settings.leaf_module
    named = frozenset() if chosen is None else named_leaves(model, chosen.classes, chosen.names, chosen.name_suffixes)
    return named | fine_modules(model, settings.stage3_module_granularity_threshold)


def _inner(model: nn.Module, optimizer: Any, *, stage: int, ranks: int) -> torch.optim.Optimizer:
    made: Any = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(_trainable(model))
    if not hasattr(made, "param_groups") or not hasattr(made, "step"):
        raise ZeroOptimizerError(
            f"the optimizer callable returned {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    check_optimizer(made, stage=stage)
    known = {id(p) for p in model.parameters()}
    replace_parameters(made, lambda p: p if id(p) in known else current_parameter(p))
    for group in made.param_groups:  # frozen weights in 8 or 4 bits, which no step would change
        group["params"] = [p for p in group["params"] if not is_taken_apart(p)]
    for index, group in enumerate(made.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ZeroOptimizerError(
                    f"param_groups[{index}]['params'][{place}] (shape {tuple(parameter.shape)}) is not a parameter of"
                    " the model; build the optimizer over model.parameters() after all changes to the model"
                )
    check_divisible(made, ranks=ranks if stage else 1)
    return made


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
