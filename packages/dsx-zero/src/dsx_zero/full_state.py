"""The whole state of a sharded model and its optimizer, as ordinary dictionaries.

With them training goes on at another stage, with another number of ranks, or in plain PyTorch: `"model"` is what
`model.state_dict()` of the plain model gives, `"optimizer"` what the plain optimizer's gives, and `"masters"` has the
fp32 values of parameters in 16 bits. Whole tensors are collected one after the other; only the ranks that keep them
hold more than one. Loading reads this rank's part only, so that a file opened with `torch.load(..., mmap=True)` does
not come into memory.

States with a shape of their own (Adafactor's rows, Dion's basis, Shampoo's matrices) are whole tensors of this shape;
lists and dictionaries of tensors (SOAP's) are lists and dictionaries again. What an object holds (GaLore's projector)
has its place as its name, "projector.ortho_matrix", because a file with objects could only be read by trusting it.

Left out: parameters that only some of the data-parallel ranks hold (experts, tensor slices) and optimizers that
communicate by themselves; the checkpoints of an engine have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSet

from .alike import agree, hash_of, telling
from .errors import ZeroOptimizerError, ZeroStateError
from .grads.averaging import averages_itself
from .params.dtensors import is_dtensor
from .params.partitioned import PartitionedParameter
from .state.shapes import ShapedKind, ShapedState, held_elements, joining_ranges, keeps_shaped, range_of
from .step.states import Form, forms_of, with_containers, without_containers
from .torch_state import MASTER, Number, in_shape_of_parameter, numbered_groups
from .view import OWNERS, View

if TYPE_CHECKING:
    from torch import nn

    from .optimizer import ZeroOptimizer
    from .state.slices import ParamSlice

__all__ = [
    "check_plain",
    "full_state_dict",
    "kinds_of",
    "kinds_of_states",
    "load_full_state_dict",
    "numbers_of",
    "of_all_ranks",
    "own_of",
    "whole_states",
    "whole_values",
]

_SAVE, _LOAD = "dsx_zero.full_state_dict", "dsx_zero.load_full_state_dict"
_MAX_NAMED = 5


def full_state_dict(optimizer: ZeroOptimizer, *, rank0_only: bool = True) -> dict[str, Any]:
    """The whole state of a sharded model and its optimizer (collective).

    Args:
        optimizer: what `dsx_zero.shard` returned.
        rank0_only: only the first data-parallel rank gets it; the others get an empty dictionary.

    Returns:
        "model": parameters and buffers by name, in the model's dtypes; "masters": whole masters by name, where they
        have another dtype; "optimizer": `{"state": ..., "param_groups": ...}` as of a plain `torch.optim`
        optimizer, parameters numbered in the order of its groups; "steps_done". All tensors are new host tensors.

    Raises:
        ZeroOptimizerError: not an optimizer of `shard`.
        RanksDifferError, ZeroStateError: the states cannot be read now (see `ZeroOptimizer.slices`), or some ranks hold
            parameters that others do not.
    """
    run = _runtime_of(optimizer, _SAVE)
    kinds = kinds_of_states(optimizer)
    keep = not rank0_only or run.ranks.rank == 0
    model = dict(run.model.state_dict())
    whole_values(model, keep=keep)
    masters = {}
    for info in run.infos:
        group = optimizer.layout.group_of(info.name)
        if info.trainable and group.master_dtype != group.key.dtype:
            view = View(info.name, optimizer)
            _keep(masters, info.name, view.whole(view.master_slice() if view.masters else None), keep)
    states = whole_states(optimizer, kinds, keep=keep)
    if not keep:
        return {}
    return {"model": model, "masters": masters, "optimizer": states, "steps_done": optimizer.steps_done}


def load_full_state_dict(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Go on from the whole state of a model and its optimizer (collective).

    Args:
        optimizer: what `dsx_zero.shard` returned, for the same model; at any stage and number of ranks.
        state_dict: what `full_state_dict` gave, the same on every rank (`torch.load(path, mmap=True)`). "model" and
            "optimizer" may be those of plain PyTorch.

    Raises:
        ZeroOptimizerError: not an optimizer of `shard`.
        RanksDifferError: the ranks give different states, or one of them has raised.
        ZeroStateError: names, shapes or parameter groups are not those of the model. Nothing has been changed.
    """
    run = _runtime_of(optimizer, _LOAD)
    with telling(run.ranks.group):
        check_plain(optimizer)
        reader = _WholeReader(optimizer, state_dict)
        load = optimizer.read_slices(reader)
    agree(_LOAD, reader.facts(), run.ranks.group)
    load.install()
    with torch.no_grad():
        for write in reader.others:
            write()
    for group, saved in zip(optimizer.param_groups, reader.groups):
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    optimizer.steps_done = int(state_dict.get("steps_done", optimizer.steps_done))


