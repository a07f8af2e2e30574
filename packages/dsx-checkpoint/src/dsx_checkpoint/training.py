"""Checkpoints of ordinary PyTorch training: a module and an optimizer, plain, under DDP, or under FSDP2.

    dsx_checkpoint.save_training("ckpt", "step100", model, optimizer, state={"step": 100})
    loaded = dsx_checkpoint.load_training("ckpt", model, optimizer)  # any number of ranks, any of these wrappers
    step = loaded.state["step"]

The idea: what a rank holds of a tensor is a box of the whole tensor, whatever wrapper made it. A plain tensor is the
whole one; the local part of a `DTensor` says by mesh and placements which box it is. So a checkpoint knows nothing of
the wrapper, and each load is a re-shard. An optimizer that describes its slices itself, as the one of dsx-zero does, is
asked for them.

Left out: FSDP1, whose flat parameters have no shapes of their own; DTensors that wait for a sum (`Partial`); states
that are neither numbers nor have the parameter's shape, such as the factors of Adafactor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .boxes import Box
from .errors import CheckpointArgumentError, shown
from .loading import Loaded, load
from .reading import Reader
from .snapshot import Place
from .writing import save

__all__ = ["load_training", "save_training"]

_GROUPS = "param_groups"
_CALLER = "state"
_STEPS = "steps_done"


def save_training(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: Any = None,
    *,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write `<directory>/<tag>/` collectively; returns its path.

    Args:
        model: a module, plain or under DDP, FSDP2 or `torch.compile`.
        optimizer: its optimizer; None: weights only. Parameters that it does not have are saved as frozen ones.
        state: what the program wants back, such as the step or `scheduler.state_dict()`: numbers, texts, tensors, lists
            and dictionaries. Rank 0's is saved.
        options: `ranks`, `rank_state`, `exclude_frozen`, `save_latest`, `keeping`, as for `save`.

    Raises:
        CheckpointArgumentError: an argument cannot be saved; nothing was written.
        CheckpointError: any other failure; the same on all ranks.
    """
    held = _Held(model, optimizer)
    saved = {_GROUPS: held.groups(), _CALLER: dict(state or {}), **held.steps_done()}
    return save(directory, tag, module=held.module, slices=held.slices(), state=saved, places=held.places, **options)


def load_training(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    tag: str | None = None,
    **options: Any,
) -> Loaded | None:
    """Fill a module and its optimizer from a checkpoint, collectively. Everything is read and verified before anything
    is changed.

    Args:
        model, optimizer: as for `save_training`, also under another wrapper or on another number of ranks. An optimizer
            that has made no step gets its states. The settings of its parameter groups, such as the learning rate, are
            those that were saved, if there are as many groups.
        tag: the checkpoint; None: the latest.
        options: `ranks`, `strict`, `verify`, `optimizer_states`, as for `load`.

    Returns:
        What was loaded; its `state` is what `save_training` was given. None if the folder has no checkpoint.

    Raises:
        CheckpointArgumentError: an argument cannot be filled.
        CheckpointError: the checkpoint is damaged or does not fit; the same on all ranks, and nothing has changed.
    """
    held = _Held(model, optimizer)
    loaded = load(directory, tag, module=held.module, optimizer=held, places=held.places, **options)
    if loaded is None:
        return None
    own = {_GROUPS, _CALLER} <= set(loaded.state) <= {_GROUPS, _CALLER, _STEPS}
    if own and options.get("optimizer_states", True):
        held.set_groups(loaded.state[_GROUPS])
        held.set_steps_done(loaded.state.get(_STEPS))
    state = loaded.state[_CALLER] if own else loaded.state  # a checkpoint of an engine has a state of another form
    return Loaded(loaded.path, state, loaded.missing, loaded.unexpected, loaded.rank_state, loaded.saved_by)


