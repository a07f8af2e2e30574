"""Logs the traffic of an optimizer with one-bit averaging: the bytes that this rank has sent since the line before."""

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
        self._sent = self._uncompressed = 0.0

    def after_step(self, report: StepReport) -> None:
        """Add the step's bytes; at the end of an interval log the sums."""
        traffic = self._latest()
        if report.applied and traffic is not None:
            self._sent += traffic.sent
            self._uncompressed += traffic.uncompressed
        if traffic is None or report.global_step % self._every:
            return
        logger.info(
            "compression: %s, sent %.4g MB in %d steps, uncompressed %.4g MB",
            traffic.kind.value, self._sent / 1e6, self._every, self._uncompressed / 1e6,
        )  # fmt: skip
        self._sent = self._uncompressed = 0.0
