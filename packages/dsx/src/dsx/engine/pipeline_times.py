"""Times of a pipeline's stages and its bubble, for the log and for monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..utils.logging import logger
from .observers import Event
from .report import StepReport

__all__ = ["PipelineTimes"]


class PipelineTimes:
    """Stage times and the bubble, measured and planned, every `every` steps: an observer, and a source of events.

    Args:
        every: steps between two reports, which are collective over the pipeline.
        log: also log them.
    """

    def __init__(self, every: int, *, log: bool) -> None:
        self._every, self._log = every, log
        self._read: Callable[[], Any] | None = None
        self._latest: Any = None

    def follow(self, read: Callable[[], Any]) -> None:
        """Set the function that returns reports (`PipelineEngine.pipeline_report`)."""
        self._read = read

    def after_step(self, report: StepReport) -> None:
        """Read the report of the step if it is due; then it is collective."""
        self._latest = None
        if self._read is None or report.global_step % self._every:
            return
        self._latest = self._read()
        if self._log:
            logger.info("pipeline at step %d | %s", report.global_step, self._latest)

    def events(self, report: StepReport) -> list[Event]:
        """Milliseconds per micro-batch of each stage; the bubble's share, measured and planned, and above the ideal."""
        found = self._latest
        if found is None:
            return []
        values = {
            "bubble_share": found.measured.bubble_share,
            "bubble_share_by_plan": found.ideal.bubble_share,
            "step_over_ideal": found.over_ideal,
        }
        for stage, times in enumerate(found.stage_times):
            values[f"stage_{stage}_forward_ms"] = 1e3 * times.forward
            values[f"stage_{stage}_backward_ms"] = 1e3 * (times.input_backward + times.weight_backward)
            values[f"stage_{stage}_kept"] = found.most_kept[stage]
        return [(f"Train/Pipeline/{name}", float(value), report.global_samples) for name, value in values.items()]
