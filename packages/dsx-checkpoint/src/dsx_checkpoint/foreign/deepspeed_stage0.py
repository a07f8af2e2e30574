"""Optimizer states of DeepSpeed's stage 0: states in the order of the optimizer's parameters, without names.

| precision | form |
|---|---|
| fp32 | the `state_dict` of torch's optimizer |
| 16 bits, fused optimizers | a flat row of masters per parameter group, `fp32_groups_flat`, and states as long |
| 16 bits, other optimizers | masters one by one, `fp32_groups`, and a `state_dict` as in fp32 |

Within a group, parameters have the order of the model. With one group, this identifies each parameter. With several
groups, nothing says which group a parameter belongs to. Then all ways to distribute the model's parameters among the
groups, in order, are compared by shape and, if there are masters, by value. If exactly one way is left, it is used;
otherwise the optimizer starts new, with a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import CheckpointCorruptError, shown
from .source import Tensor

__all__ = ["Unnamed", "read_unnamed"]

_MOST_WAYS = 4096  # partial ways that are followed at a time; with more, the shapes do not tell the parameters apart
States = dict[str, "Tensor | int | float"]


@dataclass
class Unnamed:
    """The masters and states by parameter."""

    masters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, States] = field(default_factory=dict)


class _Group(Protocol):
    """The states of a parameter group, which are read one parameter after the other. Positions count from 0.

    Attributes:
        length: the position after the last parameter.
        of_experts: whether its parameters are those of experts; None: not known.
    """

    length: int
    of_experts: bool | None

    def behind(self, at: int, parameter: Tensor) -> int | None:
        """The position after a parameter at position `at`; None if this parameter cannot be there."""
        ...

    def take(self, at: int, parameter: Tensor) -> tuple[Tensor | None, States]:
        """The master and the states of the parameter."""
        ...


def read_unnamed(
    saved: Any, names: Sequence[str], parameters: Mapping[str, Tensor], experts: Collection[str] = ()
) -> Unnamed | None:
    """Masters and states of the parameters `names`, which are in the model's order.

    Args:
        experts: the names that are parameters of experts.

    Returns:
        None if the form is not known, or does not tell which state belongs to which parameter.

    Raises:
        CheckpointCorruptError: the states contradict themselves.
    """
    groups = _groups_of(saved)
    way = None if groups is None else _only_way(groups, names, parameters, experts)
    if groups is None or way is None:
        return None
    found = Unnamed()
    for name, (number, at) in zip(names, way):
        master, states = groups[number].take(at, parameters[name])
        if master is not None:
            found.masters[name] = master
        if states:
            found.states[name] = states
    return found


def _groups_of(saved: Any) -> Sequence[_Group] | None:
    if not isinstance(saved, dict):
        return None
    inner = saved.get("optimizer_state_dict", saved)
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict) or "param_groups" not in inner:
        return None
    numbers = [list(group.get("params", ())) for group in inner["param_groups"]]
    marks = [bool(group.get("moe")) for group in inner["param_groups"]]
    of_experts = marks if any(marks) else [None] * len(marks)
    flats, singles = saved.get("fp32_groups_flat"), saved.get("fp32_groups")
    if flats is not None:
        if len(flats) != len(numbers):
            raise CheckpointCorruptError(f"fp32_groups_flat: got {len(flats)} rows for {len(numbers)} parameter groups")
        states = [inner["state"].get(n[0] if n else None, {}) for n in numbers]
        return [_Row(*each) for each in zip(flats, states, of_experts)]
    if singles is not None and [len(group) for group in singles] != [len(n) for n in numbers]:
        raise CheckpointCorruptError("fp32_groups: the masters are not those of the parameter groups")
    masters = singles or [[None] * len(n) for n in numbers]
    return [
        _OneByOne([(inner["state"].get(i, {}), m) for i, m in zip(n, ms)], mark)
        for n, ms, mark in zip(numbers, masters, of_experts)
    ]


class _OneByOne:
    """States parameter by parameter."""

    def __init__(
        self, entries: Sequence[tuple[Mapping[str, Any], torch.Tensor | None]], of_experts: bool | None
    ) -> None:
        self._entries, self.of_experts = entries, of_experts
        self.length = len(entries)

    def behind(self, at: int, parameter: Tensor) -> int | None:
        """See `_Group`."""
        if at >= self.length:
            return None
        states, master = self._entries[at]
        shapes = {tuple(v.shape) for v in states.values() if isinstance(v, torch.Tensor) and v.numel() > 1}
        fits = shapes <= {parameter.shape} and (master is None or _is_master(master, parameter))
        return at + 1 if fits else None

    def take(self, at: int, parameter: Tensor) -> tuple[Tensor | None, States]:
        """See `_Group`."""
        states, master = self._entries[at]
        return None if master is None else Tensor.of(master), {key: _state(v, parameter) for key, v in states.items()}


class _Row:
    """One flat row for all parameters of the group."""

    def __init__(self, masters: torch.Tensor, states: Mapping[str, Any], of_experts: bool | None) -> None:
        self._masters, self._states, self.of_experts = masters.detach().reshape(-1), states, of_experts
        self.length = self._masters.numel()
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.numel() not in (1, self.length):
                raise CheckpointCorruptError(
                    f"the optimizer state {shown(key)} has {value.numel()} elements for a row of {self.length}"
                )

    def behind(self, at: int, parameter: Tensor) -> int | None:
        """See `_Group`."""
        stop = at + torch.Size(parameter.shape).numel()
        if stop > self.length:
            return None
        return stop if _is_master(self._masters[at:stop].view(parameter.shape), parameter) else None

    def take(self, at: int, parameter: Tensor) -> tuple[Tensor | None, States]:
        """See `_Group`."""
        stop = at + torch.Size(parameter.shape).numel()

        def cut(value: Any) -> Any:
            rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == self.length
            return value.reshape(-1)[at:stop].view(parameter.shape) if rows else value

        states = {key: _state(cut(value), parameter) for key, value in self._states.items()}
        return Tensor.of(self._masters[at:stop].view(parameter.shape)), states


def _is_master(master: torch.Tensor, parameter: Tensor) -> bool:
    """Whether a parameter is this master in the parameter's dtype."""
    return tuple(master.shape) == parameter.shape and torch.equal(
        master.detach().to(parameter.dtype), parameter.fetch()
    )


