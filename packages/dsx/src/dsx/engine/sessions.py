"""Measurements that run during a step: flops profile, eigenvalues, gradient noise, trace.

Each session is a hook (during the step) and an observer (after it). An object of `dsx_monitor` does the work; the
session decides when it runs. A session that is not configured is not built.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from dsx_core.device import Device

from ..utils.logging import logger
from .hooks import StepHook
from .observers import Event
from .report import Counters, StepReport


class FlopsSession(StepHook):
    """Profiles one optimizer step with all its micro-batches, and writes the result.

    Args:
        profiler: a `dsx_monitor.FlopsProfiler`, with the facts of this engine.
        section: the `flops_profiler` section.
        counters: the counters of training.
        run_dir: the profile is also written there, for the report; None: it is not.
        learned: is called with the operations of one sample, forward and backward.
        tolerating: a context that turns a write error into a warning (`dsx_monitor.tolerance.tolerating`).
        gather: for a pipeline, in which each rank profiles its own stages: takes this rank's list of numbers and
            returns those of all ranks (collective). None: this rank has the whole model.
        writes: whether this rank writes the result.
    """

    def __init__(
        self,
        profiler: Any,
        section: Any,
        counters: Counters,
        run_dir: Path | None,
        learned: Callable[[float], None],
        tolerating: Callable[[str], AbstractContextManager[None]],
        *,
        gather: Callable[[list[float]], Any] | None = None,
        writes: bool = True,
    ) -> None:
        self._profiler, self._section, self._counters = profiler, section, counters
        self._gather, self._writes = gather, writes
        self._run_dir, self._learned, self._tolerating = run_dir, learned, tolerating
        self._done = False
        self._micro_batches, self._update_began = 0, 0.0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start with the first micro-batch of the chosen step."""
        if self._done or not torch.is_grad_enabled():
            return
        if not self._profiler.started:
            if self._counters.global_steps != self._section.profile_step:
                return
            self._micro_batches = 0
            self._profiler.start_profile()
        self._micro_batches += 1

    def before_update(self) -> None:
        """Stop the profile: forward and backward are over. The update is timed separately."""
        if self._profiler.started:
            self._profiler.stop_profile()  # waits for the device
            self._update_began = time.perf_counter()

    def after_step(self, report: StepReport) -> None:
        """Write the profile if the step that has just ended was profiled."""
        if self._done or not self._micro_batches:
            return
        self._done = True
        device = Device.in_use()
        if device is not None:
            device.synchronize()
        profiler = self._profiler
        samples = (profiler.facts.batch_size or 0) * self._micro_batches
        profiler.facts = dataclasses.replace(
            profiler.facts,
            batch_size=samples,
            micro_batches=self._micro_batches,
            step_seconds=time.perf_counter() - self._update_began,
        )
        operations = profiler.get_total_flops() + profiler.get_total_backward_flops()
        if self._gather is not None:
            totals = profiler.gather_ranks(self._gather)
            operations = (totals.flops + totals.backward_flops) / totals.replicas
        if samples:
            self._learned(operations / samples)
        if self._writes:
            self._write()
        profiler.end_profile()

    def _write(self) -> None:
        section, step, profiler = self._section, self._section.profile_step, self._profiler
        text = profiler.text(step, section.module_depth, section.top_modules, section.detailed)
        places = [self._run_dir / "flops.txt"] if self._run_dir is not None else []
        if section.output_file is None:
            logger.info("%s", text)
        else:
            places.append(Path(section.output_file))
        written = []
        for place in dict.fromkeys(places):
            with self._tolerating(f"the flops profile cannot be written to {place}"):
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.suffix not in (".json", ".html"):
                    place.write_text(text, encoding="utf-8")
                profiler.write_json(place.with_suffix(".json"), step)
                profiler.write_html(place.with_suffix(".html"), step)
                written.append(str(place.with_suffix(".html")))
        if written:
            logger.info("flops profile of step %d: %s", step, " and ".join(written))

    def close(self) -> None:
        """Remove all hooks from the model, also if training ended inside the profiled step."""
        self._profiler.end_profile()


