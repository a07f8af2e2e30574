"""Learning-rate schedules that users name in a configuration, with the formulas they are known by.

Every schedule is a pure function of one counter, ``last_batch_iteration``: -1 before the first ``step()``, 0 after it.
``step()`` sets ``lr`` (and momentum) in every parameter group, so anything with ``param_groups`` can be scheduled. A
single number for a per-group argument holds for all groups; a list gives one value per group.

The engine calls ``step()`` once when it is built and once after every applied update. Update k therefore runs with the
k-th value of the sequence (counted from 0), and exactly one update runs at the warm-up minimum.

Formulas, with ``it`` the counter:

* ``LRRangeTest``: min * (1 + rate * x), x = (it + 1) / step_size, rounded down with ``staircase``.
* ``OneCycle``: linear ramp min -> max -> min, then decay; see the class.
* ``WarmupLR``: min + (max - min) * g; g = ln(it + 1) / ln(W) or it / W while it < W, then 1.
* ``WarmupDecayLR``: the same warm-up, then g = max(0, (T - it) / max(1, T - W)).
* ``WarmupCosineLR``: a factor on each group's own rate; the warm-up from ``warmup_min_ratio``, then
  c + (1 - c) * (1 + cos(pi * min(1, (it - W + 1) / max(1, T - W)))) / 2 with c = ``cos_min_ratio``.

Nothing here imports torch. Command-line helpers are in ``lr_arguments`` and re-exported below.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from .errors import ScheduleError
from .lr_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupLR_params,
    parse_arguments,
)

__all__ = [
    "LRRangeTest", "LRSchedule", "OneCycle", "SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
    "add_tuning_arguments", "build_schedule", "get_config_from_args", "get_lr_from_config", "override_1cycle_params",
    "override_lr_range_test_params", "override_params", "override_warmupLR_params", "parse_arguments",
]  # fmt: skip

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
            return [_number(name, item) for item in value]
        return [_number(name, value)] * len(groups)


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
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
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
        self.first = _positive("cycle_first_step_size", cycle_first_step_size)
        self.second = (
            self.first
            if cycle_second_step_size is None
            else _positive("cycle_second_step_size", cycle_second_step_size)
        )
        self.total = self.first + self.second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
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


class WarmupLR(LRSchedule):
    """A rise from ``warmup_min_lr`` to ``warmup_max_lr``, then constant.

    Args:
        optimizer: any object with ``param_groups``.
        warmup_min_lr: rate at the first update, one number or one per group.
        warmup_max_lr: rate after the warm-up, one number or one per group; None takes the optimizer's own rate.
        warmup_num_steps: steps of the warm-up; at least 2 are taken.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: counter to resume from.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lr = self._per_group("warmup_max_lr", warmup_max_lr)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)

    def gamma_at(self, iteration: int) -> float:
        """Return how far from min to max the rate is, between 0 and 1."""
        return self.warmup.at(iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """Return min + (max - min) * gamma per group."""
        gamma = self.gamma_at(iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lr, self.max_lr, strict=True)]


class WarmupDecayLR(WarmupLR):
    """The rise of ``WarmupLR``, then a straight line down to ``warmup_min_lr`` at step ``total_num_steps``.

    Args:
        optimizer: any object with ``param_groups``.
        total_num_steps: steps of the whole run, warm-up included.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as in ``WarmupLR``.
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
    ) -> None:
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total = _total("WarmupDecayLR", total_num_steps, self.warmup)

    def gamma_at(self, iteration: int) -> float:
        """Return the warm-up's share, then the share that is left of the decay."""
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
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.total = _total("WarmupCosineLR", total_num_steps, self.warmup)
        self.min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.base_lr = self._per_group("lr", None)

    def ratio_at(self, iteration: int) -> float:
        """Return the factor at counter ``iteration``."""
        if iteration < self.warmup.steps:
            return self.min_ratio + (1.0 - self.min_ratio) * self.warmup.at(iteration)
        done = min(1.0, (iteration - self.warmup.steps + 1) / max(1, self.total - self.warmup.steps))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0

    def lr_at(self, iteration: int) -> list[float]:
        """Return factor * own rate per group."""
        ratio = self.ratio_at(iteration)
        return [lr * ratio for lr in self.base_lr]

    def state_dict(self) -> dict[str, Any]:
        """Return the counter and the groups' own rates, which the running groups no longer show."""
        return {**super().state_dict(), "base_lr": list(self.base_lr)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take counter and own rates from ``state``."""
        base = state.get("base_lr")
        if base is not None and len(base) == len(self.base_lr):
            self.base_lr = [float(lr) for lr in base]
        super().load_state_dict(state)


SCHEDULES: dict[str, type[LRSchedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}


def build_schedule(name: str, optimizer: Any, params: Mapping[str, Any] | None = None) -> Any:
    """Build a schedule by name: one of ours, or any class of ``torch.optim.lr_scheduler``.

    Args:
        name: class name; ours are found in any case.
        optimizer: what to schedule; torch's classes need a ``torch.optim.Optimizer``.
        params: arguments of the constructor.

    Raises:
        ScheduleError: for a name nobody knows, or arguments the class refuses.
    """
    ours = {known.lower(): schedule for known, schedule in SCHEDULES.items()}
    schedule: Any = ours.get(name.lower())
    if schedule is None:
        import torch.optim.lr_scheduler as torch_schedulers  # late: torch costs seconds and our schedules need none of it

        schedule = getattr(torch_schedulers, name, None)
        if not isinstance(schedule, type):
            raise ScheduleError(
                f"schedule {name!r} is unknown; expected {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler"
            )
    try:
        return schedule(optimizer, **dict(params or {}))
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"schedule {name}: {error}") from error


class _Warmup:
    """The rising part shared by three schedules."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ScheduleError(f"warmup_type: got {kind!r}, expected 'log' or 'linear'")
        self.steps = max(2, int(_number("warmup_num_steps", steps)))
        self.kind = kind

    def at(self, iteration: int) -> float:
        if iteration >= self.steps:
            return 1.0
        return math.log(iteration + 1) / math.log(self.steps) if self.kind == "log" else iteration / self.steps


def _stairs(done: int, steps: int, count: int) -> float:
    """Return done / steps, rounded down to stairs; in whole numbers, so that a stair begins exactly at its step."""
    return (count * done // steps) / count if count > 0 else done / steps


def _total(name: str, total: int, warmup: _Warmup) -> int:
    total = _positive("total_num_steps", total)
    if total < warmup.steps:
        logger.warning("%s: total_num_steps %d is less than warmup_num_steps %d", name, total, warmup.steps)
    return total


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ScheduleError(f"{name}: got {value!r}, expected a number")
    return float(value)


def _positive(name: str, value: Any) -> int:
    number = _number(name, value)
    if number < 1 or not number.is_integer():
        raise ScheduleError(f"{name}: got {value!r}, expected a whole number of at least 1")
    return int(number)


def sequence(schedule: LRSchedule) -> Iterator[list[float]]:
    """Step ``schedule`` forever and yield the rates after each step; for plots and tests."""
    while True:
        schedule.step()
        yield schedule.get_last_lr()
