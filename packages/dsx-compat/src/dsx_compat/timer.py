"""`deepspeed.utils.timer.SynchronizedWallClockTimer`: named stopwatches that wait for the device.

Programs time their own parts with it. It waits for the device at every start and stop, which is what its name promises;
`dsx_monitor.WallClock` measures without waiting, and is what the engine uses. Times are in milliseconds.

Left out: `memory_usage` (use `dsx_monitor.phases.PhaseMemory`), and the engine's own timers (the engine's
`get_wall_clock_timers()` has those).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from dsx_core.device import Device

from .errors import CompatError

__all__ = ["SynchronizedWallClockTimer"]

_logger = logging.getLogger("dsx.compat")


class _Timer:
    """A stopwatch of one name.

    Attributes:
        name_: its name.
        started_: whether it runs.
    """

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._begin, self._elapsed_s, self._records = 0.0, 0.0, list[float]()

    def start(self) -> None:
        """Start it, when the device has done its work so far.

        Raises:
            CompatError: it runs already.
        """
        if self.started_:
            raise CompatError(f"timer {self.name_!r}: got start(), expected stop() before it; it runs already")
        self.started_, self._begin = True, _now()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """Stop it, when the device has done its work so far, and add to what it has measured.

        Args:
            reset: forget what was measured before.
            record: count this time in `mean`.

        Raises:
            CompatError: it does not run.
        """
        if not self.started_:
            raise CompatError(f"timer {self.name_!r}: got stop(), expected start() before it; it does not run")
        taken = _now() - self._begin
        self.started_, self._elapsed_s = False, taken if reset else self._elapsed_s + taken
        if record:
            self._records.append(taken)

    def reset(self) -> None:
        """Stop it without a record, and forget what it has measured."""
        self.started_, self._elapsed_s, self._records = False, 0.0, []

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds measured so far; with `reset` they are forgotten. A timer that runs goes on."""
        runs = self.started_
        if runs:
            self.stop(record=False)
        found = self._elapsed_s * 1e3
        if reset:
            self._elapsed_s = 0.0
        if runs:
            self.start()
        return found

    def mean(self) -> float:
        """The mean of the recorded times, in milliseconds; 0 without any."""
        return 1e3 * sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        """The timer of this name; made when it is first asked for."""
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        """All timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether there is a timer of this name."""
        return name in self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log the milliseconds of some timers, divided by `normalizer`, on these ranks (default: the first one).

        Raises:
            CompatError: `normalizer` is not above 0.
        """
        if not normalizer > 0:
            raise CompatError(f"log(normalizer=...): got {normalizer}, expected a number above 0")
        found = [(name, self.timers[name].elapsed(reset=reset) / normalizer) for name in names if name in self.timers]
        if _rank() in (ranks if ranks is not None else (0,)):
            _logger.info("time (ms) | %s", " | ".join(f"{name}: {value:.2f}" for name, value in found))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean milliseconds of some timers, divided by `normalizer`.

        Raises:
            CompatError: `normalizer` is not above 0.
        """
        if not normalizer > 0:
            raise CompatError(f"get_mean(normalizer=...): got {normalizer}, expected a number above 0")
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


def _now() -> float:
    Device.current().synchronize()
    return time.perf_counter()


def _rank() -> int:
    import torch.distributed as dist  # lazy import: a timer needs no ranks

    return dist.get_rank() if dist.is_initialized() else 0
