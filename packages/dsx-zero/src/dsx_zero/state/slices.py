"""What this rank owns, by name: the view from which checkpoints are written.

A `ParamSlice` is a range of a parameter in row-major order with everything that belongs to it. Over all ranks the
slices cover every element exactly once, also at stage 0, where every rank holds everything and the writing is divided
by the same arithmetic. Loading (`loading.py`) is the reverse and needs no equal division: every rank asks a reader for
the ranges it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ZeroStateError
from ..homes.home import Home, read
from ..params.flat import FlatGroup
from ..plan.layout import LocalSlice, pieces
from ..step.masters import Master
from ..step.states import OptimizerStates
from ..transports.errors import FlatError, errors_of
from .templates import StateTemplates, is_single

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["ParamSlice", "Place", "Reader", "State", "StoredValues", "iter_slices", "own_states", "places_of"]

State = torch.Tensor | int | float | bool


@dataclass(frozen=True)
class ParamSlice:
    """Elements `[start, stop)` of one parameter, which this rank owns (possibly none).

    `param` is 1-D in the model's dtype, `master` 1-D in the master's (the same memory where there is no separate
    master; None for frozen parameters). `states` has 1-D tensors of the same length, and single values as numbers or
    0-dim tensors.
    `ranges`: further states (key, first element in the parameter, 1-D values) that ranks hold in ranges of their own;
    each key is whole over the ranks and has an "@".
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    trainable: bool
    start: int
    stop: int
    param: torch.Tensor
    master: torch.Tensor | None
    states: Mapping[str, State] = field(default_factory=dict)
    ranges: tuple[tuple[str, int, torch.Tensor], ...] = ()


