"""Builds an engine from a configuration and the caller's objects. All packages are connected here.

The order matters, and is that of `build_engine`: check the configuration, then make the process group, then let the
features (`features.py`) change the model, then move, cast and shard it, then build the parts that depend on its
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import dsx_comm
import dsx_zero
from dsx_comm import RankSets

from .alike import CALL, config_facts, ranks_of_job, telling_others
from .announcing import announce, set_up_logging
from .compiling import compile_as_configured
from .config.load import load_config
from .config.source import read
from .data import LoaderOptions
from .engine.backwards import Accumulation, Backwards, SyncWindow
from .engine.checkpoint_facts import checkpoint_facts
from .engine.checkpointing import Checkpointer
from .engine.engine import Engine
from .engine.live_state import LiveState
from .engine.parts import EngineParts, Update
from .engine.places import places_of_model
from .engine.report import Counters
from .engine.request import Request, joins_others, launched_as
from .engine.stepper import NoStepper, ScheduleDriver, ShardedStepper, StepGate, Stepper
from .engine.weights import Gather
from .errors import DsxConfigError
from .extension import Extension, Watch, Watched, sections_of, states_of
from .features import FEATURES, all_extensions
from .forward import input_chain
from .joining import batch_ranks, device_of, join_processes, rank_sets
from .loss_scaler import LossScale, build_loss_scale
from .placement import place_for
from .requested import check_parameters, chosen_optimizer, made_optimizer, made_schedule
from .sharding import sharded


def build_engine(source: Any, request: Request, extensions: Sequence[Extension] = ()) -> Engine:
    """The engine for a configuration and the caller's objects. Collective."""
    # The groups of an mpu are in use until the engine is destroyed, or the call fails. While the engine is built, all
    # that asks for groups gets its own, whatever other engines hold.
    with ExitStack() as held, ExitStack() as building:
        engine, shards = _build(source, request, extensions, held, building)
        try:
            building.close()
        except BaseException:
            engine.destroy()
            raise
        shards.control.on_release.append(held.pop_all().close)
    return engine


def _build(
    source: Any, request: Request, given: Sequence[Extension], held: ExitStack, building: ExitStack
) -> tuple[Engine, dsx_zero.ZeroOptimizer]:
    joins = joins_others(request.dist_init_required)
    request, extensions = _begun(source, request, given)
    topology = rank_sets(request, held) if dsx_comm.is_initialized() else None
    with telling_others(request, joins=joins, group=ranks_of_job(topology)):
        config = load_config(source, world_size=batch_ranks(request, topology), sections=sections_of(extensions))
        set_up_logging(config)  # first, so that what the choice of the optimizer warns of is seen
        choice = chosen_optimizer(config, request)
        check_parameters(request, choice)
    for one in extensions:
        one.configured(config)
    topology = join_processes(config, request, joins, held)
    if topology.groups is not None:
        building.enter_context(dsx_comm.parallel_groups.speaking_of(topology.groups))
    further = extensions[len(FEATURES) :]
    dsx_zero.agree(CALL, config_facts(config, request, further), ranks_of_job(topology))
    if topology.model_size > 1:
        building.enter_context(_telling_all_stages())
    with dsx_zero.telling(topology.data.group):
        for one in extensions:
            request = one.before_shard(request, config, topology)
        device = device_of(topology)
        place_for(config.use("precision"), request.model, device)
        plain = made_optimizer(request.model, request, topology, choice)
    ranks_of = topology if request.ranks_of is None else request.ranks_of
    model, shards = sharded(request.model, plain, config, ranks_of=ranks_of, device=device, store=request.store)
    trains = request.optimizer is not None or choice is not None
    schedule = made_schedule(config, request, shards if trains else None)
    scaler, counters = build_loss_scale(config.precision, config.fp16, config.amp), Counters()
    accumulation = Accumulation(config.use("batch").accumulation, managed=config.use("managed_gradient_accumulation"))
    to = Watched(
        config, topology, model, shards, counters, lambda: accumulation.steps, lambda: scaler.scale, trains
    )  # fmt: skip
    watch = _joined(extensions, to)
    parts = _parts(to, watch, extensions, accumulation, scaler, schedule)
    engine = Engine(parts) if watch.make_engine is None else watch.make_engine(parts)
    _destroy_on_release(engine, shards)
    if request.training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(request.training_data, collate_fn=request.collate_fn)
    compile_as_configured(engine, config)
    announce(engine, config, choice)
    return engine, shards


