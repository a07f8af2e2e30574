"""Who looks on at each step: the progress line, the metrics, the memory line.

Observers are called in order after each boundary step with its report. What is switched off is simply not in the tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..utils.logging import logger
from .clock import Clock
from .report import Counters, StepReport

Event = tuple[str, float, int]


class StepObserver(Protocol):
    """Called by the engine after each step at an accumulation boundary, skipped ones included."""

    def after_step(self, report: StepReport) -> None: ...


class StepTimes:
    """Reads the clock once per step and keeps the figures for the observers after it.

    On a device they are those of the latest step whose work has ended, not necessarily of this one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.latest: list[tuple[str, float]] = []

    def after_step(self, report: StepReport) -> None:
        """Take the next finished step's figures."""
        self.latest = self._clock.elapsed()


class Throughput:
    """Feeds a `dsx_monitor.ThroughputTimer`."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer

    def after_step(self, report: StepReport) -> None:
        """Count the step's samples."""
        self._timer.step(report.samples)


class ProgressLine:
    """Logs `step=..., skipped=..., lr=[...], mom=[...]` every `every` steps, with the throughput where it is measured."""

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
    """Logs `time (ms) | forward: ... | backward: ... | step: ...` every `every` steps: means over the steps since then."""

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
    """Sends what each step did to the monitor's writers, on the axis of global samples.

    Args:
        write: takes a list of `(label, value, global_samples)`.
        loss_scale: also send the loss scale (there is one).
        times: also send the clock's figures.
        speed: gives further events at a number of samples (throughput).
    """

    def __init__(
        self,
        write: Callable[[list[Event]], None],
        *,
        loss_scale: bool,
        times: StepTimes,
        speed: Callable[[int], list[Event]],
    ) -> None:
        self._write, self._loss_scale, self._times, self._speed = write, loss_scale, times, speed

    def after_step(self, report: StepReport) -> None:
        """Write the step's events. Reading the loss waits for the device, which is why only rank 0 has this observer."""
        values: list[tuple[str, float | None]] = [
            ("train_loss", report.loss),
            ("lr", report.lr[0] if report.lr else None),
        ]
        if self._loss_scale:
            values.append(("loss_scale", report.loss_scale))
        values.append(("grad_norm", report.grad_norm))
        values.extend((f"elapsed_time_ms_{name}", value) for name, value in self._times.latest)
        samples = report.global_samples
        events = [(f"Train/Samples/{name}", float(value), samples) for name, value in values if value is not None]
        self._write(events + self._speed(samples))


class MemoryLine:
    """Logs the memory in use at each progress line (`memory_breakdown`)."""

    def __init__(self, every: int) -> None:
        self._every = every

    def after_step(self, report: StepReport) -> None:
        """Write the line if this step is due."""
        if report.global_step % self._every == 0:
            # Late: psutil is needed by nobody else.
            from ..utils.memory import see_memory_usage

            see_memory_usage(f"step {report.global_step}", force=True)
