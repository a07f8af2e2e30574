"""The base class of learning-rate schedules: the counter, the writing of values into groups, and the state."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .errors import ScheduleError

__all__ = ["HasParamGroups", "LRSchedule", "PerGroup", "integer", "logger", "number"]

logger = logging.getLogger("dsx.lr_schedules")

PerGroup = float | Sequence[float]


class HasParamGroups(Protocol):
    """The part of an optimizer that a schedule needs: ``param_groups``, a list of dictionaries with ``lr``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LRSchedule:
    """Base class of the schedules: the counter, the writing of values into groups, and the state.

    A subclass checks its arguments first and calls ``_begin`` last, so that a wrong argument leaves the optimizer
    unchanged.

    Args:
        optimizer: any object with ``param_groups``.
        last_batch_iteration: -1 to begin at the start, otherwise the counter to resume from.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ScheduleError(f"{type(optimizer).__name__} has no list param_groups; a schedule needs an optimizer")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._seen_groups = len(optimizer.param_groups)

    def _begin(self, start_at_first_value: bool) -> None:
        """Write the values at counter -1 (or at counter 0) into the groups; a resumed schedule writes nothing."""
        if self.last_batch_iteration != -1:
            return
        if start_at_first_value:
            self.step()
        else:
            self._write(-1)

    def lr_at(self, iteration: int) -> list[float]:
        """Return the learning rate of every group at counter ``iteration`` (>= -1; -1 is before the first step)."""
        raise NotImplementedError

    @property
    def min_lrs(self) -> list[float]:
        """The lowest rate of each group, under the name that scripts read; an AttributeError without one."""
        return list(self.min_lr)  # type: ignore[attr-defined]

    @property
    def max_lrs(self) -> list[float]:
        """The highest rate of each group, under the name that scripts read; an AttributeError without one."""
        return list(self.max_lr)  # type: ignore[attr-defined]

    @property
    def warmup_num_steps(self) -> int:
        """Steps of the warm-up, at least 2; an AttributeError without one."""
        return self.warmup.steps  # type: ignore[attr-defined]

    def get_lr(self) -> list[float]:
        """Return the rates at the current counter."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that the groups have now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance the counter by one, or set it, and write the new values into the groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write(max(-1, self.last_batch_iteration))

    def _write(self, iteration: int) -> None:
        """Write the values into the groups. Groups that were added later keep their rate, as with torch's schedules."""
        groups, values = self.optimizer.param_groups, self.lr_at(iteration)
        if len(groups) > max(len(values), self._seen_groups):
            logger.warning(
                "%s: parameter groups %d to %d were added after the schedule was made, and keep the rate they came"
                " with; set group['lr'] in each step, or make a new schedule, to change it",
                type(self).__name__,
                max(len(values), self._seen_groups),
                len(groups) - 1,
            )
        self._seen_groups = len(groups)
        for group, lr in zip(groups, values):
            # A rate that is a tensor stays the same tensor, because captured or compiled optimizers keep it.
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the counter; everything else is an argument."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counter from ``state`` and write its values into the groups."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write(max(-1, self.last_batch_iteration))

    def _per_group(self, name: str, value: PerGroup | None) -> list[float]:
        """Return one value per group: a single value is repeated; a list must fit the number of groups."""
        groups = self.optimizer.param_groups
        if value is None:
            return [float(group.get("initial_lr", group["lr"])) for group in groups]
        if isinstance(value, (list, tuple)):
            if len(value) != len(groups):
                raise ScheduleError(
                    f"{name}: got {len(value)} values for {len(groups)} parameter groups; "
                    "give one number or one per group"
                )
            return [number(name, item) for item in value]
        return [number(name, value)] * len(groups)


def number(name: str, value: Any) -> float:
    """Return ``value`` as a finite float. Raises an error with ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ScheduleError(f"{name}: got {value!r}, expected a number")
    return float(value)


def integer(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` as an integer of at least ``minimum``. Raises an error with ``name`` otherwise."""
    checked = number(name, value)
    if checked < minimum or not checked.is_integer():
        raise ScheduleError(f"{name}: got {value!r}, expected an integer of at least {minimum}")
    return int(checked)
