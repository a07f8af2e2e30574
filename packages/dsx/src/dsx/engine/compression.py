"""Logs the traffic of an optimizer with one-bit averaging: the bytes it sends, and the time it saves.

Bytes are those of this rank since the line before. The gain is the optimizer's estimate, from measurements at its first
step (`dsx_comm.StepTraffic`). It measures only with `compression: "auto"`; otherwise no gain is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..utils.logging import logger
from .report import StepReport


class CompressionLine:
    """Logs a line every `every` steps.

    Args:
        every: steps between two lines.
        latest: returns the optimizer's record of its latest step, or None before the first.
    """

    def __init__(self, every: int, latest: Callable[[], Any]) -> None:
        self._every, self._latest = every, latest
        self._sent = self._uncompressed = self._gain = 0.0

    def after_step(self, report: StepReport) -> None:
        """Add the step's bytes; at the end of an interval log the sums."""
        traffic = self._latest()
        if report.applied and traffic is not None:
            self._sent += traffic.sent
            self._uncompressed += traffic.uncompressed
            self._gain += traffic.gain_seconds or 0.0
        if traffic is None or report.global_step % self._every:
            return
        measured = traffic.gain_seconds is not None
        gain = f", estimated gain {self._gain * 1e3 / self._every:.1f} ms per step" if measured else ""
        logger.info(
            "compression: %s, sent %.4g MB in %d steps, uncompressed %.4g MB%s",
            traffic.kind.value, self._sent / 1e6, self._every, self._uncompressed / 1e6, gain,
        )  # fmt: skip
        self._sent = self._uncompressed = self._gain = 0.0
