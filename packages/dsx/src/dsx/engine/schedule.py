"""Steps a learning-rate schedule: once per applied update, and not for a skipped one.

The schedules of torch and of `dsx.lr_schedules` set the rate of the first update in their constructor, so nothing has
to be done before the first update.
"""

from __future__ import annotations

from typing import Any, Protocol

from .errors import EngineArgumentError


class ScheduleDriver(Protocol):
    """The calls that the engine makes to a schedule, and the scheduler behind it; None without one."""

    @property
    def scheduler(self) -> Any: ...

    def step(self, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoSchedule:
    """Constant learning rates."""

    scheduler = None

    def step(self, **kwargs: Any) -> None:
        """Does nothing. Arguments are refused, because they would have no effect."""
        if kwargs:
            raise EngineArgumentError(
                f"step(lr_kwargs={kwargs!r}): this engine has no learning-rate scheduler to pass them to"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: a checkpoint made with a schedule may be loaded without one."""


class DrivenSchedule:
    """Steps `scheduler` once per applied update."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, **kwargs: Any) -> None:
        """Set the learning rates of the next update."""
        self.scheduler.step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule; an empty state (saved without a schedule) leaves it unchanged."""
        if state:
            self.scheduler.load_state_dict(state)
