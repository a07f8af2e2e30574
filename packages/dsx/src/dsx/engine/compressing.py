"""Advances a compression schedule after every applied step, and saves it for models that are divided into stages."""

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


class StagedSchedule:
    """The state of a compression schedule for a checkpoint, if each rank has the techniques of its own stages.

    Args:
        scheduler: a `dsx_compress.CompressionScheduler`.
        gather: takes this rank's object and returns those of all ranks. Collective.
    """

    def __init__(self, scheduler: Any, gather: Callable[[Any], list[Any]]) -> None:
        self._scheduler, self._gather = scheduler, gather

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's techniques."""
        return self._scheduler.state_dict()

    def whole_state(self) -> dict[str, Any]:
        """The state of all ranks' techniques. Collective."""
        states = self._gather(self.state_dict())
        techniques = {name: one for state in states for name, one in state["techniques"].items()}
        return {**self.state_dict(), "techniques": techniques}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of either kind; techniques of other stages are ignored."""
        own = self.state_dict()["techniques"]
        techniques = {name: one for name, one in state["techniques"].items() if name in own}
        self._scheduler.load_state_dict({**state, "techniques": techniques})
