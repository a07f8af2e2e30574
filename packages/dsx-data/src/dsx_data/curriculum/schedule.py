"""Difficulty as a function of the step.

With t the step (1 is the first), T `total_curriculum_step` and s `difficulty_step`:

    fixed_linear    d = floor(t/T * (max - min) + min)
    fixed_root      d = floor((t/T)^(1/root_degree) * (max - min) + min)
                    both: d -= d mod s, then at most max and at least min
    fixed_discrete  difficulty[i] of the first i with t <= max_step[i]; the last one after that
    custom          what the caller's function returns

Once the difficulty has reached max it stays there. These are the published formulas of DeepSpeed with one difference:
DeepSpeed's difficulty falls below `min_difficulty` if that is no multiple of s; here it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import DataArgumentError

__all__ = ["CurriculumScheduler"]

_TYPES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


class CurriculumScheduler:
    """The difficulty of each step.

    Args:
        config: a mapping, or an object with attributes: `min_difficulty`, `max_difficulty`, `schedule_type`, and
            `schedule_config` with the numbers of the formulas.
        name: name of this schedule in error messages.

    Raises:
        DataArgumentError: a number is missing or contradicts another one.
    """

    def __init__(self, config: Any, *, name: str = "curriculum") -> None:
        self.name = name
        self.minimum = self._number(config, "min_difficulty")
        self.maximum = self._number(config, "max_difficulty")
        self.schedule_type: str = _get(config, "schedule_type")
        if self.minimum > self.maximum:
            raise self._error("max_difficulty", self.maximum, f"at least min_difficulty, {self.minimum}")
        if self.schedule_type not in _TYPES:
            raise self._error("schedule_type", self.schedule_type, f"one of {', '.join(_TYPES)}")
        self._custom: Callable[[int], int] | None = None
        self._formula = self._build(_get(config, "schedule_config"))
        self.current = self.minimum

    def get_current_difficulty(self) -> int:
        """The difficulty of the latest `update_difficulty`; `min_difficulty` before the first."""
        return self.current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the difficulty; the next update uses the schedule again."""
        self.current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a "custom" schedule, from step (1 is the first) to difficulty.

        Raises:
            DataArgumentError: the schedule is not a custom one, or the argument is not a function.
        """
        if self.schedule_type != "custom":
            raise DataArgumentError(
                f"{self.name}: got a custom schedule, but its schedule_type is {self.schedule_type!r}; set it to"
                ' "custom"'
            )
        if not callable(schedule_function):
            raise DataArgumentError(f"{self.name}: got {schedule_function!r}, expected a function from step to number")
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of the schedule at a step. The current difficulty neither matters nor changes."""
        return self._formula(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Set the current difficulty to that of a step and return it. Once it is at the maximum it stays there."""
        if self.current < self.maximum:
            self.current = self._formula(global_steps)
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """The current difficulty."""
        return {"current_difficulty": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved difficulty."""
        self.current = int(state["current_difficulty"])

    get_state = state_dict
    set_state = load_state_dict

    def _build(self, numbers: Any) -> Callable[[int], int]:
        if self.schedule_type == "custom":
            return self._ask_custom
        if self.schedule_type == "fixed_discrete":
            return self._discrete(_get(numbers, "difficulty"), _get(numbers, "max_step"))
        total = self._number(numbers, "total_curriculum_step", least=1, within="schedule_config.")
        step = self._number(numbers, "difficulty_step", least=1, within="schedule_config.")
        degree = self._degree(_get(numbers, "root_degree")) if self.schedule_type == "fixed_root" else 1.0
        return lambda t: self._root(t, total, step, degree)

    def _degree(self, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self._error("schedule_config.root_degree", value, "a number above 0")
        return float(value)

    def _root(self, t: int, total: int, step: int, degree: float) -> int:
        share = (t / total) ** (1.0 / degree)
        found = math.floor(share * (self.maximum - self.minimum) + self.minimum)
        return max(self.minimum, min(found - found % step, self.maximum))

    def _discrete(self, difficulties: Any, steps: Any) -> Callable[[int], int]:
        if not difficulties:
            raise self._error("schedule_config.difficulty", difficulties, "a list of difficulties")
        if steps is None or len(steps) != len(difficulties) - 1:
            raise self._error(
                "schedule_config.max_step",
                steps,
                f"a list of {len(difficulties) - 1} steps, one less than difficulties",
            )
        if list(steps) != sorted(set(steps)):
            raise self._error("schedule_config.max_step", steps, "increasing steps")

        def at(t: int) -> int:
            for difficulty, last in zip(difficulties, steps):
                if t <= last:
                    return difficulty
            return difficulties[-1]

        return at

    def _ask_custom(self, t: int) -> int:
        if self._custom is None:
            raise DataArgumentError(
                f'{self.name}: its schedule_type is "custom" and no function was given; call'
                " set_custom_curriculum_learning_schedule (or set_custom_get_difficulty) before training"
            )
        return int(self._custom(t))

    def _number(self, config: Any, key: str, least: int = 0, within: str = "") -> int:
        value = _get(config, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._error(within + key, value, f"a whole number of at least {least}")
        return value

    def _error(self, key: str, got: Any, expected: str) -> DataArgumentError:
        return DataArgumentError(f"{self.name}.{key}: got {got!r}, expected {expected}")


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
