"""Driving a learning-rate schedule: one step per applied update, none on a skipped one.

The schedules of torch and those of `dsx.lr_schedules` both set the rate of the first update when they are
constructed, so the driver has nothing to do before the first update.
"""

from __future__ import annotations

from typing import Any, Protocol

from .errors import EngineArgumentError


class ScheduleDriver(Protocol):
    """What the engine does with a schedule."""

    def step(self, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoSchedule:
    """Constant learning rates."""

    def step(self, **kwargs: Any) -> None:
        """Nothing to do; arguments would be lost, so they are refused."""
        if kwargs:
            raise EngineArgumentError(
                f"step(lr_kwargs={kwargs!r}): this engine has no learning-rate scheduler to pass them to"
            )

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: a checkpoint made with a schedule may be loaded without one."""


class DrivenSchedule:
    """Steps `scheduler` once per applied update."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, **kwargs: Any) -> None:
        """Set the learning rates of the next update."""
        self.scheduler.step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """That of the schedule."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule; an empty state (saved without one) leaves it as it is."""
        if state:
            self.scheduler.load_state_dict(state)
