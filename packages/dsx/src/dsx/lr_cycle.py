"""Schedules that explore: ``LRRangeTest`` (a rate that only grows) and ``OneCycle`` (up, down, decay)."""

from __future__ import annotations

import math

from .errors import ScheduleError
from .lr_base import HasParamGroups, LRSchedule, PerGroup, integer, logger, number

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
        start_at_first_value: begin at counter 0, one step above the minimum.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
        start_at_first_value: bool = False,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = integer("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        self._begin(start_at_first_value)

    def lr_at(self, iteration: int) -> list[float]:
        """Return min * (1 + rate * x) per group."""
        interval = (iteration + 1) / self.step_size
        factor = 1.0 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * factor for lr in self.min_lr]


class OneCycle(LRSchedule):
    """One ramp up, one ramp down, then decay; momentum moves the other way (Smith 2018, arXiv 1803.09820).

    With b = it + 1, T = first + second and it < T, the position in the cycle is x = b / T - floor(b / T). On the first
    half a = x / (first / T), on the second a = (x - 1) / (first / T - 1). With a stair count n, a is
    floor(n * (b mod T) / first) / n or floor(n * (T - b mod T) / second) / n. Rate: min + (max - min) * a.
    Momentum (``betas[0]``): max - (max - min) * a. After the cycle, with n = it - T + 1, the rate is
    min / (1 + decay_lr_rate * n / decay_step_size). Before the first step the rate and the momentum are at their
    minimum.

    Two points differ from DeepSpeed's schedule. ``betas[1]`` keeps the user's value; DeepSpeed sets it to 0.99, and
    ``cycle_beta2=0.99`` does so here. DeepSpeed's momentum "decay" multiplies by 1 + rate * n, so that the momentum
    passes 1 after a while and Adam diverges. Here the momentum is divided by this factor, like the rate, so that it
    stays within (0, cycle_max_mom]. Momentum is cycled only for optimizers whose groups have ``betas``; otherwise a log
    line says that it is not.

    Args:
        optimizer: any object with ``param_groups``.
        cycle_min_lr, cycle_max_lr: ends of the ramp, one number or one per group.
        decay_lr_rate: decay of the rate after the cycle; 0 is none.
        cycle_first_step_size, cycle_second_step_size: steps of the two halves; the second defaults to the first, and
            with 0 the rate falls from the top to the minimum in one step.
        cycle_first_stair_count, cycle_second_stair_count: stairs on the halves; 0 is a straight ramp.
        decay_step_size: steps per unit of decay; 0 is none.
        cycle_momentum: also cycle the momentum.
        cycle_min_mom, cycle_max_mom: ends of the momentum, one number or one per group.
        decay_mom_rate: decay of the momentum after the cycle; 0 is none.
        last_batch_iteration: counter to resume from.
        cycle_beta2: value of ``betas[1]`` while momentum is cycled; None: unchanged.
        start_at_first_value: begin at counter 0, one step up the ramp.
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
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        cycle_beta2: float | None = None,
        start_at_first_value: bool = False,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lr = self._per_group("cycle_max_lr", cycle_max_lr)
        self.first = integer("cycle_first_step_size", cycle_first_step_size)
        self.second = (
            self.first
            if cycle_second_step_size is None
            else integer("cycle_second_step_size", cycle_second_step_size, minimum=0)
        )
        self.total = self.first + self.second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        self.min_mom = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_mom = self._per_group("cycle_max_mom", cycle_max_mom)
        self.beta2 = cycle_beta2
        self.momentum = cycle_momentum and self._has_momentum()
        self._begin(start_at_first_value)

    def _has_momentum(self) -> bool:
        if not all(0.0 <= low <= high < 1.0 for low, high in zip(self.min_mom, self.max_mom, strict=True)):
            raise ScheduleError(
                f"cycle_min_mom {self.min_mom}, cycle_max_mom {self.max_mom}: expected 0 <= min <= max < 1"
            )
        if not all("betas" in group for group in self.optimizer.param_groups):
            logger.info("OneCycle: the optimizer's groups have no betas, so momentum is not cycled")
            return False
        return True

    def _position(self, iteration: int) -> float:
        """Return the position of the counter on the ramp: 0 at the ends of the cycle, 1 at its top."""
        done = (iteration + 1) % self.total
        stairs = self.first_stairs if done <= self.first else self.second_stairs
        if stairs > 0:
            # In integers, so that a stair begins exactly at its step.
            up = stairs * done // self.first if done <= self.first else stairs * (self.total - done) // self.second
            return up / stairs
        # The order of these operations is DeepSpeed's, so that rates agree to the last bit (test_lr_trajectory.py).
        cycles = (iteration + 1) / self.total
        x = 1.0 + cycles - math.floor(1 + cycles)
        ratio = self.first / self.total
        return x / ratio if x <= ratio else (x - 1) / (ratio - 1)

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

    def mom_at(self, iteration: int) -> list[float]:
        """Return the momentum of every group at counter ``iteration``; the minimum before the first step."""
        if iteration < 0:
            return list(self.min_mom)
        if iteration < self.total:
            at = self._position(iteration)
            return [high - (high - low) * at for low, high in zip(self.min_mom, self.max_mom, strict=True)]
        return [high / self._decay(iteration, self.decay_mom_rate) for high in self.max_mom]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of the groups; None if momentum is not cycled."""
        return [tuple(group["betas"]) for group in self.optimizer.param_groups] if self.momentum else None

    def _write(self, iteration: int) -> None:
        super()._write(iteration)
        if not self.momentum:
            return
        for group, beta1 in zip(self.optimizer.param_groups, self.mom_at(iteration)):
            group["betas"] = (beta1, group["betas"][1] if self.beta2 is None else self.beta2, *group["betas"][2:])