def _begun(source: Any, request: Request, given: Sequence[Extension]) -> tuple[Request, list[Extension]]:
    """The request after the extensions have looked at the model and prepared it, and the extensions."""
    keys, known = {}, True
    try:
        keys = read(source).data
    except DsxConfigError:
        known = False  # `load_config` says what is wrong
    extensions = all_extensions(keys, given if known else ())
    for one in extensions:
        one.begin(keys, request.model, launched_as()[0])
    for one in extensions:
        request = one.prepare(keys, request)
    return request, extensions


def _destroy_on_release(engine: Engine, optimizer: dsx_zero.ZeroOptimizer) -> None:
    """Destroy the engine when its model is given to another engine. This does not keep a dropped engine alive."""
    known = weakref.ref(engine)

    def destroy() -> None:
        if (found := known()) is not None:
            found.destroy()

    optimizer.control.on_release.append(destroy)


@contextmanager
def _telling_all_stages() -> Iterator[None]:
    """An error of one stage or slice is raised on all ranks: the parts of an engine only tell data-parallel ranks."""
    with dsx_zero.telling():
        yield
    dsx_zero.agree(CALL, {})


# - The parts


def _joined(extensions: Sequence[Extension], to: Watched) -> Watch:
    """Join the extensions' additions to the engine."""
    watch = Watch()
    for one in extensions:
        one.join(watch, to)

    def release() -> None:
        to.optimizer.release()
        to.optimizer.inner.state.clear()

    watch.closing.callback(release)  # the last entry is closed first
    return watch


def _parts(
    to: Watched, watch: Watch, extensions: Sequence[Extension], accumulation: Accumulation, scaler: LossScale,
    schedule: ScheduleDriver,
) -> EngineParts:  # fmt: skip
    config, topology, shards, counters = to.config, to.topology, to.optimizer, to.counters
    zero = config.zero
    window = SyncWindow(shards.no_sync, every_micro_batch=zero.stage >= 2 and not zero.keep_full_gradients)
    kind = scaler.state_dict()["kind"]
    shards.control.follow_loss_scale(lambda: scaler.scale, dynamic=kind == "dynamic")
    backwards = Backwards(
        accumulation, window, scaled_losses=kind != "none",
        watchers=(*watch.hooks, *watch.observers, watch.batches),
    )  # fmt: skip
    shards.control.follow_backward(backwards)
    update = Update(_stepper(to, watch, scaler), scaler, schedule)
    gate = StepGate(counters)
    return EngineParts(
        module=to.module,
        shards=shards,
        topology=topology,
        config=config,
        counters=counters,
        gate=gate,
        accumulation=accumulation,
        window=window,
        backwards=backwards,
        update=update,
        inputs=input_chain(config.precision, to.module, watch),
        watch=watch,
        loader=LoaderOptions(
            micro_batch_size=config.batch.micro,
            rank=topology.batches[0],
            world_size=topology.batches[1],
            drop_last=config.use("dataloader_drop_last"),
        ),
        gather=_gather(zero.stage, topology),
        checkpointer=Checkpointer(
            module=to.module,
            shards=shards,
            live=LiveState(
                optimizer=shards if to.trains else None,
                counters=counters,
                schedule=schedule,
                scaler=scaler,
                precision=config.precision.to_json(),
                rank=topology.rank,
                facts=checkpoint_facts(config, topology.world_size),
                parts=states_of(extensions),
            ),
            settings=config.use("checkpoint"),
            gate=gate,
            gather=dsx_zero.GatheredParameters,
            places=places_of_model(to.module, topology, known=watch.places),
        ),
    )


def _stepper(to: Watched, watch: Watch, scaler: LossScale) -> Stepper:
    max_norm = to.config.use("max_norm")
    if not to.trains:
        return NoStepper()
    batches = watch.batches
    return ShardedStepper(
        to.optimizer, scaler, max_norm, batches.gradient_scale, known_before=batches.known_before,
        counters=to.counters,
    )  # fmt: skip


def _gather(stage: int, topology: RankSets) -> Gather:
    groups = topology.groups
    # Below stage 3 nothing is gathered, but the context looks whether the parameters are there (`offload_states`).
    found = Gather(dsx_zero.GatheredParameters, dsx_zero.unit_index if stage == 3 else lambda parameter: None)
    return found if groups is None or groups.size("pipe") == 1 else replace(found, stages=groups.axis("pipe"))
