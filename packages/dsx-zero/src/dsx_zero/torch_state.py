"""The state of a sharded model and its optimizer in the form of torch's functions for state dicts.

`torch.distributed.checkpoint.state_dict` (`get_model_state_dict`, `get_optimizer_state_dict`, `set_...`) and
`torch.distributed.checkpoint.save`, `async_save` and `load` call `state_dict()` and `load_state_dict()` of the objects
they are given. Here stands what those calls get: states by parameter as of a plain optimizer, each tensor either whole
(`full_state_dict=True`) or a `ShardView` of what this rank has. So a folder of FSDP2 loads into dsx-zero, and back.

Where masters have another dtype than the parameters, they are a state, too: `master_param`. Without it masters take the
parameters' values.

States with a shape of their own are views of a tensor of this shape. What lists and objects hold are states of their
own, "GG.0" and "GG.1": torch's checkpoints call the entries of a plain optimizer's list so, too.

An optimizer that has made no step gives the states that a step without gradients would make: there has to be something
that a checkpoint can be read into. They are the optimizer's own only after `load_state_dict`.

Left out: experts and tensor slices without a DTensor, which no name says enough of; the checkpoints of an engine have
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch

from .alike import hash_of
from .errors import ZeroStateError
from .params.partitioned import PartitionedParameter
from .params.shard_view import Part, ShardView
from .params.whole import joining
from .plan.layout import LocalSlice
from .state.shapes import ShapedKind, ShapedState, held_of_state, joining_ranges, keeps_shaped, range_of
from .state.templates import StateTemplates
from .step.masters import Master
from .step.states import Form, OptimizerStates, forms_of, without_containers

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer
    from .state.slices import ParamSlice

__all__ = [
    "MASTER",
    "Number",
    "PartsReader",
    "asked_by_torch",
    "fresh_states",
    "in_shape_of_parameter",
    "model_parts",
    "numbered_groups",
    "optimizer_parts",
]

MASTER = "master_param"
"""The state that holds the master of a parameter, where it has another dtype."""

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_CHECKPOINTS = (
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
)


@dataclass(frozen=True)
class Number:
    """A state of one element, in its own shape; a tensor of one element may also be a part of a state per element."""

    tensor: torch.Tensor


def in_shape_of_parameter(master: Master, value: torch.Tensor) -> torch.Tensor:
    """A state that has the shape of the master in that of the parameter: masters of numbers have one dimension."""
    logical = master.group.layout.shapes[master.group.layout.index(master.name)]
    return value.reshape(logical) if value.shape == master.shape and value.numel() == 1 == prod(logical) else value


def asked_by_torch() -> Literal["whole", "parts"] | None:
    """The form that the caller wants: "whole" tensors inside a function of torch's `state_dict` module that was given
    `full_state_dict=True`; "parts" inside its other functions and inside those that save and load; None elsewhere.

    torch has no hook for this, and an optimizer's `state_dict()` has no arguments.
    """
    files = {
        module.__file__: name for name in (_STATE_DICT, *_CHECKPOINTS) if (module := sys.modules.get(name)) is not None
    }
    frame = sys._getframe(1) if files else None
    while frame is not None:
        name = files.get(frame.f_code.co_filename)
        if name in _CHECKPOINTS:
            return "parts"
        if name is not None and "info" in frame.f_locals:
            return "whole" if getattr(frame.f_locals["info"], "full_state_dict", False) else "parts"
        frame = frame.f_back
    return None


def model_parts(values: dict[str, Any]) -> None:
    """Replace the partitioned parameters of a model's state dict by views of what this rank has."""
    made: dict[int, ShardView | None] = {}
    for name, value in values.items():
        if isinstance(value, PartitionedParameter):
            key = id(value.source)
            if key not in made:
                made[key] = value.source.shard_view()
            found = made[key]
            values[name] = value if found is None else found


def _view(
    optimizer: ZeroOptimizer, name: str, part: LocalSlice, values: torch.Tensor, *, own: bool = False
) -> torch.Tensor:
    """A tensor over this rank's elements: a `ShardView`, or a plain one where every rank has all elements."""
    group = optimizer.layout.group_of(name)
    shape, of = group.layout.shapes[group.layout.index(name)], group.global_of(name)
    if optimizer.runtime.stage == 0:
        return values.view(shape) if of is None else of.shown(values.view(shape))
    whole = joining(group.layout, name, group.ranks, values.dtype, group.key.device, of)
    mine = id(optimizer.runtime) if own else None
    return ShardView(values, Part.of_range(shape, part.start, part.stop, of), whole=whole, mine=mine)


