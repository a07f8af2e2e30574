"""Figures of speed under DeepSpeed's names: the engine's throughput timer, and bandwidths of the communication log."""

from __future__ import annotations

from typing import Any

import dsx_comm
from dsx.engine.observers import Throughput
from dsx_comm.bandwidth import gbps

from .errors import MemberNotSupportedError

__all__ = ["ThroughputView", "calc_bw_log"]


class ThroughputView:
    """DeepSpeed's `engine.tput_timer`, read from the measurement of the engine. The engine starts and stops it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._engine.train_batch_size()

    @property
    def global_step_count(self) -> int:
        """Steps so far."""
        return self._engine.global_steps

    def avg_samples_per_sec(self) -> float:
        """Samples per second of all ranks, over the latest steps. Minus infinity while there is no measurement: in the
        first steps, on the ranks other than 0, and with `timers.throughput.enabled: false`.
        """
        for observer in self._engine._parts.watch.observers:
            if isinstance(observer, Throughput) and observer.timer.samples_per_second > 0:
                return observer.timer.samples_per_second
        return float("-inf")

    def __getattr__(self, name: str) -> Any:
        if name in ("start", "stop", "update_epoch_count"):
            raise MemberNotSupportedError(
                f"engine.tput_timer.{name}: dsx does not have it; the engine measures each step, so remove the call, or"
                " use a dsx_monitor.ThroughputTimer of your own"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in Gbit/s of a call among all ranks: `size` bytes in `duration` milliseconds."""
    return gbps(comm_op, size, duration, dsx_comm.get_world_size() if dsx_comm.is_initialized() else 1)
