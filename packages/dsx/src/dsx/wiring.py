"""Builds an engine from a configuration and the caller's objects. All packages are connected here.

It reads the configuration once and chooses a part for each
role; a feature that is off gets a null object or is left out. The order matters, and is that of `build_engine`: check
the configuration, then make the process group, then move and cast the model, then build the parts that depend on its
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import dsx_comm
import dsx_zero
import torch
from dsx_comm import RankSets
from dsx_core import with_code
from dsx_core.device import Device, accelerator_kind
from torch import nn

from . import pipelining
from .alike import CALL, config_facts, ranks_of_job, telling_others
from .compiling import compile_as_configured
from .compressing import build_scheduler, compressed
from .config import Config
from .config.load import load_config
from .config.source import read
from .data import LoaderOptions
from .efficiency import Conversion, build_parts, convert, loader_rule, token_batches
from .engine.accumulation import Accumulation, SyncWindow
from .engine.backwards import Backwards
from .engine.checkpoint_facts import checkpoint_facts
from .engine.checkpointing import Checkpointer
from .engine.compressing import CompressionSession, StagedSchedule
from .engine.engine import Engine
from .engine.errors import EngineArgumentError
from .engine.garbage import CollectBetweenSteps
from .engine.gate import StepGate
from .engine.inputs import CastInputs, InputChain, PassInputs
from .engine.parts import EngineParts, EngineSettings
from .engine.places import places_of_model
from .engine.report import Counters
from .engine.request import Request, joins_others, launched_as
from .engine.schedule import DrivenSchedule, NoSchedule, ScheduleDriver
from .engine.stepper import NoStepper, ShardedStepper, Stepper
from .engine.weights import NOTHING_TO_GATHER, Gather
from .errors import DsxConfigError
from .experts import ExpertParts, with_experts
from .extension import Extension, Watched, named, sections_of, states_of
from .features import installed_extensions
from .loss_scaler import build_loss_scale
from .lr_schedules import build_schedule
from .optimizers import OptimizerChoice, choose_optimizer
from .placement import place
from .precision import Precision
from .recomputing import apply_budget, apply_section, section_observers
from .swap_space import SwapSpace, remove_leftovers
from .utils.logging import enable_console, logger, set_log_level_from_string
from .watching import build_watch, mean_over_ranks, no_watch


def build_engine(source: Any, request: Request, extensions: Sequence[Extension] = ()) -> Engine:
    """The engine for a configuration and the caller's objects. Collective."""
    # The groups of an mpu are in use until the engine is destroyed, or the call fails. While the engine is built, all
    # that asks for groups gets its own, whatever other engines hold.
    with ExitStack() as held, ExitStack() as building:
        engine, optimizer = _build(source, request, extensions, held, building)
        try:
            building.close()
        except BaseException:
            engine.destroy()
            raise
        optimizer.call_on_release(held.pop_all().close)
    return engine


def _build(
    source: Any, request: Request, extensions: Sequence[Extension], held: ExitStack, building: ExitStack
) -> tuple[Engine, Any]:
    joins = joins_others(request.dist_init_required)
    keys, extensions = _begun(source, request.model, extensions)
    request = pipelining.with_parallelism(source, request, joins)
    for one in extensions:
        request = one.prepare(keys, request)
    topology = _rank_sets(request, held) if dsx_comm.is_initialized() else None
    with telling_others(request, joins=joins, group=ranks_of_job(topology)):
        config = load_config(source, world_size=_batch_ranks(request, topology), sections=sections_of(extensions))
        _set_up_logging(config)  # first, so that what the choice of the optimizer warns of is seen
        choice = _chosen_optimizer(config, request)
        _check_parameters(request, choice)
    pipelining.record_use(config, request.model)
    for one in extensions:
        one.configured(config)
    topology = _join_processes(config, request, joins, held)
    if topology.groups is not None:
        building.enter_context(dsx_comm.parallel_groups.speaking_of(topology.groups))
    dsx_zero.agree(CALL, config_facts(config, request), ranks_of_job(topology))
    if topology.model_size > 1:
        building.enter_context(_telling_all_stages())
    with dsx_zero.telling(topology.data.group):
        with_experts(request.model, config)
        request = compressed(request, config)
        if pipelining.is_pipeline(request.model):
            pipelining.prepare(request.model)
        for one in extensions:
            request = one.before_shard(request, config, topology)
        apply_section(config, request.model)
        device = _device(topology)
        model = _placed(_sparsified(request.model, config), config, device)
        conversion = convert(model, config)
        plain = _optimizer(model, request, topology, choice)
    sharded, optimizer = _sharded(model, plain, config, topology, device, request.store)
    engine = pipelining.build(_parts(config, request, topology, sharded, optimizer, choice, conversion, extensions))
    _destroy_on_release(engine, optimizer)
    if request.training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(request.training_data, collate_fn=request.collate_fn)
    compile_as_configured(engine, config)
    _announce(engine, config, choice)
    return engine, optimizer


