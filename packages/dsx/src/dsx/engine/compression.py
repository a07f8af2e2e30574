"""The line that says what an optimizer which averages in one bit sends, and what it saves.

Bytes are this rank's, summed since the line before. The gain is the optimizer's estimate from what it measured at its
first step (`dsx_comm.StepTraffic`), which it does with `compression: "auto"` only; without a measurement no gain is
shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..utils.logging import logger
from .report import StepReport


class CompressionLine:
    """Logs every `every` steps.

    Args:
        every: steps between two lines.
        latest: the optimizer's record of its latest step; None before the first.
    """

    def __init__(self, every: int, latest: Callable[[], Any]) -> None:
        self._every, self._latest = every, latest
        self._sent = self._uncompressed = self._gain = 0.0

    def after_step(self, report: StepReport) -> None:
        """Add the step's bytes; at the end of an interval say the sums."""
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
