"""The part of a checkpoint that is not tensors: counters, rates, schedule, loss scale, precision and data position.

`TrainingState` is the record: taken from the engine's parts, written as it is, and checked key by key when it is read,
    so that nothing unknown and nothing of another kind reaches the parts. `Undo` takes changes of parts back, for a
    load that fails half way.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .report import Counters

_FIRST_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""The counters that every checkpoint has. Counters that later versions add are 0 if they are missing."""
_LATER = ("parts", "objects", "config", "versions", "layout")
"""Keys that the first checkpoints did not have."""


@dataclass(frozen=True)
class TrainingState:
    """The training state. Nothing in it depends on a rank.

    Attributes:
        counters: names and values of `Counters`.
        param_groups: the numbers of each parameter group, see `hyperparameters.py`.
        precision: the precision record as text.
        lr_scheduler: state of the schedule; empty without one.
        loss_scaler: state of the loss scale.
        data: position of the training loader; empty if there is no loader that knows its position.
        parts: states of other parts by name, such as the compression schedule; older checkpoints have none.
        objects: states of the objects that the caller registered, by name.
        config: the configuration that the checkpoint was saved with, for people and tools.
        versions: the versions of dsx, torch and Python.
        layout: number of ranks, ZeRO stage, and where each class of state was (`placement`); for people and tools.
    """

    counters: dict[str, int]
    param_groups: list[dict[str, Any]]
    precision: dict[str, Any]
    lr_scheduler: dict[str, Any]
    loss_scaler: dict[str, Any]
    data: dict[str, Any]
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, Any] = dataclasses.field(default_factory=dict)
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Keys and values as they are written."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @staticmethod
    def from_dict(state: Any) -> TrainingState:
        """Make the record from what was read. Raises `ValueError` that names a wrong key."""
        names = [field.name for field in dataclasses.fields(TrainingState)]
        _expect_keys("the training state", state, required=[n for n in names if n not in _LATER], known=names)
        _check_counters(state["counters"])
        for number, group in enumerate(_expect("param_groups", state["param_groups"], list)):
            for name, value in _expect(f"param_groups[{number}]", group, dict).items():
                numbers = value if isinstance(value, tuple) else (value,)
                if any(isinstance(item, bool) or not isinstance(item, (int, float, tuple)) for item in numbers):
                    raise ValueError(f"param_groups[{number}].{name}: got {value!r}, expected numbers")
        for name in ("precision", "lr_scheduler", "data", *_LATER):
            _expect(name, state.get(name, {}), dict)
        _check_scaler(_expect("loss_scaler", state["loss_scaler"], dict))
        return TrainingState(**state)


def _check_counters(counters: Any) -> None:
    known = [field.name for field in dataclasses.fields(Counters)]
    _expect_keys("counters", counters, required=_FIRST_COUNTERS, known=known)
    for name, value in counters.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"counters.{name}: got {value!r}, expected an integer of 0 or more")


def _check_scaler(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "kind" and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"loss_scaler.{name}: got {value!r}, expected a finite number")
    if "scale" in state and not state["scale"] > 0:
        raise ValueError(f"loss_scaler.scale: got {state['scale']!r}, expected more than 0")


def _expect(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def _expect_keys(what: str, state: Any, *, required: Any, known: Any) -> None:
    _expect(what, state, dict)
    missing, unknown = sorted(set(required) - set(state)), sorted(map(str, set(state) - set(known)))
    if missing or unknown:
        hint = "; a newer dsx may have written it" if unknown else ""
        raise ValueError(f"{what}: missing {missing}, unknown {unknown[:10]}{hint}")


class Undo:
    """A stack of undo functions. `with undo:` calls all of them, the last one first, if an exception leaves the
    block.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []

    def restore_state_of(self, part: Any) -> None:
        """On undo, restore the present state of `part`, which has `state_dict` and `load_state_dict`."""
        state = copy.deepcopy(part.state_dict())
        self.add(lambda: part.load_state_dict(state))

    def add(self, step: Callable[[], Any]) -> None:
        """On undo, call `step`."""
        self._steps.append(step)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        while kind is not None and self._steps:
            self._steps.pop()()
