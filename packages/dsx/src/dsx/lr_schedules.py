"""Learning-rate schedules that a configuration can name, with their published formulas.

Every schedule is a pure function of one counter, ``last_batch_iteration``: -1 before the first ``step()``, 0 after it.
``step()`` sets ``lr`` (and momentum) in every parameter group, so any object with ``param_groups`` can be scheduled. A
rate that is a tensor stays the same tensor. For a per-group argument, a single number is used for all groups, and a
list gives one value per group.

A schedule writes its starting value when it is built: the minimum (``WarmupCosineLR``: 0). ``step()`` is called after
every applied update, by the engine or by the user's loop. So the first update runs at the starting value, and update
k > 0 runs with the value at counter k - 1: two updates run at the warm-up minimum. This is DeepSpeed's trajectory, to
the last bit (tests/test_lr_trajectory.py). ``start_at_first_value=True`` leaves out the repeated start: then update k
runs with the value at counter k.

Formulas, with ``it`` the counter:

* ``LRRangeTest``: min * (1 + rate * x), x = (it + 1) / step_size, rounded down with ``staircase``.
* ``OneCycle``: linear ramp min -> max -> min, then decay; see the class.
* ``WarmupLR``: min + (max - min) * g; g = ln(it + 1) / ln(W) or it / W while it < W, then 1.
* ``WarmupDecayLR``: the same warm-up, then g = max(0, (T - it) / max(1, T - W)).
* ``WarmupCosineLR``: a factor on each group's own rate; the warm-up from ``warmup_min_ratio``, then
  c + (1 - c) * (1 + cos(pi * min(1, (it - W + 1) / max(1, T - W)))) / 2 with c = ``cos_min_ratio``.

Nothing here imports torch. DeepSpeed's command-line helpers are in ``dsx_compat.lr_arguments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .deepspeed_names import finder
from .errors import ScheduleError
from .lr_base import LRSchedule
from .lr_cycle import LRRangeTest, OneCycle
from .lr_warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES", "LRRangeTest", "LRSchedule", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
    "build_schedule",
]  # fmt: skip

if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name
    __getattr__ = finder(__name__)

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
        name: class name, in any case.
        optimizer: the optimizer to schedule; torch's classes need a ``torch.optim.Optimizer``.
        params: arguments of the constructor.

    Raises:
        ScheduleError: the name is unknown, or the class refuses the arguments.
    """
    ours = {known.lower(): schedule for known, schedule in SCHEDULES.items()}
    schedule: Any = ours.get(name.lower())
    if schedule is None:
        # lazy import: torch costs seconds, and our schedules do not need it
        import torch.optim.lr_scheduler as torch_schedulers

        spelled = {known.lower(): known for known in vars(torch_schedulers) if known[0].isupper()}
        schedule = getattr(torch_schedulers, spelled.get(name.lower(), name), None)
        if not isinstance(schedule, type):
            raise ScheduleError(
                f"schedule {name!r} is unknown; expected {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler"
            )
    try:
        return schedule(optimizer, **dict(params or {}))
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"schedule {name}: {error}") from error
