"""Measures where the time of a step goes and how fast training is, without slowing it down.

`WallClock` measures named ranges. On an accelerator a range is a pair of events on the current stream. They are read
only after both have happened, so that measuring never waits for the device; the figures of a step then arrive a step
or two later. On the host a range is measured with `time.perf_counter`.

`ThroughputTimer` counts samples, tokens and floating-point operations per second. It does not synchronise either. Over
a window of steps the host cannot run far ahead of the device, so the mean is right even if single steps are not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .processes import accelerator

__all__ = [
    "BACKWARD",
    "BACKWARD_INNER",
    "BACKWARD_REDUCE",
    "FORWARD",
    "OUTSIDE",
    "STEP",
    "WAITING",
    "ThroughputTimer",
    "WallClock",
    "phase_times",
]

# The ranges of a training step; events are called `elapsed_time_ms_` + name.
FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INNER = "backward_inner"
BACKWARD_REDUCE = "backward_allreduce"
STEP = "step"
WAITING = "waiting:"
"""Prefix of the time that a range waited for other ranks."""
OUTSIDE = "outside"
"""Time outside of all ranges: the data loader and the rest of the training loop."""


@dataclass
class _Frame:
    """The ranges of one step: milliseconds already known, and pairs of device events still to be read."""

    known: dict[str, float] = field(default_factory=dict)
    pending: list[tuple[str, Any, Any]] = field(default_factory=list)

    def add(self, name: str, milliseconds: float) -> None:
        """Add to a range."""
        self.known[name] = self.known.get(name, 0.0) + milliseconds

    def resolve(self, wait: bool) -> bool:
        """Read the events that have happened; returns True if none is left."""
        left = []
        for name, start, end in self.pending:
            if wait:
                end.synchronize()
            if wait or end.query():
                self.add(name, start.elapsed_time(end))
            else:
                left.append((name, start, end))
        self.pending = left
        return not left


class WallClock:
    """Times named ranges, step by step.

    Args:
        device: a `torch.device` or its name; an accelerator is timed with events, the CPU by the host's clock.

    Ranges of the same name within a step add up; ranges may be nested. The clock belongs to one thread.

    It is also told of waits (`begin_wait` and `end_wait`, which `dsx_comm.observe` calls): time spent waiting for other
    ranks adds up under `WAITING + name of the innermost open range`. Backward on a device runs in a thread of autograd
    while the clock's own thread stands still, so waits may come from that thread.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._device = accelerator(device)
        self._current = _Frame()
        self._closed: deque[_Frame] = deque()
        self._open: list[str] = []
        self._waits = 0

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Measure the context, also if it raises."""
        begin = self._mark()
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            self._add(name, begin)

    def begin_wait(self) -> Any:
        """This process begins to wait for others. Pass the returned token to `end_wait`.

        A wait inside another wait does not count twice.
        """
        self._waits += 1
        return self._mark() if self._waits == 1 else None

    def end_wait(self, token: Any) -> None:
        """The wait is over."""
        self._waits -= 1
        if token is not None:
            self._add(WAITING + (self._open[-1] if self._open else OUTSIDE), token)

    def elapsed(self, *, wait: bool = False) -> list[tuple[str, float]]:
        """End the step and return the `(name, milliseconds)` of the oldest step not yet returned.

        The result is empty if that step's device events have not happened yet; a later call returns them. With `wait`
        this call waits for the device instead.
        """
        if self._current.known or self._current.pending:
            self._closed.append(self._current)
            self._current = _Frame()
        if not self._closed or not self._closed[0].resolve(wait):
            return []
        return list(self._closed.popleft().known.items())

    def _mark(self) -> Any:
        return self._device.mark() if self._device else time.perf_counter()

    def _add(self, name: str, begin: Any) -> None:
        if self._device:
            self._current.pending.append((name, begin, self._device.mark()))
        else:
            self._current.add(name, (time.perf_counter() - begin) * 1e3)


def phase_times(elapsed: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """The figures of a step as they are reported: forward, backward and its two parts, step.

    `backward_allreduce` is the time that backward waited for its reductions (and gathers), `backward_inner` the rest.
    Reductions that run at the same time as backward cost it no time, so they count in neither.
    """
    known = dict(elapsed)
    if BACKWARD in known:
        waited = min(known.get(WAITING + BACKWARD, 0.0), known[BACKWARD])
        known[BACKWARD_INNER], known[BACKWARD_REDUCE] = known[BACKWARD] - waited, waited
    return [(name, known[name]) for name in (FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_REDUCE, STEP) if name in known]


class ThroughputTimer:
    """Samples, tokens and TFLOPS per second over a sliding window of steps.

    Args:
        batch_size: samples per step, over all ranks.
        tokens_per_sample: tokens per sample; None: tokens per second are not reported.
        flops_per_sample: floating-point operations of one sample's forward and backward; None: TFLOPS are not reported.
        start_step: steps left out at the start (compilation, first allocations).
        window: the number of latest steps that count.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        tokens_per_sample: int | None = None,
        flops_per_sample: float | None = None,
        start_step: int = 2,
        window: int = 50,
    ) -> None:
        if batch_size <= 0 or window <= 0:
            raise ValueError(
                f"ThroughputTimer: got batch_size={batch_size}, window={window}, expected positive numbers"
            )
        self.batch_size, self.tokens_per_sample, self.flops_per_sample = batch_size, tokens_per_sample, flops_per_sample
        self.steps = 0
        self._skip = start_step
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._samples = 0

    def step(self, batch_size: int | None = None) -> None:
        """Call this at the end of each step. `batch_size`: the samples of this step, if they differ."""
        self.steps += 1
        if self.steps < self._skip:
            return
        if self._marks:
            self._samples += self.batch_size if batch_size is None else batch_size
        self._marks.append((time.perf_counter(), self._samples))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of the context, such as an evaluation or a checkpoint."""
        start = time.perf_counter()
        try:
            yield
        finally:
            away = time.perf_counter() - start
            self._marks = deque(((mark + away, n) for mark, n in self._marks), maxlen=self._marks.maxlen)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over the window, all ranks together; 0.0 while there are fewer than two steps to
        compare.
        """
        if len(self._marks) < 2:
            return 0.0
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last > first else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, like `samples_per_second`."""
        return None if self.tokens_per_sample is None else self.samples_per_second * self.tokens_per_sample

    @property
    def tflops(self) -> float | None:
        """1e12 floating-point operations per second, all ranks together."""
        return None if self.flops_per_sample is None else self.samples_per_second * self.flops_per_sample / 1e12

    def events(self, samples: int) -> list[tuple[str, float, int]]:
        """The figures as monitor events at `samples`; an empty list while there are none."""
        if len(self._marks) < 2:
            return []
        values = {
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "tflops": self.tflops,
        }
        return [(f"Train/Samples/{name}", value, samples) for name, value in values.items() if value is not None]