def _begun(source: Any, model: nn.Module, given: Sequence[Extension]) -> tuple[dict[str, Any], list[Extension]]:
    """The keys as they were written, and the extensions of the caller and of installed packages, which have looked at
    the model.
    """
    try:
        keys = read(source).data
    except DsxConfigError:
        return {}, []  # `load_config` says what is wrong
    extensions = [*given, *installed_extensions(keys)]
    named(extensions)
    for one in extensions:
        one.begin(keys, model, launched_as()[0])
    return keys, extensions


def _destroy_on_release(engine: Engine, optimizer: Any) -> None:
    """Destroy the engine when its model is given to another engine. This does not keep a dropped engine alive."""
    known = weakref.ref(engine)

    def destroy() -> None:
        if (found := known()) is not None:
            found.destroy()

    optimizer.call_on_release(destroy)


@contextmanager
def _telling_all_stages() -> Iterator[None]:
    """An error of one stage or slice is raised on all ranks: the parts of an engine only tell data-parallel ranks."""
    with dsx_zero.telling():
        yield
    dsx_zero.agree(CALL, {})


# - The configuration and the processes


def _chosen_optimizer(config: Config, request: Request) -> OptimizerChoice | None:
    """The optimizer that the configuration names, checked before there is a process group; None if the caller gives one
    or none is named.
    """
    section, precision = config.use("optimizer"), config.use("precision")
    if request.optimizer is not None and precision.master != "fp32" and precision.optimizer_state == "fp32":
        logger.warning(
            "the optimizer given to initialize decides the dtype of its states: torch's keep them in the masters' %s",
            precision.master,
        )
    if section is None:
        return None
    if request.optimizer is not None:
        text = "the optimizer given to initialize replaces optimizer.type %s of the config"
        logger.warning(with_code(text, "DSX153"), section.type)
        return None
    return choose_optimizer(section.type, section.params, masters=precision.master, states=precision.optimizer_state)


def _check_parameters(request: Request, choice: OptimizerChoice | None) -> None:
    """Refuse to make an optimizer over no parameters, before anything is changed. Where none is made, an empty list is
    what clients give for inference.
    """
    given = request.optimizer
    makes_one = choice is not None or (given is not None and not isinstance(given, torch.optim.Optimizer))
    if makes_one and request.model_parameters is not None and not request.model_parameters:
        raise EngineArgumentError(
            "initialize(model_parameters=...): got no parameters, expected those that the optimizer trains; leave it"
            " out to train all parameters of the model (an iterator gives its parameters once only). To train none,"
            " give no optimizer and name none in the configuration"
        )


def _set_up_logging(config: Config) -> None:
    if launched_as()[0] == 0:
        enable_console()
        for warning in config.warnings:
            logger.warning(warning)
    if config.use("log_level"):
        set_log_level_from_string(config.log_level)


def _batch_ranks(request: Request, topology: RankSets | None) -> int:
    """Number of ranks that get different batches. Without a topology there is no process group yet.

    Raises:
        EngineArgumentError: there is an mpu and no process group.
    """
    if topology is not None:
        return topology.batches[1]
    if request.mpu is not None:
        raise EngineArgumentError(
            f"initialize(mpu=...): got a {type(request.mpu).__name__} and no process group, expected the groups it"
            " tells of; call dsx.init_distributed and make the mpu's groups first"
        )
    return launched_as()[1]


def _rank_sets(request: Request, held: ExitStack) -> RankSets:
    """The groups of ranks: those of the mpu, which are in use until `held` is closed, or those given to
    `dsx_comm.parallel_groups.use`. The groups that other engines hold are not meant.
    """
    if request.mpu is not None and dsx_comm.is_initialized():
        held.callback(dsx_comm.parallel_groups.hold(request.mpu))
    return dsx_comm.RankSets.current() if request.mpu is None else dsx_comm.RankSets.of_mpu(request.mpu)


