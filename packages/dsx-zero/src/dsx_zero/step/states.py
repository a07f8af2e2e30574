"""The states that the user's optimizer keeps, by master and name, wherever they live.

Where no tier is given, they are the tensors that the optimizer made, in its own `state`. With a tier, the states that
have one value per element live in homes between steps: for the step of their sub-group they are fetched into buffers
and put into `optimizer.state`, and stored afterwards. Single values (`step`) always stay in `optimizer.state`.

A state may be a container: a list of tensors (SOAP's, one for each side of a matrix), or an object with tensors and
numbers (GaLore's projector). What it holds are states of their own here, with the container's name and their place:
"GG.0", "GG.1", "projector.ortho_matrix". What is neither tensor nor number in it is left alone.

A state may be a tensor subclass in codes (torchao's AdamW8bit, AdamW4bit, AdamWFp8). It stays where the optimizer made
it. It is read as its values, so that checkpoints have these, and what is loaded is put into codes again.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from dsx_comm.lanes import Lane, Ticket

from ..homes.blocks import HostBlocks
from ..homes.home import DeviceHome, Home, discard, opened, read, write
from ..homes.tiers import Tier
from ..params.flat import label_of
from ..params.memory import OrdinaryMemory
from ..plan.matrices import MatrixState
from .codes import is_coded, values_of_codes, write_codes
from .masters import Master
from .matrix_rules import matrix_rule, stateful
from .sliced_matrices import states_of_tensor

__all__ = ["Form", "OptimizerStates", "Visit", "forms_of", "is_container", "with_containers", "without_containers"]


def _there(home: Home) -> torch.Tensor:
    """The elements for reading; of a home on the device the tensor itself, which may have no values now
    (`offload_states`).
    """
    return home.memory if isinstance(home, DeviceHome) else read(home)


def without_containers(state: Mapping[str, Any]) -> dict[str, Any]:
    """States with what containers hold as states of their own, and without those that are None."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_container(value):
            found |= dict(_held_by(key, value, ()))
        elif value is not None:
            found[key] = value
    return found


@dataclass(frozen=True)
class Form:
    """A list, a tuple or a dictionary of states without its tensors. `constants`: what is neither tensor nor number in
    it (an empty list, a text), by its place.
    """

    empty: Any
    constants: Mapping[str, Any]


def forms_of(state: Mapping[str, Any]) -> dict[str, Form]:
    """The forms of the containers among the states. Objects with attributes are left out: what they hold is saved by
    its place.
    """
    found = {key: value for key, value in state.items() if is_container(value) and _is_plain(value)}
    return {key: Form(_form_of(value), dict(_constants(key, value))) for key, value in found.items()}


def _constants(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)) and value:
        for name, one in _members(value).items():
            yield from _constants(f"{key}.{name}", one)
    elif not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
        yield key, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return not hasattr(value, "_fields") and all(_is_plain(one) for one in _members(value).values())
    return value is None or isinstance(value, (torch.Tensor, int, float, str))


def _form_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _form_of(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_form_of(one) for one in value])
    return None if isinstance(value, torch.Tensor) else value


