"""One rank's own state: `state_dict`, `load_state_dict`, and the count of its bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import ZeroStateError
from ..homes.home import DeviceHome, Home
from ..runtime import Runtime
from ..step.states import OptimizerStates
from .loading import SliceLoad
from .slices import ParamSlice, Reader, State

__all__ = ["count_bytes", "load_local", "save_local", "unique_bytes"]


class LocalState(OrderedDict[str, Any]):
    """The result of `ZeroOptimizer.state_dict` on a rank that has parts of tensors. Saved and copied, it is an ordinary
    dictionary.
    """

    def __missing__(self, key: str) -> Any:
        if key == "state":
            raise ZeroStateError(
                "state_dict()['state']: the optimizer's states are divided among the ranks, and this rank's slices are"
                " in 'slices'. Get whole ones with dsx_zero.full_state_dict(optimizer) on every rank (or torch's"
                " get_optimizer_state_dict with full_state_dict=True); load them with dsx_zero.load_full_state_dict"
            )
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def save_local(held: Iterable[ParamSlice], param_groups: Iterable[dict[str, Any]]) -> LocalState:
    """See `ZeroOptimizer.state_dict`. `held`: everything that this rank keeps."""
    slices = {
        part.name: {
            "shape": part.shape,
            "start": part.start,
            "stop": part.stop,
            "param": part.param,
            "master": part.master,
            "states": dict(part.states),
            "ranges": _by_key(part.ranges),
            "shaped": {state.key: (state.start, state.values) for state in part.shaped},
        }
        for part in held
    }
    groups = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in param_groups]
    return LocalState(slices=slices, param_groups=groups)


def _by_key(ranges: Iterable[tuple[str, int, torch.Tensor]]) -> dict[str, list[tuple[int, torch.Tensor]]]:
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for key, start, values in ranges:
        found.setdefault(key, []).append((start, values))
    return found


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
                f"{held['stop']}; it was made with another stage or number of ranks, for which there are"
                " dsx_zero.full_state_dict and load_full_state_dict"
            )
        return value[start - held["start"] : stop - held["start"]]

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return self._cut(name, self._slices[name]["param"], start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        return self._cut(name, self._slices[name]["master"], start, stop)

    def state_keys(self, name: str) -> tuple[str, ...]:
        held = self._slices[name]
        return (*held["states"], *held["ranges"], *held.get("shaped", ()))

    def state(self, key: str, name: str, start: int, stop: int) -> State | None:
        if key in self._slices[name]["ranges"]:
            for first, values in self._slices[name]["ranges"][key]:
                if first <= start and stop <= first + values.numel():
                    return values[start - first : stop - first]
            return None
        return self._cut(name, self._slices[name]["states"][key], start, stop)

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        first, values = self._slices[name].get("shaped", {})[key]
        if not first <= start <= stop <= first + values.numel():
            raise ZeroStateError(
                f"{name}: this rank needs elements {start} to {stop} of optimizer state {key!r}, the state dict has"
                f" {first} to {first + values.numel()}; it was made with another stage or number of ranks, for which"
                " there are checkpoints"
            )
        return values[start - first : stop - first]


def load_local(
    state: dict[str, Any],
    param_groups: Sequence[dict[str, Any]],
    held: Callable[[], Iterable[ParamSlice]],
    read: Callable[[Reader], SliceLoad],
) -> None:
    """See `ZeroOptimizer.load_state_dict`.

    Args:
        held: gives everything that this rank keeps.
        read: reads all of it, and changes nothing before `install`.
    """
    if not isinstance(state, dict) or not {"slices", "param_groups"} <= set(state):
        raise ZeroStateError(
            "the state dict is none of a ZeroOptimizer: expected the keys slices and param_groups; a plain optimizer's "
            "state is loaded with dsx_zero.load_full_state_dict(optimizer, {'model': ..., 'optimizer': ...})"
        )
    slices, groups = state["slices"], state["param_groups"]
    wrong = [p.name for p in held() if p.name not in slices or tuple(slices[p.name]["shape"]) != tuple(p.shape)]
    if wrong:
        raise ZeroStateError(
            f"the state dict does not fit the model: {wrong[:10]} are missing in it or have another shape"
        )
    if len(groups) != len(param_groups):
        raise ZeroStateError(f"got {len(groups)} parameter groups, expected {len(param_groups)}")
    load = read(_LocalReader(slices))  # everything is checked before the first value changes
    load.install()
    for group, saved in zip(param_groups, groups):
        # Where this rank has whole states, the saved groups number their parameters, as those of a plain optimizer do.
        group.update({key: value for key, value in saved.items() if key != "params"})


def unique_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages of `tensors` that are not in `seen` yet; adds these storages to `seen`."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


class _Count:
    """Counts bytes by tier; each storage counts once."""

    def __init__(self) -> None:
        self._seen: set[tuple[torch.device, int]] = set()

    def of(self, tensors: Iterable[torch.Tensor] = (), homes: Iterable[Home] = ()) -> dict[str, int]:
        """Bytes by tier of storages that were not counted before. Tensors count as on the device; homes in memory count
        by their storages.
        """
        found: dict[str, int] = {}
        for tensor in tensors:
            self.add(found, "device", tensor)
        for home in homes:
            view = home.memory if isinstance(home, DeviceHome) else home.view()
            if view is None:
                found[home.tier] = found.get(home.tier, 0) + home.nbytes
            else:
                self.add(found, home.tier, view)
        return found

    def add(self, found: dict[str, int], tier: str, tensor: torch.Tensor) -> None:
        found[tier] = found.get(tier, 0) + unique_bytes([tensor], self._seen)


def count_bytes(runtime: Runtime, states: OptimizerStates) -> dict[str, dict[str, int]]:
    """See `ZeroOptimizer.state_bytes_by_tier`."""
    groups, count = [group for unit in runtime.units for group in unit.groups], _Count()
    reductions = runtime.gradients.reductions
    found = {
        "params": count.of([g.visible for g in groups if g.visible is not None], [group.shard for group in groups]),
        "master": count.of(homes=[group.master for group in groups if group.master is not None]),
        "grads": count.of(reductions.tensors(), reductions.homes()),
        "optimizer": count.of(homes=states.homes()),
        "buffers": count.of(runtime.publisher.tensors()),
    }
    for tier, tensor in states.tensors():
        count.add(found["optimizer"], tier, tensor)
    if hasattr(states.inner, "communication_tensors"):  # buffers of an optimizer that communicates by itself
        for tensor in states.inner.communication_tensors():
            count.add(found["optimizer"], "device", tensor)
    found["buffers"]["host"] = found["buffers"].get("host", 0) + states.blocks.idle_bytes
    found["buffers"]["device"] = found["buffers"].get("device", 0) + reductions.idle_bytes()
    return found
