"""One rank's own state: as a dict for `state_dict`, and as counted bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..errors import ZeroStateError
from ..homes.home import Home
from ..runtime import Runtime
from ..step.states import OptimizerStates
from .loading import SliceLoad
from .slices import ParamSlice, Reader, State

__all__ = ["count_bytes", "load_local", "save_local", "unique_bytes"]


class SlicedOptimizer(Protocol):
    """What this file needs of a `ZeroOptimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def held_slices(self) -> Iterator[ParamSlice]: ...

    def read_slices(self, reader: Reader) -> SliceLoad: ...


def save_local(optimizer: SlicedOptimizer) -> dict[str, Any]:
    """See `ZeroOptimizer.state_dict`."""
    slices = {
        part.name: {
            "shape": part.shape,
            "start": part.start,
            "stop": part.stop,
            "param": part.param,
            "master": part.master,
            "states": dict(part.states),
            "ranges": {key: (start, values) for key, start, values in part.ranges},
        }
        for part in optimizer.held_slices()
    }
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    return {"slices": slices, "param_groups": groups}


class _LocalReader:
    """Reads the slices of a `state_dict` of this rank."""

    def __init__(self, slices: dict[str, dict[str, Any]]) -> None:
        self._slices = slices

    def _cut(self, name: str, value: State | None, start: int, stop: int) -> Any:
        held = self._slices[name]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if not held["start"] <= start <= stop <= held["stop"]:
            raise ZeroStateError(
                f"{name}: this rank needs elements {start} to {stop}, the state dict has {held['start']} to "
                f"{held['stop']}; it was made with another stage or number of ranks (use a checkpoint to change them)"
            )
        return value[start - held["start"] : stop - held["start"]]

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return self._cut(name, self._slices[name]["param"], start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return self._cut(name, self._slices[name]["master"], start, stop)

    def state_keys(self, name: str) -> tuple[str, ...]:
        return (*self._slices[name]["states"], *self._slices[name]["ranges"])

    def state(self, key: str, name: str, start: int, stop: int) -> State | None:
        if key in self._slices[name]["ranges"]:
            first, values = self._slices[name]["ranges"][key]
            return values[start - first : stop - first]
        return self._cut(name, self._slices[name]["states"][key], start, stop)


def load_local(optimizer: SlicedOptimizer, state: dict[str, Any]) -> None:
    """See `ZeroOptimizer.load_state_dict`."""
    if not isinstance(state, dict) or not {"slices", "param_groups"} <= set(state):
        raise ZeroStateError(
            "the state dict is none of a ZeroOptimizer: expected the keys slices and param_groups; a plain optimizer's "
            "state can be loaded into it before dsx_zero.shard"
        )
    slices, groups = state["slices"], state["param_groups"]
    mine: Iterable[ParamSlice] = list(optimizer.held_slices())
    wrong = [p.name for p in mine if p.name not in slices or tuple(slices[p.name]["shape"]) != tuple(p.shape)]
    if wrong:
        raise ZeroStateError(
            f"the state dict does not fit the model: {wrong[:10]} are missing in it or have another shape"
        )
    if len(groups) != len(optimizer.param_groups):
        raise ZeroStateError(f"got {len(groups)} parameter groups, expected {len(optimizer.param_groups)}")
    load = optimizer.read_slices(_LocalReader(slices))  # everything is checked before the first value changes
    load.install()
    for group, saved in zip(optimizer.param_groups, groups):
        group.update(saved)


def unique_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages of `tensors` that are not in `seen` yet; adds them."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


def _home_bytes(homes: Sequence[Home], seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of homes, those in memory by their storages."""
    views = [(home, home.view()) for home in homes]
    return unique_bytes([v for _, v in views if v is not None], seen) + sum(h.nbytes for h, v in views if v is None)


def count_bytes(runtime: Runtime, states: OptimizerStates) -> dict[str, int]:
    """See `ZeroOptimizer.state_bytes`."""
    groups = [group for unit in runtime.units for group in unit.groups]
    seen: set[tuple[torch.device, int]] = set()
    kept = states.tensors()
    if hasattr(states.inner, "communication_tensors"):  # what an optimizer that communicates by itself keeps for that
        kept.extend(states.inner.communication_tensors())
    return {
        "params": unique_bytes([g.visible for g in groups if g.visible is not None], seen)
        + _home_bytes([group.shard for group in groups], seen),
        "master": _home_bytes([group.master for group in groups if group.master is not None], seen),
        "grads": unique_bytes(runtime.gradients.tensors(), seen) + _home_bytes(runtime.gradients.homes(), seen),
        "optimizer": unique_bytes(kept, seen) + _home_bytes(states.homes(), seen),
        "buffers": runtime.gradients.idle_bytes() + unique_bytes(runtime.publisher.tensors(), seen),
    }