class CurvatureSession(StepHook):
    """Computes the blocks' eigenvalues in every `gas_boundary_resolution`-th update, from its last micro-batch's loss.

    Args:
        eigenvalue: a `dsx_monitor.Eigenvalue`.
        double_backward: context in which the forward pass can be differentiated twice.
        module: the model.
        counters: the counters of training.
        aside: context in which a backward does not change the engine's gradients.
        mean: averages a tensor over the ranks in place; None with one rank.
    """

    needs_engine_backward = True

    def __init__(
        self,
        eigenvalue: Any,
        double_backward: Callable[[], AbstractContextManager[Any]],
        module: torch.nn.Module,
        counters: Counters,
        aside: Callable[[], AbstractContextManager[Any]],
        mean: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self._eigenvalue, self._double_backward, self._module = eigenvalue, double_backward, module
        self._counters, self._aside, self._mean = counters, aside, mean
        self._fresh: list[float] = []
        self.latest: list[float] = []
        """The last relative eigenvalues, one per block."""

    def by_block(self) -> dict[str, float]:
        """The last relative eigenvalues by the module names of the blocks; empty before the first."""
        path = self._eigenvalue.layer_name
        names = [f"{path}.{name}" for name, _ in self._module.get_submodule(path).named_children()]
        return dict(zip(names, self.latest))

    def _due(self) -> bool:
        return self._counters.global_steps % self._eigenvalue.gas_boundary_resolution == 0

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context that the forward pass must run in."""
        return self._double_backward() if self._due() and torch.is_grad_enabled() else nullcontext()

    def before_backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Compute the eigenvalues if they are due. Collective."""
        if boundary and self._due():
            with self._aside():
                self._fresh = self.latest = self._eigenvalue.compute_from_loss(loss, self._module, self._mean)

    def events(self, report: StepReport) -> list[Event]:
        """The values computed in this step."""
        fresh, self._fresh = self._fresh, []
        return [
            (f"Train/Eigenvalues/ModelBlockParam_{place}", value, report.global_samples)
            for place, value in enumerate(fresh)
        ]


class NoiseSession:
    """Estimates the gradient noise scale from this rank's small batches and the full gradient of every step.

    Args:
        noise, squares: a `dsx_monitor.GradientNoise` and a `GradientSquares` on the model's parameters.
        micro_batches: returns how many backwards the coming update has.
        ranks: data-parallel ranks if gradients are summed over them, 1 if averaged.
    """

    needs_engine_backward = True

    def __init__(self, noise: Any, squares: Any, micro_batches: Callable[[], int], ranks: int) -> None:
        self._noise, self._squares, self._micro_batches, self._ranks = noise, squares, micro_batches, ranks

    def after_step(self, report: StepReport) -> None:
        """Add the step, unless it was skipped."""
        count, square = self._micro_batches(), self._squares.take()
        if report.applied and report.grad_norm is not None:
            # The backwards were of loss x scale / count: undo that factor, and take the mean over the micro-batches.
            small = square * (count / report.loss_scale) ** 2 / count
            self._noise.update(small, (report.grad_norm / self._ranks) ** 2)

    def events(self, report: StepReport) -> list[Event]:
        """The estimate so far."""
        scale = self._noise.scale
        return [] if scale is None else [("Train/Samples/gradient_noise_scale", scale, report.global_samples)]


class TimelineSession(StepHook):
    """Traces some steps on every rank, then merges the ranks' traces.

    Args:
        make: makes a new `dsx_monitor.Timeline`.
        section: the `timeline` section.
        counters: the counters of training.
        clock: a `dsx_monitor.TracedClock`.
        observe: registers an observer of communication; returns a function that ends that.
        barrier: waits for all ranks.
        run_dir: the folder for traces.
        merge: makes one file from all traces in a folder and returns it; None on other ranks than 0.
        tolerating: as for `FlopsSession`. A rank that cannot write still takes part in the barriers.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        section: Any,
        counters: Counters,
        clock: Any,
        observe: Callable[[Any], Callable[[], None]],
        barrier: Callable[[], None],
        run_dir: Path,
        merge: Callable[[Path], Path] | None,
        tolerating: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._tolerating = tolerating
        self._make, self._section, self._counters, self._clock = make, section, counters, clock
        self._observe, self._barrier, self._run_dir, self._merge = observe, barrier, run_dir, merge
        self._timeline: Any = None
        self._left = section.steps
        self._stop: Callable[[], None] = lambda: None

    def before_batch(self) -> None:
        """Start with the update of a pipeline: the forward of a later stage waits for an earlier one, which would wait
        for it here. Collective.
        """
        self.before_forward((), {})

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start with the first forward of the chosen step. Collective."""
        if self._timeline is None and self._left and self._counters.global_steps >= self._section.start_step:
            self._timeline = self._clock.timeline = self._make()
            self._barrier()
            self._timeline.mark_meeting()
            self._stop = self._observe(self._timeline)

    def after_step(self, report: StepReport) -> None:
        """Stop after the chosen number of steps; then it is collective."""
        if self._timeline is None:
            return
        self._left -= 1
        if self._left:
            return
        self._end()
        self._barrier()  # after it, all traces are written
        if self._merge is not None:
            with self._tolerating(f"the traces in {self._run_dir} cannot be put together"):
                logger.info("trace of %d steps: %s", self._section.steps, self._merge(self._run_dir))

    def _end(self) -> None:
        self._stop()
        with self._tolerating(f"the trace cannot be written to {self._run_dir}"):
            self._timeline.write(self._run_dir)
        self._timeline = self._clock.timeline = None

    def close(self) -> None:
        """Write the trace so far if training ends inside the traced steps."""
        if self._timeline is not None:
            self._left = 0
            self._end()