def with_containers(state: Mapping[str, Any], containers: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `without_containers`: what a name says to lie in one of the containers lies in a copy of it."""
    found = {key: copy.deepcopy(container) for key, container in containers.items()}
    for key, value in state.items():
        name, _, path = key.partition(".")
        if path and name in found:
            found[name] = _with(found[name], path.split("."), value)
        else:
            found[key] = value
    return found


def is_container(value: Any) -> bool:
    """Is a state a list, a tuple, a dictionary, or an object with attributes of its own?"""
    if isinstance(value, (torch.Tensor, type, Enum, ModuleType)) or callable(value):
        return False
    return isinstance(value, (list, tuple, dict)) or hasattr(value, "__dict__")


def _members(value: Any) -> dict[str, Any]:
    if isinstance(value, (list, tuple)):
        return {str(place): one for place, one in enumerate(value)}
    return {str(name): one for name, one in (value if isinstance(value, dict) else vars(value)).items()}


def _held_by(key: str, value: Any, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    for name, one in _members(value).items():
        number = isinstance(one, (int, float)) and not isinstance(one, bool) and not isinstance(value, (list, tuple))
        if isinstance(one, torch.Tensor) or number:
            yield f"{key}.{name}", one
        elif is_container(one) and id(one) not in around:
            yield from _held_by(f"{key}.{name}", one, (*around, id(value), id(one)))


def _with(container: Any, path: Sequence[str], value: Any) -> Any:
    """The container with a value at a place in it: the same object, but for tuples."""
    name, rest = path[0], path[1:]
    if rest:
        value = _with(_members(container)[name], rest, value)
    if isinstance(container, tuple):
        items = [*container[: int(name)], value, *container[int(name) + 1 :]]
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    if isinstance(container, list):
        container[int(name)] = value
    elif isinstance(container, dict):
        container[next(key for key in container if str(key) == name)] = value
    else:
        setattr(container, name, value)
    return container


@dataclass
class Visit:
    """A master that is in memory for its step: buffers for what lives elsewhere, and the transfers under way."""

    master: Master
    values: torch.Tensor | None = None
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for every transfer that was started, the newest first: on a stream the others have ended by then."""
        tickets, self.tickets = self.tickets, []
        for ticket in reversed(tickets):
            ticket.synchronize()


class OptimizerStates:
    """The states that the user's optimizer keeps for its masters, in its own `state` or in homes between steps.

    Args:
        inner: the optimizer.
        masters: the tensors that it steps.
        tiers: for each master, the tier of its states per element; None: they stay where the optimizer makes them.
        numbers: the parameter group of each master, by the `id` of its tensor.
        earlier: the states of the previous layout; masters that stay keep theirs.
        blocks: memory for what is in host memory only for its step.
    """

    def __init__(
        self,
        inner: Any,
        masters: Sequence[Master],
        tiers: Sequence[Tier | None],
        numbers: Mapping[int, int],
        earlier: OptimizerStates | None = None,
        blocks: HostBlocks | None = None,
    ) -> None:
        self.inner, self._masters, self._numbers = inner, tuple(masters), numbers
        self.blocks = blocks or HostBlocks()
        self._rule = stateful(matrix_rule(inner))
        self._tier_of = {id(master.tensor): tier for master, tier in zip(masters, tiers, strict=True)}
        before = {} if earlier is None else earlier._homes
        self._homes: dict[int, dict[str, Home]] = {id(m.tensor): before.get(id(m.tensor), {}) for m in masters}
        self._tiers = {id(m.tensor): m.group.master.tier for m in masters if m.group.master is not None}
        for master in masters:
            self._move_out(master)

    @property
    def moves(self) -> bool:
        """Are states fetched and stored around their step?"""
        return any(tier is not None for tier in self._tier_of.values())

    def of(self, master: Master, *, stored: bool = True) -> dict[str, Any]:
        """All states of a master, for reading; states per element have its shape. `stored`: include states that are not
        in memory.
        """
        state = without_containers(self.inner.state.get(master.tensor, {}))
        found = {key: values_of_codes(value) for key, value in state.items()}
        left_out = () if stored else self.stored(master)
        homes = {key: home for key, home in self._homes[id(master.tensor)].items() if key not in left_out}
        return found | {key: _there(home).view(master.shape) for key, home in homes.items()}

    def of_matrices(self, master: Master) -> dict[str, MatrixState]:
        """The states of the matrices that the master's parameter consists of, by name; of most optimizers none."""
        if self._rule is None:
            return {}
        settings = self.inner.param_groups[self._numbers[id(master.tensor)]]
        return states_of_tensor(self._rule, master.name, master.group, settings)

    def stored(self, master: Master) -> dict[str, Home]:
        """The homes of the master's states that are not in memory, 1-D, by name."""
        homes = self._homes[id(master.tensor)].items()
        return {key: home for key, home in homes if not isinstance(home, DeviceHome) and home.view() is None}

    def names(self, master: Master) -> list[str]:
        """The names of the master's states."""
        return sorted({*self.inner.state.get(master.tensor, {}), *self._homes[id(master.tensor)]})

    def set(self, master: Master, key: str, value: Any) -> None:
        """Set a state of a master, new or existing; what a container holds only where the container is there."""
        name, _, path = key.partition(".")
        if path and is_container(held := self.inner.state[master.tensor].get(name)):
            self.inner.state[master.tensor][name] = _with(held, path.split("."), value)
            return
        self._homes[id(master.tensor)].pop(key, None)
        self.inner.state[master.tensor][key] = self._in_codes(master, key, value)
        self._move_out(master)

    def _in_codes(self, master: Master, key: str, value: Any) -> Any:
        """A state in the form in which the optimizer keeps it (checked with torchao 0.18)."""
        make = getattr(self.inner, "_new_buffer", None)
        if make is None or not self._is_per_element(master, value):
            return value
        coded = make(master.tensor, key == "exp_avg")  # the others have no sign
        return write_codes(coded, value) if is_coded(coded) else value

    def make_containers(self, master: Master, containers: Mapping[str, Any]) -> None:
        """Give a master copies of these containers, where it has none of the name."""
        for key, value in containers.items():
            self.inner.state[master.tensor].setdefault(key, copy.deepcopy(value))

    @contextmanager
    def opened(self, master: Master, key: str) -> Iterator[torch.Tensor]:
        """Inside the context: an existing state per element, 1-D, that can be changed in place."""
        home = self._homes[id(master.tensor)].get(key)
        if home is None:
            held = self.inner.state[master.tensor][key]
            flat = values_of_codes(held).reshape(-1)
            yield flat
            if is_coded(held):
                write_codes(held, flat.view(held.shape))
            return
        with opened(home) as values:
            yield values

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors in the optimizer's own state, each with the name of its master's tier."""
        return [
            (self._tiers.get(id(key), "device"), value)
            for key, state in self.inner.state.items()
            for value in without_containers(state).values()
            if isinstance(value, torch.Tensor)
        ]

    def forget(self, master: Master) -> None:
        """Release the states of a master whose states were moved to another layout."""
        self.inner.state.pop(master.tensor, None)
        for home in self._homes.pop(id(master.tensor), {}).values():
            discard(home)

    def clear(self, master: Master) -> None:
        """Start the states of a master again."""
        self.inner.state.pop(master.tensor, None)
        self.forget_homes(master, keep=())

    def homes_of(self, master: Master) -> Mapping[str, Home]:
        """The homes of a master's states that are not in the optimizer's own state, by name."""
        return self._homes[id(master.tensor)]

    def forget_homes(self, master: Master, *, keep: Collection[str]) -> None:
        """Release the homes of a master's states, except those with the names in `keep`."""
        homes = self._homes[id(master.tensor)]
        for name in [name for name in homes if name not in keep]:
            discard(homes.pop(name))

    def homes(self) -> list[Home]:
        """The homes of the states that are not in the optimizer's own state."""
        return [home for homes in self._homes.values() for home in homes.values()]

    def make_now(self) -> bool:
        """Make the states of each master that has none yet and store them, one master after the other. Returns False
        for an optimizer without `new_flat_state`, which makes its states only in its first step.
        """
        if not hasattr(self.inner, "new_flat_state"):
            return False
        for master in self._masters:
            if self._tier_of[id(master.tensor)] is None or self.inner.state.get(master.tensor):
                continue
            like = master.tensor
            if like.shape != master.shape:  # its values are not in memory
                like = torch.empty(master.shape, dtype=like.dtype, device=like.device)
            made = self.inner.new_flat_state(like, group=self._numbers[id(master.tensor)])
            self.inner.state[master.tensor].update(made)
            self._move_out(master)
        return True

    # Around a sub-group's step ----------------------------------------------------------------------------------------

    def fetch(self, master: Master, lane: Lane) -> Visit:
        """Start fetching a master and its states, as far as they are not in memory."""
        visit, home = Visit(master), master.group.master
        if home is not None and home.view() is None:
            visit.values = self._buffer(master.numel, home.dtype, home.device)
            visit.tickets.append(home.fetch(visit.values, lane, start=master.slice.offset))
        for key, place in self._homes[id(master.tensor)].items():
            view = place.view()
            if view is not None and view.device == master.tensor.device:
                visit.states[key] = view
                continue
            visit.states[key] = self._buffer(place.numel, place.dtype, master.tensor.device)
            visit.tickets.append(place.fetch(visit.states[key], lane))
        return visit

    def _buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        on_host = device.type == "cpu"
        return self.blocks.empty(numel, dtype) if on_host else torch.empty(numel, dtype=dtype, device=device)

    def attach(self, visit: Visit) -> None:
        """Put what was fetched into `optimizer.state` and the master's tensor."""
        visit.wait()
        tensor = visit.master.tensor
        if visit.values is not None:
            tensor.data = visit.values.view(visit.master.shape)
        if visit.states:
            shape = visit.master.shape
            self.inner.state[tensor].update({key: value.view(shape) for key, value in visit.states.items()})

    def store(self, visit: Visit, lane: Lane) -> None:
        """After the master's step: start storing it and its states."""
        master, home = visit.master, visit.master.group.master
        if visit.values is not None and home is not None:
            visit.tickets.append(home.store(visit.values, lane, start=master.slice.offset))
            master.tensor.data = visit.values.new_empty(0)  # no view: it would keep the memory
        visit.tickets += self._move_out(master, lane)

    def _move_out(self, master: Master, lane: Lane | None = None) -> list[Ticket]:
        """Move states per element from `optimizer.state` to their homes."""
        tier = self._tier_of[id(master.tensor)]
        if tier is None or master.tensor not in self.inner.state:
            return []
        state, homes, tickets = self.inner.state[master.tensor], self._homes[id(master.tensor)], []
        for key in [key for key, value in state.items() if self._is_per_element(master, value)]:
            value = state.pop(key).detach().reshape(-1)
            if key not in homes:
                name = f"state.{key}.{master.name}.{master.slice.start}.{label_of(master.group.plan)}"
                device = master.group.key.device
                homes[key] = tier.home(name, master.numel, value.dtype, device, OrdinaryMemory())
            view = homes[key].view()
            if view is not None and view.data_ptr() == value.data_ptr():
                continue
            if lane is None:
                write(homes[key], value)
            else:
                tickets.append(homes[key].store(value, lane))
        return tickets

    @staticmethod
    def _is_per_element(master: Master, value: Any) -> bool:
        """Has the state one value per element of the master? False for a master of one element: its states stay with
        the optimizer, because a home would not pay.
        """
        plain = isinstance(value, torch.Tensor) and not is_coded(value)
        return plain and master.numel > 1 and value.shape == master.shape