def _runtime_of(optimizer: Any, call: str) -> Any:
    run = getattr(optimizer, "runtime", None)
    if run is None:
        raise ZeroOptimizerError(
            f"{call}: got {type(optimizer).__name__}, expected the optimizer that dsx_zero.shard returned; of an engine"
            " it is engine.optimizer"
        )
    return run


def whole_values(values: dict[str, Any], *, keep: bool = True) -> None:
    """Replace the tensors of a model's state dict by host tensors with whole values (collective at stage 3). Names of
    one tensor share the new one. Without `keep` this rank only takes part.
    """
    made: dict[Any, torch.Tensor] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        partitioned = isinstance(value, PartitionedParameter)
        part = value.to_local() if is_dtensor(value) else value  # type: ignore[operator]
        key: Any = id(value.source) if partitioned else (part.untyped_storage()._cdata, part.storage_offset())
        key = (key, tuple(value.shape), tuple(value.stride()))
        if key not in made:
            divided = partitioned or is_dtensor(value)
            whole = value.full_tensor() if divided else value.detach()  # type: ignore[operator]
            made[key] = whole.to("cpu", copy=not partitioned) if keep else torch.empty(0, device="cpu")
        values[name] = made[key]


# What is collected ----------------------------------------------------------------------------------------------------


def check_plain(optimizer: ZeroOptimizer) -> None:
    """Refuse what has no whole state that is equal on all data-parallel ranks. Raises ZeroStateError."""
    run = optimizer.runtime
    if averages_itself(optimizer.inner):
        raise ZeroStateError(
            f"{type(optimizer.inner).__name__} communicates by itself, and each rank has states of its own; save with"
            " the checkpoints of an engine (dsx.initialize), or this rank's part with optimizer.state_dict()"
        )
    for unit in run.units:
        for group in unit.groups:
            unknown = group.ranks.tensor_groups and any(group.global_of(name) is None for name in group.layout.names)
            if group.ranks.holders is not run.ranks.group or unknown:
                raise ZeroStateError(
                    f"{group.layout.names[0]}: only some ranks hold this tensor (an expert, or a slice), so no rank"
                    " could have the whole state; save with the checkpoints of an engine (dsx.initialize)"
                )


def kinds_of_states(optimizer: ZeroOptimizer) -> dict[str, dict[str, Any]]:
    """For each parameter the names of its states; with the dtype of a state per element, the `ShapedKind` of one with a
    shape of its own, the `Form` of a list or dictionary, else with its value (collective).

    A rank that owns nothing of a parameter does not know.
    """
    ranks, mine = optimizer.runtime.ranks, dict[str, dict[str, Any]]()
    with telling(ranks.group):
        check_plain(optimizer)
        optimizer.moved.check()
        for part in optimizer.slices(lazily=True, held=True):
            mine[part.name] = kinds_of(own_of(optimizer, part))
            _check_joins(part.name, mine[part.name], optimizer.layout.group_of(part.name).ranks)
    agree(_SAVE, {}, ranks.group)
    return of_all_ranks(optimizer, mine)


def own_of(optimizer: ZeroOptimizer, part: ParamSlice) -> dict[str, Any]:
    """This rank's states of a parameter: 1-D, `ShapedState`, a `Form`, or a number with the shape that it has."""
    own: dict[str, Any] = {**part.states, **{state.key: state for state in part.shaped}}
    for master in optimizer.layout.masters_of(part.name)[:1]:
        for key, value in optimizer.states.of(master, stored=False).items():
            if isinstance(own.get(key), torch.Tensor) and own[key].dim() == 0:
                own[key] = Number(in_shape_of_parameter(master, value.detach()))
        own |= forms_of(optimizer.inner.state.get(master.tensor, {}))
    return own


