"""The extensions that watch an engine: a clock, hooks during the step, observers after it, writers of events.

The clock, the trace, the straggler comparison and eigenvalues run on every rank, because they are collective or need
all ranks; everything else runs on rank 0 only. A watcher that is not configured is not built. An engine without an
optimizer has the writers only, for events of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import dsx_comm
import dsx_monitor
import dsx_monitor.clocks
import dsx_monitor.flops
import dsx_monitor.memory
import dsx_zero
import torch
from dsx_monitor.noise import GradientSquares
from dsx_monitor.timers import phase_times
from dsx_monitor.tolerance import tolerating

from .config import Config
from .engine.accessors import moments
from .engine.compression import CompressionLine
from .engine.errors import EngineArgumentError
from .engine.hooks import NoClock, TokenCount
from .engine.observers import (
    MemoryUse,
    MonitorEvents,
    ProgressLine,
    RunStart,
    SentBytes,
    StepTimes,
    StragglerWatch,
    Throughput,
    TimeLine,
    TrainingEvents,
)
from .engine.pipeline_times import PipelineTimes
from .engine.sessions import CurvatureSession, FlopsSession, NoiseSession, TimelineSession
from .extension import Extension, Watch, Watched, mean_over_ranks

_WRITERS = ("tensorboard", "wandb", "csv_monitor", "jsonl", "comet")


class Monitoring(Extension):
    """The clock, the writers, and the figures of every step."""

    name = "monitor"

    def join(self, watch: Watch, to: Watched) -> None:
        """Measure the steps first: other watchers read the figures."""
        watch.monitor = _monitor(to)
        watch.closing.callback(watch.monitor.close)
        if not to.trains:
            return
        watch.clock = _clock(to)
        watch.times = StepTimes(watch.clock, phase_times)
        if not isinstance(watch.clock, NoClock):
            watch.add(watch.times)  # on every rank, because the results of a clock must be read
            if to.distributed:
                watch.closing.callback(dsx_comm.observe(watch.clock))
        if to.first:
            _add_figures(to, watch)
        elif to.stages > 1:
            _add_flops(to, watch, lambda flops_per_sample: None)
        if to.stages > 1:
            _add_stage_times(to, watch)


class Stragglers(Extension):
    """The section `straggler`: which rank delays the others."""

    name = "straggler"

    def join(self, watch: Watch, to: Watched) -> None:
        """Compare the ranks after each step."""
        if to.trains and _compares(to):
            _add_straggler(to, watch)


class Trace(Extension):
    """The section `timeline`: a trace of some steps on every rank."""

    name = "timeline"

    def join(self, watch: Watch, to: Watched) -> None:
        """Trace the steps of the section."""
        if to.trains:
            _add_timeline(to, watch)


class Curvature(Extension):
    """The sections `eigenvalue` and `gradient_noise_scale`."""

    name = "curvature"

    def join(self, watch: Watch, to: Watched) -> None:
        """Look at the gradients."""
        if to.trains:
            _add_curvature(to, watch)


class Lines(Extension):
    """The lines and events of each step: after all that have figures for them."""

    name = "lines"

    def join(self, watch: Watch, to: Watched) -> None:
        """Log the times, and send the events to the writers."""
        if not to.trains or not to.first:
            return
        every = to.config.steps_per_print or 0
        if to.config.wall_clock_breakdown and every:
            watch.observers.append(TimeLine(every, watch.times))
        if watch.monitor.enabled:
            watch.observers.append(MonitorEvents(watch.monitor.write_events, watch.sources))


def run_dir(config: Config) -> Path:
    """The folder for files about the run: that of `jsonl`, from which the report is made, or the current folder."""
    section = config.jsonl
    return Path(section.output_path or "").expanduser() / section.job_name if section.enabled else Path()


def _clock(to: Watched) -> dsx_monitor.clocks.TracedClock | NoClock:
    config = to.config
    # `|` instead of `or`, because all keys must be marked as used.
    if config.use("wall_clock_breakdown") | config.flops_profiler.enabled | config.timeline.enabled | _compares(to):
        return dsx_monitor.clocks.TracedClock(to.device)
    return NoClock()


def _monitor(to: Watched) -> Any:
    for name in _WRITERS:
        to.config.use(name)
    return dsx_monitor.MonitorMaster(to.config, rank=to.topology.rank)


def _compares(to: Watched) -> bool:
    """Whether ranks are compared: if asked for, or with the wall-clock breakdown; never with one rank."""
    wanted = to.config.use("straggler").enabled
    return to.distributed and (to.config.wall_clock_breakdown if wanted is None else wanted)


# - Figures of every step, on rank 0


def _add_figures(to: Watched, watch: Watch) -> None:
    config = to.config
    every, events = config.use("steps_per_print") or 0, watch.monitor.enabled
    scaled = config.precision.needs_loss_scale
    watch.sources.append(TrainingEvents(to.counters, loss_scale=scaled).events)
    timer = dsx_monitor.ThroughputTimer(config.batch.train)
    if config.use("timers").throughput.enabled:
        tokens = TokenCount()
        if every or events:
            watch.hooks.append(tokens)
        watch.add(Throughput(timer, tokens.take, to.topology.batches[1]))
    if events and to.distributed:
        sent = watch.add(SentBytes())
        watch.closing.callback(dsx_comm.observe(sent))
    breakdown = (lambda: _breakdown(to)) if config.use("memory_breakdown") else None
    if events or breakdown is not None:
        watch.add(MemoryUse(dsx_monitor.memory.memory_in_use, breakdown, max(1, every)))
    if every:
        speed = lambda: timer.samples_per_second  # noqa: E731
        watch.add(ProgressLine(every, to.counters, lambda: moments(to.optimizer.param_groups), speed))
        inner: Any = getattr(to.optimizer, "inner", None)
        if hasattr(inner, "last_traffic"):
            watch.add(CompressionLine(every, lambda: inner.last_traffic))
    if config.jsonl.enabled:
        watch.add(RunStart(lambda samples: _tell_start(to, samples)))

    def learned(flops_per_sample: float) -> None:
        timer.flops_per_sample = flops_per_sample

    _add_flops(to, watch, learned)


def _tell_start(to: Watched, samples: int) -> None:
    config = to.config
    kind = type(to.module).__name__
    dsx_monitor.start_run(
        run_dir(config),
        title=f"{kind}, ZeRO stage {config.zero.stage}",
        config=config.to_dict(),
        world_size=to.topology.world_size,
        step=samples,
        facts={"parameters": sum(p.numel() for p in to.module.parameters())},
        quiet=True,
    )


def _breakdown(to: Watched) -> dict[str, int]:
    return dsx_monitor.memory_breakdown(to.optimizer.state_bytes(), dsx_monitor.memory_snapshot(pss=True))


def _add_flops(to: Watched, watch: Watch, learned: Callable[[float], None]) -> None:
    """Profile rank 0; in a pipeline every rank, because each has its own stages, whose operations are added up."""
    config, topology = to.config, to.topology
    section = config.use("flops_profiler")
    if not section.enabled:
        return
    profiler = dsx_monitor.FlopsProfiler(to.module)
    profiler.facts = dsx_monitor.flops.RunFacts(
        world_size=topology.world_size,
        data_parallel=topology.batches[1],
        model_parallel=topology.model_size,
        batch_size=config.batch.micro,
        system=f"ZeRO stage {config.zero.stage}",
    )
    folder = run_dir(config) if config.jsonl.enabled else None
    gather = partial(rows_of_ranks, to) if to.stages > 1 else None
    watch.add(FlopsSession(profiler, section, to.counters, folder, learned, tolerating, gather=gather, writes=to.first))


# - Watchers on all ranks


def rows_of_ranks(to: Watched, own: list[float]) -> list[list[float]]:
    """All ranks' lists of numbers. Collective."""
    mine = torch.tensor(own, dtype=torch.float64, device=to.device)
    rows = [torch.empty_like(mine) for _ in range(to.topology.world_size)]
    dsx_comm.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _add_stage_times(to: Watched, watch: Watch) -> None:
    """Add the times of all stages. They are gathered before rank 0 writes its events."""
    config = to.config
    if watch.monitor.enabled or config.wall_clock_breakdown:
        times = PipelineTimes(config.steps_per_print or 10, log=to.first and config.wall_clock_breakdown)
        watch.observers.append(times)
        watch.sources.append(times.events)


