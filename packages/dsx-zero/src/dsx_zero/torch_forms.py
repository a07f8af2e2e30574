"""Answers torch's functions for state dicts and checkpoints: who asks, for what, and what `load_state_dict` is given.

`torch_state` has the form of each rank's part, `full_state` whole values; here one of them is chosen. Where every rank
has whole states (stage 0, but for states of matrices of which ranks have slices), the user's optimizer answers itself,
with the masters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dsx_core.modules import CallingHook

from .alike import agree, telling
from .errors import ZeroStateError
from .full_state import (
    check_plain,
    kinds_of,
    kinds_of_states,
    numbers_of,
    of_all_ranks,
    own_of,
    whole_states,
    whole_values,
)
from .params.dtensors import GlobalTensor
from .state.shapes import held_of_state
from .state.templates import StateTemplates, is_single
from .step.states import forms_of, is_container, with_containers, without_containers
from .torch_state import (
    MASTER,
    PartsReader,
    asked_by_torch,
    fresh_states,
    in_shape_of_parameter,
    model_parts,
    optimizer_parts,
)

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer
    from .step.masters import Master

__all__ = ["TorchForms"]

_LOAD_OPTIMIZER = "ZeroOptimizer.load_state_dict"


def _give_to_torch(
    optimizer: Callable[[], ZeroOptimizer | None], module: Any, values: Any, prefix: str, metadata: Any
) -> None:
    """A hook of `model.state_dict()` at stage 3: where a function of torch calls it, put what that expects in the place
    of partitioned parameters (collective for whole tensors).
    """
    owner = optimizer()
    if owner is not None and not owner.released and (form := asked_by_torch()) is not None:
        if form == "whole":
            whole_values(values)
        else:
            model_parts(values)


def _call_of_inner(
    optimizer: Callable[[], ZeroOptimizer | None], kind: type, name: str, *arguments: Any, **options: Any
) -> Any:
    """`state_dict` and `load_state_dict` of the optimizer that the user made."""
    owner = optimizer()
    if owner is None:
        raise ZeroStateError(f"{kind.__name__}.{name}(): the model that it trained, sharded, is not there any more")
    with owner.held.whole_states(f"{kind.__name__}.{name}()"):
        return getattr(kind, name)(owner.inner, *arguments, **options)


class TorchForms:
    """The states in the forms that torch's functions for state dicts and checkpoints expect: see `torch_state`."""

    def attach(self, optimizer: ZeroOptimizer) -> None:
        """Answer calls of `state_dict` and `load_state_dict` of the sharded model and of the user's optimizer."""
        me, inner = weakref.ref(optimizer), optimizer.inner
        if optimizer.runtime.stage == 3:
            hook = CallingHook(partial(_give_to_torch, me))
            handle = optimizer.runtime.model.register_state_dict_post_hook(hook)
            optimizer.control.on_release.append(handle.remove)
        for name in ("state_dict", "load_state_dict") if hasattr(inner, "state_dict") else ():
            setattr(inner, name, partial(_call_of_inner, me, type(inner), name))

    def asked_for(self) -> str | None:
        return asked_by_torch()

    def of_optimizer(self, optimizer: ZeroOptimizer, form: str) -> dict[str, Any]:
        if _every_rank_has_whole_states(optimizer) and optimizer.inner.state:
            return _plain_optimizer(optimizer, form)
        kinds = kinds_of_states(optimizer)
        if form == "whole":
            return whole_states(optimizer, kinds, keep=True, masters=True)
        fresh = None
        if not any(kinds.values()):
            fresh = fresh_states(optimizer)
            kinds = of_all_ranks(optimizer, {name: kinds_of(states) for name, states in fresh.items()})
        return optimizer_parts(optimizer, numbers_of(optimizer), kinds, partial(own_of, optimizer), fresh)

    def names(self, optimizer: ZeroOptimizer) -> Mapping[Any, Any]:
        return _Names(optimizer)

    def load(self, optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
        run = optimizer.runtime
        if _every_rank_has_whole_states(optimizer):
            _load_plain(optimizer, state_dict)
            return
        with telling(run.ranks.group):
            check_plain(optimizer)
            optimizer.update.collect_edits()
            reader = PartsReader(optimizer, state_dict, numbers_of(optimizer))
            load = optimizer.read_slices(reader)
            for name in reader.without_states:
                for master in optimizer.layout.masters_of(name):
                    load.add(partial(optimizer.states.clear, master))
        agree(_LOAD_OPTIMIZER, reader.facts(), run.ranks.group)
        load.install()
        for group, saved in zip(optimizer.param_groups, reader.groups):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})


def _every_rank_has_whole_states(optimizer: ZeroOptimizer) -> bool:
    run = optimizer.runtime
    if run.stage > 0:
        return False
    sliced = [master for info in run.infos for master in optimizer.layout.masters_of(info.name) if _is_slice(master)]
    with optimizer.held.parts.groups.masters():
        return not any(optimizer.states.of_matrices(master) for master in sliced)


def _is_slice(master: Master) -> bool:
    return bool(master.group.ranks.tensor_groups)


