"""Advances a compression schedule after every applied step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .report import StepReport


class CompressionSession:
    """An observer.

    Args:
        scheduler: a `dsx_compress.CompressionScheduler`.
        eigenvalues: the latest relative eigenvalue of each block by module name; empty without eigenvalues.
    """

    def __init__(self, scheduler: Any, eigenvalues: Callable[[], Mapping[str, float]]) -> None:
        self._scheduler, self._eigenvalues = scheduler, eigenvalues

    def after_step(self, report: StepReport) -> None:
        """Count the step, unless it was skipped. Collective."""
        if report.applied:
            self._scheduler.step(self._eigenvalues())