@dataclass(frozen=True)
class _Slice:
    """This rank's part of a parameter and its states, 1-D; see `writing.save`."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    param: torch.Tensor
    states: dict[str, Any]
    master: torch.Tensor | None = None
    ranges: tuple[Any, ...] = ()


@dataclass
class _Writes:
    """The values that were read; `install` writes them into the model and the optimizer."""

    actions: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        with torch.no_grad():
            for action in self.actions:
                action()


class _Held:
    """This rank's part of a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.module = _unwrapped(model)
        self.optimizer = optimizer
        self._describes_itself = hasattr(optimizer, "slices") and hasattr(optimizer, "read_slices")
        self.parameters: dict[str, nn.Parameter] = {}
        self._aliases: dict[str, list[str]] = {}
        self.places: dict[str, Place] = {}
        self._settings: dict[int, dict[str, Any]] = {}  # the group of a parameter, by `id`
        if not self._describes_itself:
            self._name_parameters()
            self._check_optimizer()

    def _name_parameters(self) -> None:
        first: dict[int, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = _plain_name(name)
            if id(parameter) in first:
                self._aliases[first[id(parameter)]].append(name)
                continue
            first[id(parameter)] = name
            self.parameters[name] = parameter
            self._aliases[name] = []
            box = _box_of(name, parameter)
            if box is not None:
                self.places[name] = Place(name, tuple(parameter.shape), box)

    def _check_optimizer(self) -> None:
        known = {id(parameter) for parameter in self.parameters.values()}
        for group in self._groups():
            self._settings |= {id(parameter): group for parameter in group["params"]}
        if not self._settings.keys() <= known:
            raise CheckpointArgumentError(
                "got an optimizer with parameters that are not of the model; expected the optimizer of this model, "
                "made after it was wrapped or sharded"
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def slices(self) -> Iterable[Any]:
        """This rank's part of every parameter, and of its states."""
        return self.optimizer.slices() if self._describes_itself else self._own_slices()

    def _own_slices(self) -> Iterator[_Slice]:
        state = {} if self.optimizer is None else self.optimizer.state
        for name, parameter in self.parameters.items():
            local = _local(parameter.detach())
            states = {key: _flat(value) for key, value in state.get(parameter, {}).items() if value is not None}
            yield _Slice(
                name,
                tuple(self._aliases[name]),
                tuple(local.shape),
                0,
                local.numel(),
                parameter.requires_grad,
                local.reshape(-1),
                states,
            )

    def read_slices(self, reader: Reader) -> Any:
        """Read without changing anything; `install` of the result writes."""
        if self._describes_itself:
            return self.optimizer.read_slices(reader)
        writes = _Writes()
        for name, parameter in self.parameters.items():
            count = _local(parameter).numel()
            # A parameter in full precision takes the fp32 master weights of a checkpoint that has them.
            precise = parameter.dtype in (torch.float32, torch.float64)
            found = reader.master(name, 0, count) if precise else reader.param(name, 0, count)
            if found is not None:
                writes.actions.append(_copy_to(_local(parameter.detach()), found))
            states = {key: reader.state(key, name, 0, count) for key in reader.state_keys(name)}
            if states and id(parameter) in self._settings:
                writes.actions.append(self._set_states(parameter, states))
        return writes

    def _set_states(self, parameter: nn.Parameter, states: dict[str, Any]) -> Callable[[], None]:
        def action() -> None:
            kept = self.optimizer.state[parameter]
            for key, value in states.items():
                if isinstance(value, torch.Tensor):
                    if not isinstance(kept.get(key), torch.Tensor):
                        kept[key] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                    _copy_to(_local(kept[key]), value)()
                elif isinstance(kept.get(key), torch.Tensor):
                    kept[key].fill_(value)
                elif value is not None:
                    kept[key] = self._number(parameter, key, value)

        return action

    def _number(self, parameter: nn.Parameter, key: str, value: float) -> Any:
        """A number as optimizers of torch keep it: `step` is a tensor, on the device only where the step runs there."""
        if key != "step":
            return value
        settings = self._settings[id(parameter)]
        on_device = settings.get("fused") or settings.get("capturable")
        return torch.tensor(float(value), device=parameter.device if on_device else "cpu")

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the parameter groups."""
        left_out = ("params", "param_names")
        return [{key: value for key, value in group.items() if key not in left_out} for group in self._groups()]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take the settings that were saved, if they are those of as many groups."""
        mine = self._groups()
        if len(mine) == len(groups):
            for group, saved in zip(mine, groups):
                group.update({key: value for key, value in saved.items() if key in group})

    def steps_done(self) -> dict[str, int]:
        """The count of an optimizer that keeps one, as that of dsx-zero does for its late updates."""
        return {_STEPS: self.optimizer.steps_done} if self._describes_itself else {}

    def set_steps_done(self, steps: int | None) -> None:
        if self._describes_itself and steps is not None:
            self.optimizer.steps_done = steps


def _unwrapped(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, nn.Module):
        raise CheckpointArgumentError(f"got a {type(model).__name__} as the model, expected a torch.nn.Module")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise CheckpointArgumentError(
            "got a model under FullyShardedDataParallel, whose flat parameters have no shapes of their own; use "
            "torch.distributed.fsdp.fully_shard, or save with torch.distributed.checkpoint and `dsx checkpoint import`"
        )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _plain_name(name: str) -> str:
    """Without the names that wrappers of inner modules add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _flat(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local = _local(value.detach())
    return local if local.dim() == 0 else local.reshape(-1)


def _copy_to(target: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    def action() -> None:
        target.copy_(values.reshape(target.shape))

    return action


def _box_of(name: str, tensor: torch.Tensor) -> Box | None:
    """The box of the whole tensor that this rank holds; None for the whole tensor."""
    if not hasattr(tensor, "placements"):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    placements = sharded.placements
    for placement in placements:
        if not isinstance(placement, (Replicate, Shard)) and "Shard" not in type(placement).__name__:
            raise CheckpointArgumentError(
                f"{shown(name)}: got a DTensor with the placement {type(placement).__name__}, expected Shard or"
                " Replicate"
            )
    size, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, placements)
    local = tuple(_local(tensor).shape)
    if tuple(size) != local:
        raise CheckpointArgumentError(
            f"{shown(name)}: this rank holds a part of shape {local}, its placements {placements} say {tuple(size)}"
        )
    return Box(tuple(offset), local)