def _add_straggler(to: Watched, watch: Watch) -> None:
    section = to.config.straggler

    def write(record: dict[str, Any]) -> None:
        path = run_dir(to.config) / "stragglers.jsonl"
        with tolerating(f"the comparison of ranks cannot be written to {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    keep = write if to.config.jsonl.enabled else lambda record: None
    gather = partial(rows_of_ranks, to)
    monitor = dsx_monitor.StragglerMonitor(gather, every=section.every, ratio=section.ratio, share=section.share)
    watch.add(StragglerWatch(monitor, watch.times, keep if to.first else None))


def _add_timeline(to: Watched, watch: Watch) -> None:
    section = to.config.use("timeline")
    if not section.enabled:
        return
    folder = Path(section.output_path).expanduser() if section.output_path else run_dir(to.config)
    watch.add(
        TimelineSession(
            make=lambda: dsx_monitor.Timeline(to.topology.rank, device=to.device),
            section=section,
            counters=to.counters,
            clock=watch.clock,
            observe=lambda timeline: _observe_all(timeline, to.optimizer),
            barrier=dsx_comm.barrier if to.distributed else lambda: None,
            run_dir=folder,
            merge=dsx_monitor.merge_traces if to.first else None,
            tolerating=tolerating,
        )
    )


def _observe_all(timeline: Any, optimizer: Any) -> Callable[[], None]:
    """Let a timeline record communication, transfers between device, host and disk, and the CPU optimizer steps during
    backward. Returns a function that ends this.
    """
    host = torch.device("cpu")

    def on_span(lane: str, name: str, size: int) -> AbstractContextManager[None]:
        if lane == "host step":
            return timeline.range(name, lane, device=host, elements=size)
        return timeline.range(name, lane, bytes=size)

    ending = ExitStack()
    ending.callback(dsx_comm.observe(timeline))
    ending.callback(optimizer.control.listen(on_span))
    if hasattr(optimizer.store, "listen"):
        ending.callback(optimizer.store.listen(timeline.transfer))
    return ending.close


def _add_curvature(to: Watched, watch: Watch) -> None:
    noise, section = to.config.use("gradient_noise_scale"), to.config.use("eigenvalue")
    if not section.enabled:
        section = to.config.use("quantize_training").eigenvalue
    paused: Callable[[], AbstractContextManager[Any]] = nullcontext
    if noise.enabled and to.first:
        squares = GradientSquares(to.optimizer.control.gradient_parameters())
        watch.closing.callback(squares.remove)
        watch.add(_noise(to, noise, squares))
        paused = squares.paused
    if section.enabled:
        from dsx_monitor.curvature import double_backward  # lazy import: few ask for it

        fields = ("verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num")
        eigenvalue = dsx_monitor.Eigenvalue(**{name: getattr(section, name) for name in fields})
        eigenvalue.blocks(to.module)  # raises now for a wrong name, not in the first step
        session = CurvatureSession(
            eigenvalue,
            double_backward,
            to.module,
            to.counters,
            lambda: _aside(to, paused),
            mean_over_ranks(to.topology),
        )
        watch.forward, watch.eigenvalues = watch.add(session).forward_context, session.by_block


@contextmanager
def _aside(to: Watched, paused: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Backwards inside the context do not change the engine's gradients, and use full parameters. Collective."""
    whole = to.config.zero.stage == 3  # gradients exist only with respect to the plain parameters, while gathered
    with paused(), to.optimizer.no_sync(), dsx_zero.GatheredParameters(to.module, enabled=whole):
        yield


def _noise(to: Watched, section: Any, squares: Any) -> NoiseSession:
    batch, ranks = to.config.batch, to.topology.batches[1]
    if batch.micro >= batch.train:
        raise EngineArgumentError(
            f"gradient_noise_scale.enabled: got one micro-batch of {batch.micro} samples per step, expected several;"
            " use more ranks or gradient_accumulation_steps > 1, so that two batch sizes can be compared"
        )
    noise = dsx_monitor.GradientNoise(batch.micro, batch.train, section.memory)
    return NoiseSession(noise, squares, to.micro_batches, ranks if to.config.gradient_allreduce_op == "sum" else 1)