@dataclass(frozen=True)
class StoredValues:
    """Elements that are not in memory, 1-D, in the place of a tensor of a `ParamSlice`; `fetch` reads them.

    Attributes:
        ranges: homes, and which of their elements, in a row.
    """

    ranges: tuple[tuple[Home, int, int], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.ranges[0][0].dtype

    def dim(self) -> int:
        """As of the tensor."""
        return 1

    def numel(self) -> int:
        """As of the tensor."""
        return sum(stop - start for _, start, stop in self.ranges)

    def fetch(self) -> torch.Tensor:
        """The elements, a new tensor."""
        found = [read(*place) for place in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found)

    def parts(self, most: int) -> Iterator[torch.Tensor]:
        """The elements in order, at most `most` at a time, each time a new tensor."""
        for home, first, last in self.ranges:
            for start, stop in pieces(last - first, most):
                yield read(home, first + start, first + stop)


class Reader(Protocol):
    """Where values come from. None means: keep what is there."""

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None: ...

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None: ...

    def state_keys(self, name: str) -> tuple[str, ...]: ...

    def state(self, key: str, name: str, start: int, stop: int) -> State | None: ...


@dataclass(frozen=True)
class Place:
    """A parameter's flat group and its number there."""

    group: FlatGroup
    index: int


def places_of(runtime: Runtime) -> dict[str, Place]:
    """Where each parameter lies, by its first name."""
    return {
        name: Place(group, index)
        for unit in runtime.units
        for group in unit.groups
        for index, name in enumerate(group.layout.names)
    }


def iter_slices(
    runtime: Runtime,
    masters: Mapping[str, tuple[Master, ...]],
    states: OptimizerStates,
    *,
    held: bool = False,
    lazily: bool = False,
) -> Iterator[ParamSlice]:
    """What this rank owns of every parameter, in definition order.

    `held`: everything it keeps (whole parameters at stage 0, whole frozen ones up to stage 2). `lazily`: what is not in
    memory is given as `StoredValues`.
    """
    places, inner = places_of(runtime), states.inner
    templates, errors = StateTemplates(inner), _GroupErrors(runtime)
    for info in runtime.infos:
        group, index = places[info.name].group, places[info.name].index
        if held and (runtime.whole or (runtime.holds_whole_parameters and not info.trainable)):
            part, home = group.whole_slice(index), group.all_visible()
        else:
            # of equal shards (hybrid sharding) the first copy's are the ones that count
            owned = group.layout.local_slice(info.name, group.rank) if held or group.ranks.first_copy else None
            part, home = owned or LocalSlice(0, 0, 0), group.shard
        param: Any = _elements(home, part.offset, part.numel, lazily)
        pieces = masters.get(info.name, ())
        trainable = info.trainable
        yield ParamSlice(
            name=info.name,
            aliases=info.aliases,
            shape=info.shape,
            trainable=trainable,
            start=part.start,
            stop=part.stop,
            param=param,
            master=_own_master(group, pieces, part, param, lazily) if trainable else None,
            states=own_states(states, pieces, part, templates, lazily) if part.numel else {},
            ranges=(
                *(found for master in pieces for found in _own_ranges(inner, master)),
                *errors_of(errors.of(group), group, info.name),
            ),
        )


class _GroupErrors:
    """The errors of one flat group at a time, which its parameters have in common."""

    def __init__(self, runtime: Runtime) -> None:
        self._keepers = runtime.errors
        self._latest: tuple[FlatGroup | None, list[FlatError]] = (None, [])

    def of(self, group: FlatGroup) -> list[FlatError]:
        """All of them."""
        if not self._keepers or not group.trainable:
            return []
        if self._latest[0] is not group:
            self._latest = (group, [error for keeper in self._keepers for error in keeper.errors(group)])
        return self._latest[1]


def _own_ranges(inner: Any, master: Master) -> tuple[tuple[str, int, torch.Tensor], ...]:
    """States of optimizers that communicate by themselves, such as what compression has kept back."""
    give = getattr(inner, "state_ranges", None)
    return () if give is None else tuple(give(master.tensor))


def _elements(home: Home, start: int, numel: int, lazily: bool) -> Any:
    if lazily and numel and home.view() is None:
        return StoredValues(((home, start, start + numel),))
    return read(home, start, start + numel).detach()


def _own_master(group: FlatGroup, pieces: Sequence[Master], part: LocalSlice, param: Any, lazily: bool) -> Any:
    if group.own_master is None:
        return param
    if not pieces or not part.numel:
        return read(group.own_master, 0, 0)
    start = pieces[0].slice.offset + part.start - pieces[0].slice.start
    return _elements(group.own_master, start, part.numel, lazily)


def _cut(master: Master, tensor: torch.Tensor, part: LocalSlice) -> torch.Tensor:
    """The owned elements of a tensor that is laid out like the master."""
    first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
    return tensor.detach().reshape(-1)[first - master.slice.start : max(first, last) - master.slice.start]


def own_states(
    states: OptimizerStates, pieces: Sequence[Master], part: LocalSlice, templates: StateTemplates, lazily: bool
) -> dict[str, Any]:
    """The states of the elements `part` of a parameter, of which `pieces` are this rank's masters.

    Raises:
        ZeroStateError: a state is neither one value nor one value per element.
    """
    found = [_states_of(states, master, part, templates, lazily) for master in pieces]
    stored: dict[str, Any] = _stored_states(states, pieces, part) if lazily else {}
    if len(found) <= 1:
        return (found[0] if found else {}) | stored
    return {key: _joined([piece[key] for piece in found if key in piece]) for key in found[0]} | stored


def _stored_states(states: OptimizerStates, pieces: Sequence[Master], part: LocalSlice) -> dict[str, StoredValues]:
    """The states per element that are not in memory."""
    ranges: dict[str, list[tuple[Home, int, int]]] = {}
    for master in pieces:
        first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
        for key, home in states.stored(master).items():
            start = first - master.slice.start
            ranges.setdefault(key, []).append((home, start, start + max(0, last - first)))
    return {key: StoredValues(tuple(found)) for key, found in ranges.items()}


def _joined(values: Sequence[State]) -> State:
    """One state of a parameter's pieces: elements in a row; single values are the same in all of them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return torch.cat(tensors) if tensors else values[0]


def _states_of(
    states: OptimizerStates, master: Master, part: LocalSlice, templates: StateTemplates, lazily: bool
) -> dict[str, State]:
    found: dict[str, State] = {}
    for key, value in states.of(master, stored=not lazily).items():
        if _is_elementwise(key, value, master, templates):
            found[key] = _cut(master, value, part)
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            found[key] = value.detach().reshape(())  # some optimizers keep their `step` with shape (1,)
        elif isinstance(value, (int, float)):
            found[key] = value
        else:
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise ZeroStateError(
                f"{type(states.inner).__name__}.state[{master.name!r}][{key!r}] is {what}, expected one element per"
                " parameter element or a single value; such states cannot be written by ranges"
            )
    return found


def _is_elementwise(key: str, value: Any, master: Master, templates: StateTemplates) -> bool:
    """Does a state have one value per element of the parameter?"""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != master.numel:
        return False
    if value.numel() == 1:  # the shape does not tell: see `templates.py`
        kind = templates.of(master).get(key)
        return value.shape == master.shape if kind is None else not is_single(kind)
    return value.shape == master.shape