def _join_processes(config: Config, request: Request, joins: bool, held: ExitStack) -> RankSets:
    if joins:
        dsx_comm.init_distributed(distributed_port=request.distributed_port)
    if config.use("comms_logger").enabled:
        dsx_comm.configure(config=config.comms_logger)
    return _rank_sets(request, held)


# - The model and its shards


def _sparsified(model: nn.Module, config: Config) -> nn.Module:
    """The model with the pattern of the `sparse_attention` section; its parameters stay the same objects."""
    section = config.use("sparse_attention")
    if section is None:
        return model
    import dsx_sparse_attn  # lazy import: few programs have such layers

    changed = dsx_sparse_attn.apply_sparse_attention(model, section)
    if notice := section.notice():
        logger.warning("%s", notice)
    logger.info("sparse_attention: mode %s in %d modules (%s ...)", section.mode, len(changed), changed[0])
    return model


def _device(topology: RankSets) -> torch.device | None:
    """This process' device, which is made the current one; None: parameters are not moved."""
    kind = accelerator_kind()
    if kind is None or not _uses(kind, topology):
        return None
    device = Device(kind, topology.local_rank % Device.count())
    device.make_current()
    return device.torch_device


def _placed(model: nn.Module, config: Config, device: torch.device | None) -> nn.Module:
    """The model in the dtypes of the configuration, its buffers on the device; parameter objects stay the same."""
    dsx_zero.release_model(model)  # an earlier engine's model cannot be converted while it is divided
    precision: Precision = config.use("precision")
    place(
        model,
        device=device,
        parameters=None if precision.params == "fp32" else precision.dtype("params"),
        buffers=precision.buffer_dtype,
        partitioned=dsx_zero.PartitionedParameter,
    )
    return model


def _uses(kind: str, topology: RankSets) -> bool:
    """Whether the ranks use the backend of this kind of device (or there is only one process)."""
    if not torch.distributed.is_initialized():
        return True
    backend = torch.distributed.get_default_backend_for_device(kind)
    return backend in str(torch.distributed.get_backend(topology.data.group))


