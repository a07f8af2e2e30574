"""Observers of each step: the progress line, the metrics, the memory line.

Observers are called in order after each boundary step, with its report. An observer that is switched off is not built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..utils.logging import logger
from .hooks import Clock
from .report import Counters, StepReport

Event = tuple[str, float, int]


class StepObserver(Protocol):
    """Called by the engine after each step at an accumulation boundary, skipped ones included."""

    def after_step(self, report: StepReport) -> None: ...


class StepTimes:
    """Reads the clock once per step and keeps the figures for the observers after it.

    On a device they are the figures of the latest step whose work has ended, which may be an earlier one.

    Args:
        clock: measures the parts of a step.
        phases: makes the reported figures from the measured ones.
    """

    def __init__(self, clock: Clock, phases: Callable[[list[tuple[str, float]]], list[tuple[str, float]]]) -> None:
        self._clock, self._phases = clock, phases
        self.measured: list[tuple[str, float]] = []

    def after_step(self, report: StepReport) -> None:
        """Take the next finished step's figures."""
        self.measured = self._clock.elapsed()

    @property
    def latest(self) -> list[tuple[str, float]]:
        """Name and milliseconds of forward, backward, its parts and step."""
        return self._phases(self.measured)

    def events(self, report: StepReport) -> list[Event]:
        """The figures as events."""
        samples = report.global_samples
        return [(f"Train/Samples/elapsed_time_ms_{name}", value, samples) for name, value in self.latest]


class Throughput:
    """Feeds a `dsx_monitor.ThroughputTimer`.

    Args:
        timer: the timer.
        tokens: returns how many tokens this rank has seen since the last call; 0 if there are none.
        ranks: number of data-parallel ranks, which share a step's samples.
    """

    def __init__(self, timer: Any, tokens: Callable[[], int] = lambda: 0, ranks: int = 1) -> None:
        self.timer, self._tokens, self._ranks = timer, tokens, ranks

    def after_step(self, report: StepReport) -> None:
        """Count the step's samples."""
        tokens = self._tokens()
        if tokens:
            self.timer.tokens_per_sample = tokens * self._ranks / report.samples
        self.timer.step(report.samples)

    def events(self, report: StepReport) -> list[Event]:
        """Samples, tokens and operations per second, as far as they are known."""
        return self.timer.events(report.global_samples)


class ProgressLine:
    """Logs `step=..., skipped=..., lr=[...], mom=[...]` every `every` steps, with the throughput if it is measured."""

    def __init__(
        self, every: int, counters: Counters, moments: Callable[[], Sequence[Any]], speed: Callable[[], float]
    ) -> None:
        self._every, self._counters, self._moments, self._speed = every, counters, moments, speed

    def after_step(self, report: StepReport) -> None:
        """Write the line if this step is due."""
        if report.global_step % self._every:
            return
        speed = self._speed()
        logger.info(
            "step=%d, skipped=%d, lr=%s, mom=%s%s",
            report.global_step,
            self._counters.skipped_steps,
            list(report.lr),
            list(self._moments()),
            f", samples/s={speed:.1f}" if speed else "",
        )


class TimeLine:
    """Logs `time (ms) | forward: ... | backward: ... | step: ...` every `every` steps: means over the steps since the
    line before.
    """

    def __init__(self, every: int, times: StepTimes) -> None:
        self._every, self._times = every, times
        self._sums: dict[str, float] = {}
        self._steps = 0

    def after_step(self, report: StepReport) -> None:
        """Add the step's figures; write the line if it is due."""
        if self._times.latest:
            self._steps += 1
        for name, value in self._times.latest:
            self._sums[name] = self._sums.get(name, 0.0) + value
        if report.global_step % self._every == 0 and self._steps:
            means = (f"{name}: {total / self._steps:.2f}" for name, total in self._sums.items())
            logger.info("time (ms) | %s", " | ".join(means))
            self._sums, self._steps = {}, 0


class MonitorEvents:
    """Sends the events of each step to the monitor's writers, with the global samples as the x axis.

    Args:
        write: takes a list of `(label, value, global_samples)`.
        sources: return a step's events, in the order in which they are sent.
    """

    def __init__(
        self, write: Callable[[list[Event]], None], sources: Sequence[Callable[[StepReport], list[Event]]]
    ) -> None:
        self._write, self._sources = write, sources

    def after_step(self, report: StepReport) -> None:
        """Write the step's events."""
        self._write([event for source in self._sources for event in source(report)])


