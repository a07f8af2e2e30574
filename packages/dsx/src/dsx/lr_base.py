"""What every learning-rate schedule shares: the counter, the writing of values into groups, and the state."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .errors import ScheduleError

__all__ = ["HasParamGroups", "LRSchedule", "PerGroup", "logger", "number", "whole"]

logger = logging.getLogger("dsx.lr_schedules")

PerGroup = float | Sequence[float]


class HasParamGroups(Protocol):
    """All that a schedule needs of an optimizer: ``param_groups``, a list of dictionaries with ``lr``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LRSchedule:
    """Base of the schedules: the counter, the writing of values into groups, and the state.

    Args:
        optimizer: any object with ``param_groups``.
        last_batch_iteration: -1 to begin at the start; the counter to resume from otherwise.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ScheduleError(f"{type(optimizer).__name__} has no list param_groups; a schedule needs an optimizer")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    def lr_at(self, iteration: int) -> list[float]:
        """Return the learning rate of every group at counter ``iteration`` (>= 0)."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rates that hold at the current counter; before the first step, those the groups have."""
        if self.last_batch_iteration < 0:
            return self.get_last_lr()
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that stand in the groups now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance the counter by one, or set it, and write the new values into the groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write(max(0, self.last_batch_iteration))

    def _write(self, iteration: int) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.lr_at(iteration), strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the state: everything but the counter is an argument."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counter from ``state`` and write the values that belong to it into the groups."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        if self.last_batch_iteration >= 0:
            self._write(self.last_batch_iteration)

    def _per_group(self, name: str, value: PerGroup | None) -> list[float]:
        """Return one value per group: repeated, or checked against the number of groups."""
        groups = self.optimizer.param_groups
        if value is None:
            return [float(group.get("initial_lr", group["lr"])) for group in groups]
        if isinstance(value, (list, tuple)):
            if len(value) != len(groups):
                raise ScheduleError(
                    f"{name}: got {len(value)} values for {len(groups)} parameter groups; give one number or one per group"
                )
            return [number(name, item) for item in value]
        return [number(name, value)] * len(groups)


def number(name: str, value: Any) -> float:
    """Return ``value`` as a finite float, or refuse it by name."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ScheduleError(f"{name}: got {value!r}, expected a number")
    return float(value)


def whole(name: str, value: Any) -> int:
    """Return ``value`` as a whole number of at least 1, or refuse it by name."""
    checked = number(name, value)
    if checked < 1 or not checked.is_integer():
        raise ScheduleError(f"{name}: got {value!r}, expected a whole number of at least 1")
    return int(checked)