def _optimizer(model: nn.Module, request: Request, topology: RankSets, choice: OptimizerChoice | None) -> Any:
    """The optimizer over the model's full parameters: that of the configuration, the caller's, or None."""
    parameters = list(model.parameters()) if request.model_parameters is None else request.model_parameters
    if choice is not None:
        if choice.communicates:
            return choice.build(parameters, process_group=topology.data.group)
        return choice.build(parameters, model=model) if choice.reads_model else choice.build(parameters)
    given: Any = request.optimizer
    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    made = given(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise EngineArgumentError(
            f"initialize(optimizer=<callable>): it returned {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    return made


def _sharded(
    model: nn.Module, optimizer: Any, config: Config, topology: RankSets, device: torch.device | None, store: Any
) -> tuple[nn.Module, Any]:
    section = config.use("zero")
    precision, store = config.precision, _store_on_disk(config) if store is None else store
    ranks_of = pipelining.rank_sets(model, topology)
    try:
        model, sharded = dsx_zero.shard(
            model,
            optimizer,
            ranks_of=topology if ranks_of is None else ranks_of,
            config=section,
            store=store,
            device=device,
            sparse_gradients=config.use("sparse_gradients"),
            precision=dsx_zero.Precision(
                gradients=precision.dtype("grad_accum"),
                communication=precision.dtype("reduce"),
                master=precision.dtype("master"),
                check_overflow=precision.check_overflow,
            ),
            reduction=dsx_zero.Reduction(
                op=config.use("gradient_allreduce_op"),
                prescale=config.use("prescale_gradients"),
                predivide_factor=config.use("gradient_predivide_factor"),
            ),
        )
    except BaseException:
        if store is not None:
            store.close()
        raise
    if store is not None:
        sharded.call_on_release(store.close)  # the swap space is deleted with the engine, with parameters in it
    return model, sharded


def _on_disk(section: Any) -> bool:
    return section is not None and section.device == "nvme"


def _store_on_disk(config: Config) -> Any:
    """This rank's store for offload to disk, in its own folder; None if nothing is offloaded to disk."""
    section = config.use("zero")
    paths = {s.nvme_path for s in (section.offload_param, section.offload_optimizer) if _on_disk(s)}
    if not paths:
        return None
    if len(paths) > 1:
        raise dsx_zero.ZeroConfigError(
            "zero_optimization.offload_param.nvme_path",
            f"got {len(paths)} folders for state on disk ({', '.join(sorted(map(str, paths)))}), expected one; give"
            " offload_param and offload_optimizer the same nvme_path",
        )
    rank, world_size = (dsx_comm.get_rank(), dsx_comm.get_world_size()) if dsx_comm.is_initialized() else (0, 1)
    (folder,) = paths
    remove_leftovers(folder, rank, world_size)
    return SwapSpace(folder, f"dsx-rank{rank}", config.use("aio"))


# - The parts


def _objects_of_all_ranks(mine: Any) -> list[Any]:
    found = [None] * dsx_comm.get_world_size()
    dsx_comm.all_gather_object(found, mine)
    return found


def _parts(
    config: Config,
    request: Request,
    topology: RankSets,
    model: nn.Module,
    optimizer: Any,
    choice: OptimizerChoice | None,
    conversion: Conversion,
    extensions: Sequence[Extension],
) -> EngineParts:
    trains = request.optimizer is not None or choice is not None
    scaler = build_loss_scale(config.precision, config.fp16, config.amp)
    optimizer.follow_loss_scale(lambda: scaler.scale, dynamic=scaler.state_dict()["kind"] == "dynamic")
    clipping = config.use("gradient_clipping")
    scheduler, driver = _scheduler(config, request, optimizer if trains else None)
    counters, stage, accumulation = Counters(), config.zero.stage, _accumulation(config)
    watched = Watched(
        config, topology, model, optimizer, counters, lambda: accumulation.steps,
        lambda: scaler.scale, trains,
    )  # fmt: skip
    watch = build_watch(watched) if trains else no_watch(watched)
    compression = build_scheduler(
        model, config, stage=stage, mean=mean_over_ranks(topology),
        loss_scale=lambda: scaler.scale,
    )  # fmt: skip
    if compression is not None:
        watch.observers.insert(0, CompressionSession(compression, watch.eigenvalues))
        if pipelining.is_pipeline(model):
            compression = StagedSchedule(compression, _objects_of_all_ranks)
    experts = ExpertParts.of(model)
    experts.join(watch, first=topology.rank == 0)
    efficiency = build_parts(model, config, conversion, counters)
    batches = token_batches(config, lambda: optimizer.param_groups, lambda: accumulation.steps * topology.batches[1])
    watch.observers.extend(one for one in efficiency.values() if hasattr(one, "after_step"))
    watch.observers.extend(section_observers(config))
    stepper: Stepper = NoStepper()
    if trains:
        stepper = ShardedStepper(
            optimizer, scaler, clipping or None, batches.gradient_scale, known_before=batches.known_before,
            steps=lambda: counters.global_steps,
        )  # fmt: skip
    garbage = CollectBetweenSteps() if config.use("disable_python_gc") else None
    if garbage is not None:
        watch.observers.append(garbage)
    budget = apply_budget(config, model, topology)
    transforms: list[Any] = [one for one in efficiency.values() if callable(one)]
    window = SyncWindow(optimizer.no_sync, every_micro_batch=stage >= 2 and not config.zero.keep_full_gradients)
    scales = scaler.state_dict()["kind"] != "none"
    for one in extensions:  # the last observers: a trial ends the program
        one.join(watch, watched)
    backwards = Backwards(
        accumulation, window, scaled_losses=scales, watchers=(*watch.hooks, *watch.observers, batches)
    )
    optimizer.follow_backward(backwards)

    def release() -> None:
        optimizer.release()
        optimizer.inner.state.clear()
        if budget is not None:
            budget.remove()
        if garbage is not None:
            garbage.close()
        conversion.undo()
        watch.close()

    gate = StepGate(lambda: counters.global_steps)
    return EngineParts(
        module=model,
        optimizer=optimizer if trains else None,
        shards=optimizer,
        gate=gate,
        checkpointer=Checkpointer(
            module=model,
            shards=optimizer,
            optimizer=optimizer if trains else None,
            counters=counters,
            schedule=driver,
            scaler=scaler,
            scheduled=scheduler is not None,
            precision=config.precision.to_json(),
            settings=config.use("checkpoint"),
            rank=topology.rank,
            gate=gate,
            gather=dsx_zero.GatheredParameters,
            facts=checkpoint_facts(config, topology.world_size),
            places=places_of_model(model, topology, known=experts.places),
            parts={
                **efficiency,
                **({} if compression is None else {"compression": compression}),
                **({} if budget is None else {"activation_budget": budget}),
                **states_of(extensions),
            },
        ),
        stepper=stepper,
        scaler=scaler,
        schedule=driver,
        lr_scheduler=scheduler,
        accumulation=accumulation,
        window=window,
        backwards=backwards,
        inputs=InputChain(
            transforms,
            CastInputs(config.precision.dtype("params")) if config.precision.cast_inputs else PassInputs(),
            uncast="" if _casts_inputs(config.precision) else config.precision.params,
        ),
        autocast=_forward_context(_autocast(config.precision, model), watch.forward),
        clock=watch.clock,
        gather=_gather(stage, topology),
        topology=topology,
        settings=_settings(config, optimizer, clipping),
        config=config,
        loader=LoaderOptions(
            micro_batch_size=config.batch.micro,
            rank=topology.batches[0],
            world_size=topology.batches[1],
            drop_last=config.use("dataloader_drop_last"),
        ),
        release=release,
        counters=counters,
        hooks=tuple(watch.hooks),
        observers=tuple(watch.observers),
        monitor=watch.monitor,
        batches=batches,
        efficiency=efficiency,
        loader_rule=loader_rule(config),
    )


def _accumulation(config: Config) -> Accumulation:
    return Accumulation(config.use("batch").accumulation, managed=config.use("managed_gradient_accumulation"))


def _settings(config: Config, optimizer: Any, clipping: float) -> EngineSettings:
    inner = getattr(optimizer, "inner", None)
    return EngineSettings(
        micro_batch_size=config.batch.micro,
        zero_stage=config.zero.stage,
        gradient_clipping=clipping,
        optimizer_name=type(inner).__name__ if inner is not None else "",
        gather_weights_on_save=config.zero.stage < 3
        or config.zero.stage3_gather_16bit_weights_on_model_save is not False,
    )


def _scheduler(config: Config, request: Request, optimizer: Any) -> tuple[Any, ScheduleDriver]:
    """The scheduler (the caller's, otherwise that of the configuration) and its driver."""
    section, given = config.use("scheduler"), request.lr_scheduler
    if section is None and given is None:
        return None, NoSchedule()
    if optimizer is None:
        text = "the learning-rate scheduler is not used: this engine has no optimizer"
        logger.warning(with_code(text, "DSX154"))
        return None, NoSchedule()
    # torch's schedulers need a torch.optim.Optimizer; the inner optimizer has the same parameter groups.
    target = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.inner
    if section is not None and given is None:
        scheduler = build_schedule(section.type, target, section.params)
    else:
        made = callable(getattr(given, "step", None)) and not isinstance(
            given, type
        )  # a class is a callable that makes one
        scheduler = given if made else given(target)
    return scheduler, DrivenSchedule(scheduler)


def _casts_inputs(precision: Precision) -> bool:
    """Whether inputs of any floating dtype can be given to the model."""
    return precision.cast_inputs or precision.autocast or precision.params == "fp32"


def _autocast(precision: Precision, model: nn.Module) -> Callable[[], Any]:
    if not precision.autocast:
        return nullcontext
    kind = next((p.device.type for p in model.parameters()), "cpu")
    return lambda: torch.autocast(kind, dtype=precision.dtype("compute"))


def _forward_context(autocast: Callable[[], Any], further: Callable[[], Any] | None) -> Callable[[], Any]:
    if further is None:
        return autocast

    def both() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(autocast())
        stack.enter_context(further())
        return stack

    return both


def _gather(stage: int, topology: RankSets) -> Gather:
    groups = topology.groups
    found = Gather(dsx_zero.GatheredParameters, dsx_zero.unit_index) if stage == 3 else NOTHING_TO_GATHER
    return found if groups is None or groups.size("pipe") == 1 else replace(found, stages=groups.axis("pipe"))


def _announce(engine: Engine, config: Config, choice: OptimizerChoice | None) -> None:
    """Log the decisions once, on rank 0."""
    if engine.global_rank != 0:
        return
    logger.info("%r: %s", engine, config.precision.describe())
    if choice is not None:
        logger.info("optimizer %s: %s", choice.name, choice.reason)
    if config.use("dump_state"):
        logger.info("configuration in effect:\n%s", config.explain().render())
        logger.info("state of the engine:\n%s", engine.describe())
    unused = config.unused_report()
    if unused:
        logger.warning(with_code(unused, "DSX152"))