def _plain_optimizer(optimizer: ZeroOptimizer, form: str) -> dict[str, Any]:
    """The user's optimizer's own states where every rank has whole ones, with the masters. What containers hold has
    the names that it has at the other stages.
    """
    optimizer.update.collect_edits()
    with optimizer.held.whole_states("state_dict()"):
        found = type(optimizer.inner).state_dict(optimizer.inner)
    for name, number in numbers_of(optimizer).items():
        group = optimizer.layout.group_of(name)
        if group.trainable and group.master_dtype != group.key.dtype and number in found["state"]:
            (master,) = optimizer.layout.masters_of(name)
            found["state"][number] = {**found["state"][number], MASTER: master.tensor.detach()}
        if (of := group.global_of(name)) is not None and number in found["state"]:
            states = found["state"][number].items()
            found["state"][number] = {key: of.shown(v) if _is_part(v, of) else v for key, v in states}
        if number in found["state"]:
            states, (master,) = found["state"][number], optimizer.layout.masters_of(name)
            with optimizer.held.parts.groups.masters():
                shown = {key: _shown(optimizer, master, key, value) for key, value in states.items()}
            found["state"][number] = _by_place(shown, keep=forms_of(shown) if form == "whole" else {})
    return found


def _shown(optimizer: ZeroOptimizer, master: Master, key: str, value: Any) -> Any:
    own_shape = not isinstance(value, torch.Tensor) or held_of_state(optimizer.states, master, key, value) is not None
    return value if own_shape else in_shape_of_parameter(master, value)


def _by_place(states: Mapping[str, Any], keep: Mapping[str, Any]) -> dict[str, Any]:
    """The states with what containers hold as states of their own, but for those containers that are to be kept."""
    found: dict[str, Any] = {}
    for key, value in states.items():
        if is_container(value) and key not in keep:
            found |= without_containers({key: value})
            found |= {place: one for form in forms_of({key: value}).values() for place, one in form.constants.items()}
        else:
            found[key] = value
    return found


def _is_part(value: Any, of: GlobalTensor) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == of.size and value.dim() > 0


def _load_plain(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load where every rank has whole states: what the user's optimizer takes."""
    optimizer.update.collect_edits()
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    templates = StateTemplates(optimizer.inner)
    masters: list[tuple[torch.Tensor, torch.Tensor]] = []
    state_dict = {**state_dict, "state": dict(state_dict["state"])}
    for name, number in numbers_of(optimizer).items():
        if number < len(saved) and (given := state_dict["state"].get(saved[number])):
            with optimizer.held.parts.groups.masters():
                state_dict["state"][saved[number]] = _in_own_forms(optimizer, name, given, templates)
        if (of := optimizer.layout.group_of(name).global_of(name)) is not None and number < len(saved):
            states = state_dict["state"].get(saved[number], {}).items()
            # Contiguous copies: torch's optimizers keep what they load, and a part would keep the whole tensor alive.
            own = {
                key: of.part_of(v).clone(memory_format=torch.contiguous_format)
                if isinstance(v, torch.Tensor) and v.dim()
                else v
                for key, v in states
            }
            state_dict["state"][saved[number]] = own
        value = state_dict["state"].get(saved[number], {}).get(MASTER) if number < len(saved) else None
        if value is not None:
            (master,) = optimizer.layout.masters_of(name)
            masters.append((master.tensor, value.reshape(master.tensor.shape)))
    states = {key: {k: v for k, v in found.items() if k != MASTER} for key, found in state_dict["state"].items()}
    try:
        with optimizer.held.whole_states("load_state_dict()"):
            type(optimizer.inner).load_state_dict(optimizer.inner, {**state_dict, "state": states})
    except (KeyError, ValueError) as error:
        raise ZeroStateError(f"the state dict does not fit the optimizer: {error}") from error
    with torch.no_grad():
        for master, value in masters:
            master.copy_(value)
    if masters:
        optimizer.held.note_loaded()


def _in_own_forms(
    optimizer: ZeroOptimizer, name: str, given: Mapping[str, Any], templates: StateTemplates
) -> dict[str, Any]:
    """States as this optimizer keeps them: with containers, and those of a number in the shape of its master."""
    places = {key.partition(".")[0] for key in given if "." in key}
    masters = optimizer.layout.masters_of(name)
    if places and masters:
        containers = {key: one for key, one in templates.containers_of(masters[0]).items() if key in places}
        given = with_containers({key: one for key, one in given.items() if key not in containers}, containers)
    found = dict(given)
    for master in masters if optimizer.layout.group_of(name).global_shape(name) == () else ():
        kinds = templates.of(master)
        for key, value in found.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and (kind := kinds.get(key)) is not None:
                single = isinstance(kind, torch.Tensor) and is_single(kind)
                found[key] = value.reshape(kind.shape if single else master.shape)
    return found


class _Names(Mapping[Any, Any]):
    """The names of an optimizer's states, by parameter. It is not empty: torch would make a step to fill it."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._members = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._found: dict[int, Any] | None = None

    def __getitem__(self, parameter: Any) -> Any:
        if self._found is None:
            forms, numbers = TorchForms(), [*self._members]
            states = forms.of_optimizer(self._optimizer, "parts")["state"]
            self._found = {numbers[number]: dict.fromkeys(found) for number, found in states.items()}
        return self._found.get(id(parameter), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)
