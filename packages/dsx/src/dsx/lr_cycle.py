"""Schedules that explore: ``LRRangeTest`` (a rate that only grows) and ``OneCycle`` (up, down, decay)."""

from __future__ import annotations

import math

from .errors import ScheduleError
from .lr_base import HasParamGroups, LRSchedule, PerGroup, logger, number, whole

__all__ = ["LRRangeTest", "OneCycle"]


class LRRangeTest(LRSchedule):
    """A rate that only grows, to find where training stops converging.

    Args:
        optimizer: any object with ``param_groups``.
        lr_range_test_min_lr: rate at the start, one number or one per group.
        lr_range_test_step_size: steps per unit of growth.
        lr_range_test_step_rate: growth per unit, relative to the start.
        lr_range_test_staircase: grow once per unit instead of every step.
        last_batch_iteration: counter to resume from.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = whole("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            for group, lr in zip(optimizer.param_groups, self.min_lr, strict=True):
                group["lr"] = lr

    def lr_at(self, iteration: int) -> list[float]:
        """Return min * (1 + rate * x) per group."""
        interval = (iteration + 1) / self.step_size
        factor = 1.0 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * factor for lr in self.min_lr]


class OneCycle(LRSchedule):
    """One ramp up, one ramp down, then decay; momentum moves the other way.

    With b = it + 1, T = first + second and it < T, the position on the ramp is a = (b mod T) / first while that is at
    most 1, then (T - b mod T) / second; with a stair count n it is floor(n * a) / n. Rate: min + (max - min) * a.
    Momentum (``betas[0]``): max - (max - min) * a. After the cycle, with n = it - T + 1, the rate is
    min / (1 + decay_lr_rate * n / decay_step_size).

    Three things upstream does are not hidden here. ``betas[1]`` is set to ``cycle_beta2`` = 0.99, as its published
    sequences have it; that is logged once, and None leaves it alone. Upstream's momentum "decay" multiplies by
    1 + rate * n and passes 1 after a while, where Adam diverges; here the momentum is divided by it, like the rate, so
    it stays within (0, cycle_max_mom]. And momentum is cycled only for optimizers whose groups have ``betas``; others
    are told so in the log.

    Args:
        optimizer: any object with ``param_groups``.
        cycle_min_lr, cycle_max_lr: ends of the ramp, one number or one per group.
        decay_lr_rate: decay of the rate after the cycle; 0 is none.
        cycle_first_step_size, cycle_second_step_size: steps of the two halves; the second defaults to the first.
        cycle_first_stair_count, cycle_second_stair_count: stairs on the halves; 0 is a straight ramp.
        decay_step_size: steps per unit of decay; 0 is none.
        cycle_momentum: also cycle the momentum.
        cycle_min_mom, cycle_max_mom: ends of the momentum.
        decay_mom_rate: decay of the momentum after the cycle; 0 is none.
        last_batch_iteration: counter to resume from.
        cycle_beta2: value of ``betas[1]`` while momentum is cycled; None leaves it.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        cycle_beta2: float | None = 0.99,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lr = self._per_group("cycle_max_lr", cycle_max_lr)
        self.first = whole("cycle_first_step_size", cycle_first_step_size)
        self.second = (
            self.first if cycle_second_step_size is None else whole("cycle_second_step_size", cycle_second_step_size)
        )
        self.total = self.first + self.second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        self.min_mom, self.max_mom, self.beta2 = cycle_min_mom, cycle_max_mom, cycle_beta2
        self.momentum = cycle_momentum and self._prepare_momentum()
        if last_batch_iteration == -1:
            for group, lr in zip(optimizer.param_groups, self.min_lr, strict=True):
                group["lr"] = lr

    def _prepare_momentum(self) -> bool:
        if not 0.0 <= self.min_mom <= self.max_mom < 1.0:
            raise ScheduleError(
                f"cycle_min_mom {self.min_mom}, cycle_max_mom {self.max_mom}: expected 0 <= min <= max < 1"
            )
        if not all("betas" in group for group in self.optimizer.param_groups):
            logger.info("OneCycle: the optimizer's groups have no betas, so momentum is not cycled")
            return False
        replaced = sorted({group["betas"][1] for group in self.optimizer.param_groups} - {self.beta2})
        if self.beta2 is not None and replaced:
            logger.warning(
                "OneCycle sets betas[1] to %s (it was %s); pass cycle_beta2=None to keep it, or cycle_momentum=False to "
                "leave betas alone", self.beta2, ", ".join(map(str, replaced)),
            )  # fmt: skip
        return True

    def _position(self, iteration: int) -> float:
        """Return where on the ramp the counter stands: 0 at the ends of the cycle, 1 at its top."""
        done = (iteration + 1) % self.total
        if done <= self.first:
            return _stairs(done, self.first, self.first_stairs)
        return _stairs(self.total - done, self.second, self.second_stairs)

    def _decay(self, iteration: int, rate: float) -> float:
        """Return the divisor after the cycle; 1 within it."""
        if self.decay_step_size == 0:
            return 1.0
        return 1.0 + rate * (iteration - self.total + 1) / self.decay_step_size

    def lr_at(self, iteration: int) -> list[float]:
        """Return the rate of every group: on the ramp, or decayed after it."""
        if iteration < self.total:
            at = self._position(iteration)
            return [low + (high - low) * at for low, high in zip(self.min_lr, self.max_lr, strict=True)]
        divisor = self._decay(iteration, self.decay_lr_rate)
        return [low / divisor for low in self.min_lr]

    def mom_at(self, iteration: int) -> float:
        """Return the momentum at counter ``iteration``."""
        if iteration < self.total:
            return self.max_mom - (self.max_mom - self.min_mom) * self._position(iteration)
        return self.max_mom / self._decay(iteration, self.decay_mom_rate)

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas that stand in the groups; None when momentum is not cycled."""
        return [tuple(group["betas"]) for group in self.optimizer.param_groups] if self.momentum else None

    def _write(self, iteration: int) -> None:
        super()._write(iteration)
        if not self.momentum:
            return
        beta1 = self.mom_at(iteration)
        for group in self.optimizer.param_groups:
            group["betas"] = (beta1, group["betas"][1] if self.beta2 is None else self.beta2, *group["betas"][2:])


def _stairs(done: int, steps: int, count: int) -> float:
    """Return done / steps, rounded down to stairs; in whole numbers, so that a stair begins exactly at its step."""
    return (count * done // steps) / count if count > 0 else done / steps
