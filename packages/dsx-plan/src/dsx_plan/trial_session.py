"""An experiment of the autotuner inside an engine: it measures some updates end to end, records the result and ends.

The measured time is from the end of one update to the end of a later one, with everything in between: reading data,
forward, backward, communication, the update, and the rest of the user's loop. The slowest rank counts. On a device the
clock is read after its work is done.

All ranks end after the same update, with a `SystemExit` of code 0, so that the script's own clean-up runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dsx_core.device import Device

from .engine import StepWatcher

__all__ = ["TrialEnded", "TrialSession", "TrialTasks"]


class TrialEnded(SystemExit):
    """An experiment of the autotuner is over. This is not an error; the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class TrialTasks:
    """Functions of the engine that a session needs.

    Attributes:
        gather: takes this rank's list of numbers and returns those of all ranks (collective).
        in_use: returns the bytes in use on the device, or in the process if there is no device.
        peak: returns the most bytes in use since `restart_peak`.
        restart_peak: starts a new peak.
        state_bytes: returns the bytes of parameters, gradients, master weights and optimizer states of this rank.
        conclude: takes the measurements; called on every rank, writes on one.
        look: is called with the arguments of the first micro-batch.
        profiler: counts operations in the first update; None: they are not counted.
    """

    gather: Callable[[list[float]], list[list[float]]]
    in_use: Callable[[], int]
    peak: Callable[[], int]
    restart_peak: Callable[[], None]
    state_bytes: Callable[[], int]
    conclude: Callable[[dict[str, Any]], None]
    look: Callable[[tuple[Any, ...], dict[str, Any]], None]
    profiler: Any = None


class TrialSession(StepWatcher):
    """Measures the updates from `first` to `last` and ends the program.

    Args:
        first, last: numbers of updates of this process, from 1; both are measured.
        device: the device of the model.
        tasks: functions of the engine.
    """

    def __init__(self, first: int, last: int, device: torch.device, tasks: TrialTasks) -> None:
        self._first, self._last, self._tasks = first, last, tasks
        self._phases = _Phases(device)
        self._device = device
        self._updates, self._micro_batches, self._samples = 0, 0, 0
        self._looked = self._counting = False
        self._operations: float | None = None
        self._startup = 0.0
        tasks.restart_peak()
        self._in_use, self._states = tasks.in_use(), tasks.state_bytes()
        self._began = self._now()

    def micro_batch_read(self, item: Any) -> None:
        """Look at the first micro-batch of a pipeline: inputs and labels."""
        if torch.is_grad_enabled():
            self._look(tuple(item) if isinstance(item, (tuple, list)) else (item,), {})

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._looked:
            self._looked = True
            self._tasks.look(args, kwargs)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the first micro-batch; note the time."""
        if not torch.is_grad_enabled():
            return
        self._look(args, kwargs)
        if not self._counting and self._tasks.profiler is not None:
            self._counting = True
            self._tasks.profiler.start_profile()
        if not self._updates:
            self._micro_batches += 1
        self._phases.begin("fwd")

    def before_backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Note the time."""
        self._phases.begin("bwd")

    def before_update(self) -> None:
        """Note the time. In the first update, read the counted operations."""
        self._phases.begin("step")
        profiler = self._tasks.profiler
        if profiler is not None and profiler.started:
            profiler.stop_profile()
            self._operations = float(profiler.get_total_flops() + profiler.get_total_backward_flops())
            profiler.end_profile()

    def after_step(self, report: Any) -> None:
        """Count the update; begin or end the measurement. Raises `TrialEnded` on every rank after the last one."""
        self._phases.begin("rest")
        self._updates += 1
        if self._updates == 1:
            self._startup = _seconds_of_process()
        if self._updates >= self._first:
            self._samples += report.samples
        if self._updates == self._first - 1:
            self._phases.restart()
            self._began = self._now()
        elif self._updates == self._last:
            self._finish()
            raise TrialEnded

    def _finish(self) -> None:
        updates = self._last - self._first + 1
        tasks = self._tasks
        seconds = (self._now() - self._began) / updates
        phases = self._phases.seconds()
        peak = tasks.peak()
        activations = max(0, peak - self._in_use - (tasks.state_bytes() - self._states))
        rows = tasks.gather([seconds, float(peak), float(activations), self._startup])
        latency, most, kept, startup = (max(column) for column in zip(*rows))
        throughput = self._samples / updates / latency
        counted = None
        if self._operations is not None:
            counted = self._operations / max(1, self._micro_batches)
        tasks.conclude(
            {
                **{name: phases[name] / updates if name in phases else None for name in ("fwd", "bwd", "step")},
                "latency": latency,
                "throughput": throughput,
                "flops_per_micro_batch": counted,
                "peak_bytes": int(most),
                "activation_mem_per_gpu": int(kept),
                "startup_seconds": startup,
                "updates": updates,
                "samples_per_update": self._samples / updates,
            }
        )

    def _now(self) -> float:
        """The time in seconds, after the device has done its work."""
        Device.of(self._device).synchronize()
        return time.perf_counter()


class _Phases:
    """Measures the parts of an update; a part lasts until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = Device.of(device)
        self._marks: list[tuple[str, Any]] = []

    def begin(self, name: str) -> None:
        """A part begins."""
        self._marks.append((name, self._device.mark()))

    def restart(self) -> None:
        """Forget all but the part that has just begun."""
        self._marks = self._marks[-1:]

    def seconds(self) -> dict[str, float]:
        """Total seconds by name; the device must have done its work."""
        found: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._marks, self._marks[1:]):
            found[name] = found.get(name, 0.0) + self._device.milliseconds(start, end) / 1e3
        return found


def _seconds_of_process() -> float:
    """Seconds since this process began."""
    import psutil  # lazy import: only experiments ask

    return time.time() - psutil.Process(os.getpid()).create_time()