def _state(value: Any, parameter: Tensor) -> Any:
    whole = isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == parameter.shape
    return Tensor.of(value) if whole else value.item() if isinstance(value, torch.Tensor) else value


def _only_way(
    groups: Sequence[_Group], names: Sequence[str], parameters: Mapping[str, Tensor], experts: Collection[str]
) -> list[tuple[int, int]] | None:
    """Group and position of each name, if there is exactly one way to distribute the names that uses all states."""
    # Positions in all groups -> how many ways lead there (2: several), and the last one's group, position and origin.
    ways: dict[tuple[int, ...], tuple[int, Any]] = {tuple(0 for _ in groups): (1, None)}
    for name in names:
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for positions, (count, path) in ways.items():
            for number, group in enumerate(groups):
                other = group.of_experts is not None and group.of_experts != (name in experts)
                behind = None if other else group.behind(positions[number], parameters[name])
                if behind is None:
                    continue
                after = (*positions[:number], behind, *positions[number + 1 :])
                known = following.get(after, (0, None))[0]
                following[after] = (min(2, known + count), (number, positions[number], path))
        ways = following
        if not 0 < len(ways) <= _MOST_WAYS:
            return None
    count, path = ways.get(tuple(group.length for group in groups), (0, None))
    if count != 1:
        return None
    found: list[tuple[int, int]] = []
    while path is not None:
        number, at, path = path
        found.append((number, at))
    return found[::-1]
