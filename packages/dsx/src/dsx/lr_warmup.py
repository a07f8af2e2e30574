"""Schedules that begin with a warm-up: ``WarmupLR``, ``WarmupDecayLR``, ``WarmupCosineLR``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import ScheduleError
from .lr_base import HasParamGroups, LRSchedule, PerGroup, integer, logger, number

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class WarmupLR(LRSchedule):
    """A rise from ``warmup_min_lr`` to ``warmup_max_lr``, then constant.

    Args:
        optimizer: any object with ``param_groups``.
        warmup_min_lr: rate at the first update, one number or one per group.
        warmup_max_lr: rate after the warm-up, one number or one per group; None takes the optimizer's own rate.
        warmup_num_steps: steps of the warm-up; at least 2 are taken.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: counter to resume from.
        start_at_first_value: begin at counter 0, so that one update runs at the minimum and not two.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        start_at_first_value: bool = False,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lr = self._per_group("warmup_max_lr", warmup_max_lr)
        self._max_is_own_rate = warmup_max_lr is None
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self._begin(start_at_first_value)

    def gamma_at(self, iteration: int) -> float:
        """Return the position of the rate between min (0) and max (1)."""
        return self.warmup.at(iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """Return min + (max - min) * gamma per group; the minimum before the first step."""
        gamma = self.gamma_at(iteration) if iteration >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self.min_lr, self.max_lr, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the counter, and the groups' own rates if they are the maximum, because the groups do not contain them
        any more.
        """
        return {**super().state_dict(), **({"max_lr": list(self.max_lr)} if self._max_is_own_rate else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counter from ``state``, and the maximum if it is the groups' own rate."""
        kept = state.get("max_lr")
        if self._max_is_own_rate and kept is not None and len(kept) == len(self.max_lr):
            self.max_lr = [float(lr) for lr in kept]
        super().load_state_dict(state)


class WarmupDecayLR(WarmupLR):
    """The rise of ``WarmupLR``, then a straight line down to ``warmup_min_lr`` at step ``total_num_steps``.

    Args:
        optimizer: any object with ``param_groups``.
        total_num_steps: steps of the whole run, warm-up included.
        warmup_max_lr: as in ``WarmupLR``, but 0.001 when it is not given; None takes the optimizer's own rate.
        warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration, start_at_first_value: as in ``WarmupLR``.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        start_at_first_value: bool = False,
    ) -> None:
        self.total = integer("total_num_steps", total_num_steps)
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration,
            start_at_first_value,
        )  # fmt: skip
        _warn_if_short("WarmupDecayLR", self.total, self.warmup)

    def gamma_at(self, iteration: int) -> float:
        """Return the warm-up's factor, and after the warm-up the factor of the decay."""
        if iteration < self.warmup.steps:
            return self.warmup.at(iteration)
        return max(0.0, (self.total - iteration) / max(1.0, self.total - self.warmup.steps))


class WarmupCosineLR(LRSchedule):
    """A factor on each group's own rate: warm-up from ``warmup_min_ratio`` to 1, then a cosine to ``cos_min_ratio``.

    Args:
        optimizer: any object with ``param_groups``.
        total_num_steps: steps of the whole run, warm-up included.
        warmup_min_ratio: factor at the first update.
        warmup_num_steps: steps of the warm-up; at least 2 are taken.
        cos_min_ratio: factor at the end.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: counter to resume from.
        start_at_first_value: begin at counter 0. Otherwise the first update runs at rate 0, whatever the ratios are, as
            in DeepSpeed's sequence.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        start_at_first_value: bool = False,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.total = integer("total_num_steps", total_num_steps)
        self.min_ratio = number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = number("cos_min_ratio", cos_min_ratio)
        self.base_lr = self._per_group("lr", None)
        _warn_if_short("WarmupCosineLR", self.total, self.warmup)
        self._begin(start_at_first_value)

    def ratio_at(self, iteration: int) -> float:
        """Return the factor at counter ``iteration``; 0 before the first step."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup.steps:
            return self.min_ratio + self.warmup.at(iteration) * (1.0 - self.min_ratio)
        done = min(1.0, (iteration - self.warmup.steps + 1) / max(1, self.total - self.warmup.steps))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1.0 + math.cos(math.pi * done)) / 2.0)

    def get_lr_ratio(self) -> float:
        """Return the factor of now; 0 before the first step."""
        return self.ratio_at(self.last_batch_iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """Return factor * own rate per group."""
        ratio = self.ratio_at(iteration)
        return [lr * ratio for lr in self.base_lr]

    def state_dict(self) -> dict[str, Any]:
        """Return the counter and the groups' own rates, which the groups do not contain any more."""
        return {**super().state_dict(), "base_lr": list(self.base_lr)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counter and the groups' own rates from ``state``."""
        base = state.get("base_lr")
        if base is not None and len(base) == len(self.base_lr):
            self.base_lr = [float(lr) for lr in base]
        super().load_state_dict(state)


class _Warmup:
    """The warm-up, which three schedules share."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ScheduleError(f"warmup_type: got {kind!r}, expected 'log' or 'linear'")
        # Programs that want no warm-up write 0. At least two steps are needed, because ln(1) is 0.
        self.steps = max(2, integer("warmup_num_steps", steps, minimum=0))
        self.kind = kind

    def at(self, iteration: int) -> float:
        if iteration >= self.steps:
            return 1.0
        # The reciprocal is computed first, so that DeepSpeed's sequences agree to the last bit (test_lr_trajectory.py).
        return (1.0 / math.log(self.steps)) * math.log(iteration + 1) if self.kind == "log" else iteration / self.steps


def _warn_if_short(name: str, total: int, warmup: _Warmup) -> None:
    if total < warmup.steps:
        logger.warning("%s: total_num_steps %d is less than warmup_num_steps %d", name, total, warmup.steps)