class TrainingEvents:
    """Events for loss, learning rate, norm, loss scale and skipped steps. Only for rank 0, because reading the loss
    waits for the device.

    Args:
        counters: the counters of training.
        loss_scale: also send the loss scale, if there is one.
    """

    def __init__(self, counters: Counters, *, loss_scale: bool) -> None:
        self._counters, self._loss_scale = counters, loss_scale

    def events(self, report: StepReport) -> list[Event]:
        """The step's figures; figures that do not exist are left out."""
        values: list[tuple[str, float | None]] = [
            ("train_loss", report.loss),
            ("lr", report.lr[0] if report.lr and not math.isnan(report.lr[0]) else None),
            ("loss_scale", report.loss_scale if self._loss_scale else None),
            ("grad_norm", report.grad_norm),
            ("skipped_steps", self._counters.skipped_steps),
        ]
        samples = report.global_samples
        return [(f"Train/Samples/{name}", float(value), samples) for name, value in values if value is not None]


class SentBytes:
    """Adds up what this rank sends to others (an observer of `dsx_comm`'s calls)."""

    def __init__(self) -> None:
        self._sent = 0.0

    def begin(self, call: Any) -> None:
        """Count a call."""
        self._sent += call.sent / call.per

    def end(self, token: Any, call: Any, result: Any, is_async: bool) -> None:
        """Does nothing at the end of a call."""

    def events(self, report: StepReport) -> list[Event]:
        """Bytes sent since the step before."""
        sent, self._sent = self._sent, 0.0
        return [("Train/Samples/bytes_communicated", sent, report.global_samples)]


class MemoryUse:
    """Memory of this process: its size in every step, and its classes at progress lines (`memory_breakdown`).

    Args:
        in_use: returns the bytes that the process uses (on its device, if it has one).
        breakdown: returns bytes per class; None: classes are not reported.
        every: steps between two breakdowns.
    """

    def __init__(self, in_use: Callable[[], int], breakdown: Callable[[], dict[str, int]] | None, every: int) -> None:
        self._in_use, self._breakdown, self._every = in_use, breakdown, every
        self._latest: dict[str, int] = {}

    def after_step(self, report: StepReport) -> None:
        """Log the bytes of each class if that is due."""
        self._latest = {}
        if self._breakdown is None or report.global_step % self._every:
            return
        self._latest = self._breakdown()
        shown = " | ".join(f"{name}: {size / 2**20:.1f}" for name, size in self._latest.items())
        logger.info("memory (MiB) at step %d | %s", report.global_step, shown)

    def events(self, report: StepReport) -> list[Event]:
        """Bytes in use, and bytes per class if they were read in this step."""
        samples = report.global_samples
        classes: list[Event] = [(f"Train/Memory/{name}", float(size), samples) for name, size in self._latest.items()]
        return [("Train/Samples/memory_bytes", float(self._in_use()), samples), *classes]


class RunStart:
    """Records the start of the run in the run directory, at the first step: only then it is known whether the run was
    resumed.

    Args:
        start: is called with the samples seen before this process began.
    """

    def __init__(self, start: Callable[[int], None]) -> None:
        self._start: Callable[[int], None] | None = start

    def after_step(self, report: StepReport) -> None:
        """Record the start, once."""
        if self._start is not None:
            self._start(report.global_samples - report.samples)
            self._start = None


class StragglerWatch:
    """Feeds a `dsx_monitor.StragglerMonitor` on every rank; rank 0 logs the stragglers.

    Args:
        monitor: the monitor.
        times: the clock's figures.
        write: on rank 0, takes each comparison as a record; None on other ranks.
    """

    def __init__(self, monitor: Any, times: StepTimes, write: Callable[[dict[str, Any]], None] | None) -> None:
        self._monitor, self._times, self._write = monitor, times, write
        self._due: Any = None

    @property
    def latest(self) -> Any:
        """The latest comparison, the same on all ranks; None before the first."""
        return self._monitor.latest

    def events(self, report: StepReport) -> list[Event]:
        """For a step that compared the ranks: the slowest rank, and how much longer its phase is than the others'."""
        if self._due is None or not self._due.found:
            return []
        worst, samples = self._due.found[0], report.global_samples
        return [
            ("Train/Stragglers/rank", float(worst.rank), samples),
            (f"Train/Stragglers/excess_ms_{worst.phase}", worst.own - worst.middle, samples),
        ]

    def after_step(self, report: StepReport) -> None:
        """Add the step, and compare the ranks if that is due; then it is collective."""
        found = self._due = self._monitor.step(self._times.measured)
        if found is None or self._write is None:
            return
        for straggler in found.found:
            logger.warning("step %d: %s", report.global_step, straggler)
        self._write({"step": report.global_samples, "own": found.own, "waiting": found.waiting,
                     "found": [str(straggler) for straggler in found.found]})  # fmt: skip