def kinds_of(states: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _single(value) for key, value in states.items() if "@" not in key}


def of_all_ranks(optimizer: ZeroOptimizer, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The kinds of states that any rank has (collective)."""
    ranks = optimizer.runtime.ranks
    if ranks.size == 1:
        return mine

    def both(one: Any, other: Any) -> Any:
        return {name: {**kinds, **other[name]} for name, kinds in one.items()}

    return dsx_comm.merge_objects(mine, both, ranks.group)


def _single(value: Any) -> Any:
    if isinstance(value, Form):
        return value
    if isinstance(value, Number):
        return value.tensor.to("cpu", copy=True)
    if isinstance(value, ShapedState):
        return ShapedKind(value.shape, value.values.dtype, value.joins_slices)
    return value if isinstance(value, (int, float)) else value.dtype


def _check_joins(name: str, kinds: Mapping[str, Any], ranks: RankSet) -> None:
    for key, kind in kinds.items():
        if isinstance(kind, ShapedKind) and not kind.joins_slices and ranks.tensor_groups:
            raise ZeroStateError(
                f"{name}: this rank has a slice of the tensor, and the optimizer state {key!r} of shape {kind.shape} is"
                " the slice's own (one value per block of it), so that no whole state can be made of the slices'; use"
                " an optimizer with one value per element, or save this rank's part with optimizer.state_dict()"
            )


def whole_states(
    optimizer: ZeroOptimizer, kinds: Mapping[str, Mapping[str, Any]], *, keep: bool, masters: bool = False
) -> dict[str, Any]:
    numbers = numbers_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        found: dict[str, Any] = {}
        for key, value in kinds[name].items():
            if isinstance(value, ShapedKind):
                _keep(found, key, _whole_shaped(optimizer, name, key, value), keep)
            elif isinstance(value, torch.dtype):
                view = View(name, optimizer)
                _keep(found, key, view.whole(view.state(key) if view.masters else None), keep)
            elif not isinstance(value, Form):
                found[key] = value
        flat = optimizer.layout.group_of(name)
        if masters and flat.trainable and flat.master_dtype != flat.key.dtype:
            view = View(name, optimizer)
            _keep(found, MASTER, view.whole(view.master_slice() if view.masters else None), keep)
        if found or kinds[name]:
            forms = {key: kind.empty for key, kind in kinds[name].items() if isinstance(kind, Form)}
            state[number] = with_containers(found, forms)
    return {"state": state, "param_groups": numbered_groups(optimizer)}


def _whole_shaped(optimizer: ZeroOptimizer, name: str, key: str, kind: ShapedKind) -> torch.Tensor:
    group, stage = optimizer.layout.group_of(name), optimizer.runtime.stage
    held = held_elements(optimizer.states, optimizer.layout.masters_of(name), key, kind, group.key.device)
    return joining_ranges(group, kind, held.start, stage=stage)(held.values)


def numbers_of(optimizer: ZeroOptimizer) -> dict[str, int]:
    """The number of each parameter that the optimizer holds, by name, in the order of its groups."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {found[1]: number for number, p in enumerate(members) if (found := OWNERS.find(p)) is not None}


def _keep(found: dict[Any, Any], key: Any, whole: torch.Tensor | None, keep: bool) -> None:
    if whole is not None and keep:
        found[key] = whole.cpu()


# What is loaded -------------------------------------------------------------------------------------------------------


class _WholeReader:
    """Gives ranges of whole tensors (see `Reader`), after checking that they are the model's.

    Attributes:
        groups: the saved parameter groups.
        others: what has to be called to install the rest of the model's state: buffers and extra state.
    """

    def __init__(self, optimizer: ZeroOptimizer, state_dict: Any) -> None:
        if not isinstance(state_dict, Mapping) or not {"model", "optimizer"} <= set(state_dict):
            got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ZeroStateError(
                f"got {got}, expected the keys model and optimizer, as dsx_zero.full_state_dict gives them, on every"
                " rank: torch.load(path, mmap=True)"
            )
        self._model, self._masters = state_dict["model"], state_dict.get("masters") or {}
        self.groups: list[dict[str, Any]] = state_dict["optimizer"]["param_groups"]
        self._of = {info.name: (info.name, *info.aliases) for info in optimizer.runtime.infos}
        self._tensors = {i.name: optimizer.layout.group_of(i.name).global_of(i.name) for i in optimizer.runtime.infos}
        self._check_parameters(optimizer)
        self.others = list(self._rest(optimizer.runtime.model))
        self._states = self._states_by_name(optimizer, state_dict["optimizer"]["state"])

    def facts(self) -> dict[str, str]:
        """Facts that have to be equal on all ranks."""
        names = (f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in self._model.items())
        states = (f"{name} {sorted(states)}" for name, states in self._states.items())
        return {"names and shapes": hash_of(names), "optimizer states": hash_of(states)}

    def _tensor(self, name: str) -> torch.Tensor | None:
        return next((self._model[known] for known in self._of[name] if known in self._model), None)

    def _check_parameters(self, optimizer: ZeroOptimizer) -> None:
        shapes = {i.name: optimizer.layout.group_of(i.name).global_shape(i.name) for i in optimizer.runtime.infos}
        missing = [name for name in shapes if self._tensor(name) is None]
        known = set(dict(optimizer.runtime.model.state_dict())) | {
            name for names in self._of.values() for name in names
        }
        unexpected = [name for name in self._model if name not in known]
        if missing or unexpected:
            raise ZeroStateError(
                f"the state is of another model: missing {missing[:_MAX_NAMED]}, unexpected {unexpected[:_MAX_NAMED]}"
            )
        for name, shape in shapes.items():
            for kind, tensor in (("model", self._tensor(name)), ("masters", self._masters.get(name))):
                if tensor is not None and tuple(tensor.shape) != shape:
                    raise ZeroStateError(f"{kind}: {name}: got shape {tuple(tensor.shape)}, expected {shape}")

    def _rest(self, model: nn.Module) -> Iterator[Callable[[], object]]:
        for name, buffer in model.named_buffers(remove_duplicate=False):
            value = self._model.get(name)
            if value is not None:
                if value.shape != buffer.shape:
                    raise ZeroStateError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(buffer.shape)}")
                yield lambda buffer=buffer, value=value: buffer.copy_(value)
        for name, value in self._model.items():
            path, _, last = name.rpartition(".")
            if last == "_extra_state":
                yield lambda path=path, value=value: model.get_submodule(path).set_extra_state(value)

    def _states_by_name(self, optimizer: ZeroOptimizer, states: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
        got = [len(group["params"]) for group in self.groups]
        expected = [len(group["params"]) for group in optimizer.param_groups]
        if got != expected:
            raise ZeroStateError(
                f"got parameter groups of {got} parameters, expected {expected}: build the optimizer with the groups"
                " that were saved"
            )
        saved = [key for group in self.groups for key in group["params"]]
        numbers = numbers_of(optimizer).items()
        found: dict[str, Mapping[str, Any]] = {n: without_containers(states.get(saved[i], {})) for n, i in numbers}
        shaped = keeps_shaped(optimizer.inner)
        for name, entries in found.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and not shaped:  # else not all of them have one value per element
                    self._check_numel(name, key, value)
        return found

    def _check_numel(self, name: str, key: str, value: torch.Tensor) -> None:
        numel = max(1, _numel(self._tensor(name)))
        if value.numel() not in (1, numel):
            raise ZeroStateError(f"{name}: {key} has {value.numel()} elements, expected {numel}, or one value")

    def _elements(self, name: str, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        of = self._tensors[name]
        return (tensor if of is None else of.part_of(tensor)).reshape(-1)[start:stop]

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        tensor = self._tensor(name)
        return None if tensor is None else self._elements(name, tensor, start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        tensor = self._masters.get(name)
        return None if tensor is None else self._elements(name, tensor, start, stop)

    def state_keys(self, name: str) -> tuple[str, ...]:
        return tuple(self._states.get(name, ()))

    def state(self, key: str, name: str, start: int, stop: int) -> Any:
        value = self._states[name].get(key)
        if isinstance(value, torch.Tensor) and value.dim():
            self._check_numel(name, key, value)
            return self._elements(name, value, start, stop)
        return value

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        value = self._states[name].get(key)
        return None if value is None else range_of(name, key, value, start, stop, shape)


def _numel(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