def _shaped_view(optimizer: ZeroOptimizer, name: str, kind: ShapedKind, mine: Any, *, own: bool) -> torch.Tensor:
    """The same for a state with a shape of its own. `mine`: this rank's `ShapedState`, if it has one."""
    group, stage = optimizer.layout.group_of(name), optimizer.runtime.stage
    values = torch.empty(0, dtype=kind.dtype, device=group.key.device)
    start, values = (mine.start, mine.values) if isinstance(mine, ShapedState) else (0, values)
    if stage == 0 and values.numel() == prod(kind.shape):
        return values.view(kind.shape)
    part = Part.of_range(kind.shape, start, start + values.numel())
    whole = joining_ranges(group, kind, start, stage=stage)
    return ShardView(values, part, whole=whole, mine=id(optimizer.runtime) if own else None)


# The optimizer --------------------------------------------------------------------------------------------------------


def optimizer_parts(
    optimizer: ZeroOptimizer,
    numbers: Mapping[str, int],
    kinds: Mapping[str, Mapping[str, Any]],
    own_of: Callable[[ParamSlice], Mapping[str, Any]],
    fresh: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The optimizer's states as this rank has them: `{"state": {number: ...}, "param_groups": [...]}`.

    Args:
        numbers: of the parameters in the optimizer's groups, by name.
        kinds: the states of each parameter that some rank has: see `full_state.kinds_of_states`.
        own_of: gives this rank's states of a parameter: see `full_state.own_of`.
        fresh: what `fresh_states` gave, to be shown in the place of the optimizer's own; None: it has states.
    """
    state: dict[int, dict[str, Any]] = {}
    for part in optimizer.slices(held=True):
        if part.name not in numbers or not part.trainable:
            continue
        group, place = optimizer.layout.group_of(part.name), LocalSlice(part.start, part.stop, 0)
        mine = own_of(part) if fresh is None else fresh[part.name]
        found: dict[str, Any] = {}
        for key, kind in kinds[part.name].items():
            if isinstance(kind, Form):
                found |= kind.constants
                continue
            value = mine.get(key, kind)
            if isinstance(kind, ShapedKind):
                value = _shaped_view(optimizer, part.name, kind, value, own=fresh is None)
            elif isinstance(kind, torch.dtype):
                if value is kind:  # this rank has none of its elements
                    value = torch.empty(0, dtype=kind, device=group.key.device)
                value = _view(optimizer, part.name, place, value, own=fresh is None)
            found[key] = value.tensor if isinstance(value, Number) else value
        if group.master_dtype != group.key.dtype and part.master is not None:
            found[MASTER] = _view(optimizer, part.name, place, part.master, own=True)
        if found:
            state[numbers[part.name]] = found
    return {"state": state, "param_groups": numbered_groups(optimizer)}


def fresh_states(optimizer: ZeroOptimizer) -> dict[str, dict[str, Any]]:
    """For an optimizer that has made no step: this rank's part of the states that a step without gradients would make,
    1-D or `ShapedState`, by the names of parameters and states.
    """
    templates, found = StateTemplates(optimizer.inner), dict[str, dict[str, Any]]()
    with optimizer.held.parts.groups.masters():
        for info in optimizer.runtime.infos:
            if info.trainable:
                pieces = [(m, templates.of(m)) for m in optimizer.layout.masters_of(info.name)]
                found[info.name] = _fresh(optimizer.states, pieces)
    return found


def _fresh(states: OptimizerStates, pieces: Sequence[tuple[Master, Mapping[str, Any]]]) -> dict[str, Any]:
    rows: dict[str, list[torch.Tensor]] = {}
    shaped: dict[str, ShapedState] = {}
    singles: dict[str, Any] = {}
    for master, kinds in pieces:
        singles |= forms_of(kinds)
        for key, kind in without_containers(kinds).items():
            if (held := held_of_state(states, master, key, kind)) is not None:
                dtype = kind.dtype if isinstance(kind, torch.Tensor) else master.tensor.dtype
                values = torch.zeros(prod(held.form), dtype=dtype, device=master.tensor.device)
                before = shaped.get(key)
                start, values = (before.start, torch.cat([before.values, values])) if before else (held.start, values)
                shaped[key] = ShapedState(key, held.shape, start, values, held.joins_slices)
            elif isinstance(kind, torch.Tensor) and kind.numel() > 1:
                rows.setdefault(key, []).append(kind.reshape(-1)[:1].expand(master.numel).clone())
            else:
                number = isinstance(kind, torch.Tensor)
                singles[key] = Number(in_shape_of_parameter(master, kind.detach().clone())) if number else kind
    return singles | {key: torch.cat(values) for key, values in rows.items()} | shaped


def numbered_groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The settings of the parameter groups, with numbers in the place of parameters, as of a plain optimizer."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(range(start, start + count))})
        start += count
    return groups


class PartsReader:
    """Gives ranges of states in torch's form (see `Reader`): views of this rank's own part, or whole tensors.

    Args:
        optimizer: whose states they are to be.
        state_dict: `{"state": ..., "param_groups": ...}`, states by the names or by the numbers of parameters.
        numbers: of the parameters in the optimizer's groups, by name.

    Raises:
        ZeroStateError: the state dict is of another form, or of other parameters.
    """

    def __init__(self, optimizer: ZeroOptimizer, state_dict: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        self._runtime = optimizer.runtime
        self._tensors = {i.name: optimizer.layout.group_of(i.name).global_of(i.name) for i in optimizer.runtime.infos}
        self._shapes = {i.name: optimizer.layout.group_of(i.name).global_shape(i.name) for i in optimizer.runtime.infos}
        self.groups: list[dict[str, Any]] = list(state_dict["param_groups"])
        got, expected = [len(g["params"]) for g in self.groups], [len(g["params"]) for g in optimizer.param_groups]
        if got != expected:
            raise ZeroStateError(
                f"got parameter groups of {got} parameters, expected {expected}: build the optimizer with the groups"
                " that were saved"
            )
        saved = [key for group in self.groups for key in group["params"]]
        states = state_dict["state"]
        self._states = {n: without_containers(states.get(saved[i], {})) for n, i in numbers.items()}
        self._shaped = keeps_shaped(optimizer.inner)
        self.without_states = [name for name, found in self._states.items() if not found]
        """Parameters that start again, as in a plain optimizer that loads no states of them."""
        unknown = [str(key) for key in states if key not in saved]
        if unknown:
            raise ZeroStateError(f"got states of {unknown[:5]}, which are in none of the state dict's parameter groups")
        for name, found in self._states.items():
            for key, value in found.items() if not self._shaped else ():  # else not all have one value per element
                self._check(name, key, value)

    def facts(self) -> dict[str, str]:
        """Facts that have to be equal on all ranks."""
        return {"optimizer states": hash_of(f"{name} {sorted(found)}" for name, found in self._states.items())}

    def _check(self, name: str, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != self._shapes[name]:
            if value.numel() == 1:
                return
            raise ZeroStateError(
                f"{name}: {key} has the shape {tuple(value.shape)}, expected {self._shapes[name]}, or one value"
            )

    def _cut(self, name: str, key: str, value: Any, start: int, stop: int) -> Any:
        self._check(name, key, value)
        if isinstance(value, ShardView):
            if value.is_of(id(self._runtime)) and not value.loaded:
                return None  # the memory that is asked for, as it is
            part, of = value.part, self._tensors[name]
            size = self._shapes[name] if of is None else of.size
            if not part.start <= start <= stop <= part.stop or part.size != size:
                raise ZeroStateError(_not_here(name, f"{start} to {stop}", value))
            return value.values[start - part.start : stop - part.start]
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == self._shapes[name]:
            of = self._tensors[name]
            return (_plain(value) if of is None else of.part_of(value)).reshape(-1)[start:stop]
        return value.reshape(()) if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """None: the parameters are the model's."""
        return None

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        value = self._states.get(name, {}).get(MASTER)
        return None if value is None else self._cut(name, MASTER, value, start, stop)

    def state_keys(self, name: str) -> tuple[str, ...]:
        values = self._states.get(name, {}).items()  # what is neither tensor nor number is the container's own
        return tuple(key for key, value in values if key != MASTER and isinstance(value, (torch.Tensor, int, float)))

    def state(self, key: str, name: str, start: int, stop: int) -> Any:
        return self._cut(name, key, self._states[name][key], start, stop)

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        value = self._states[name].get(key)
        if not isinstance(value, ShardView):
            return None if value is None else range_of(name, key, _plain(value), start, stop, shape)
        if value.is_of(id(self._runtime)) and not value.loaded:
            return None  # the memory that is asked for, as it is
        part = value.part
        if part.shape != shape or not part.start <= start <= stop <= part.stop:
            raise ZeroStateError(_not_here(name, f"{start} to {stop} of {key} of shape {shape}", value))
        return value.values[start - part.start : stop - part.start]


def _not_here(name: str, needed: str, value: ShardView) -> str:
    return (
        f"{name}: this rank needs elements {needed}, and got {value!r}, which another stage or number of ranks has"
        " made; save it with torch.distributed.checkpoint and load it into get_optimizer_state_dict of this model"
    )


def _plain(value: torch.Tensor) -> torch.Tensor:
    """A whole tensor of what may be a DTensor (collective then)."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
