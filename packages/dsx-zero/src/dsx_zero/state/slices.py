"""This rank's own values, by name: the view from which checkpoints are written.

A `ParamSlice` is a range of a parameter in row-major order, with its master and its optimizer states. Over all ranks
the slices cover every element exactly once. That holds at stage 0 too: every rank has all elements there, and the work
of writing is divided by the same arithmetic. Loading (`loading.py`) is the reverse, and the number of ranks may differ:
every rank asks a reader for the ranges it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ZeroStateError
from ..homes.home import DeviceHome, Home, read
from ..params.flat import FlatGroup
from ..plan.layout import LocalSlice, pieces
from ..step.masters import Master
from ..step.states import OptimizerStates
from ..transports.errors import FlatError, errors_of
from .layout import ModelLayout
from .shapes import ShapedState, shaped_state
from .templates import StateTemplates, is_single

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = [
    "COPY",
    "ParamSlice",
    "Reader",
    "State",
    "StoredValues",
    "iter_slices",
    "own_states",
    "read_elements",
]

COPY = "copy."
"""Begins the keys of copies of the values (`ModelCopy`) in `ParamSlice.ranges`."""

State = torch.Tensor | int | float | bool
Where = Callable[[torch.Tensor], torch.Tensor]
"""Gives the values of a tensor of the states where they lie now (`MovedStates.lying`)."""


@dataclass(frozen=True)
class ParamSlice:
    """Elements `[start, stop)` of one parameter, which this rank owns (possibly none).

    `param` is 1-D in the model's dtype, `master` is 1-D in the master's dtype (the same memory where there is no
    separate master; None for frozen parameters). `states` has 1-D tensors of the same length, and single values as
    numbers or 0-dim tensors.
    `ranges` has further states, whose ranges differ from those of the parameter: (key, first element in the parameter,
    1-D values). Their keys contain an "@"; over all ranks the ranges of a key cover the parameter.
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
    shaped: tuple[ShapedState, ...] = ()

    def without_elements(self) -> ParamSlice:
        """The slice of a rank that owns nothing of the parameter."""
        param, master = (
            v if v is None else torch.empty(0, dtype=v.dtype, device="cpu") for v in (self.param, self.master)
        )
        return replace(self, start=0, stop=0, param=param, master=master, states={}, ranges=(), shaped=())


@dataclass(frozen=True)
class StoredValues:
    """Stands for a 1-D tensor of a `ParamSlice` whose elements are not in memory; `fetch` reads them.

    Attributes:
        ranges: ranges of homes, which follow each other.
    """

    ranges: tuple[tuple[Home, int, int], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.ranges[0][0].dtype

    def dim(self) -> int:
        """The same as for the tensor."""
        return 1

    def numel(self) -> int:
        """The same as for the tensor."""
        return sum(stop - start for _, start, stop in self.ranges)

    def fetch(self) -> torch.Tensor:
        """Read the elements into a new tensor."""
        found = [read(*place) for place in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found)

    def parts(self, most: int) -> Iterator[torch.Tensor]:
        """Read the elements in order, at most `most` at a time, each time into a new tensor."""
        for home, first, last in self.ranges:
            for start, stop in pieces(last - first, most):
                yield read(home, first + start, first + stop)


class Reader(Protocol):
    """A source of values. If it gives None, the model keeps the values it has.

    A range is `start` to `stop` (exclusive) of the flattened parameter `name`; what is returned is 1-D, has `stop -
    start` elements and any dtype and device.
    """

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the parameter itself."""
        ...

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of its fp32 master."""
        ...

    def state_keys(self, name: str) -> tuple[str, ...]:
        """Names of the optimizer states that there are for this parameter: "exp_avg", ..."""
        ...

    def state(self, key: str, name: str, start: int, stop: int) -> State | None:
        """Elements of one of these states, or the whole of one that is a single value."""
        ...

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Elements of a state with a shape of its own, counted there, 1-D. The whole state has `shape`."""
        ...


def iter_slices(
    runtime: Runtime,
    layout: ModelLayout,
    states: OptimizerStates,
    *,
    where: Where,
    held: bool = False,
    lazily: bool = False,
) -> Iterator[ParamSlice]:
    """This rank's own part of every parameter, in definition order.

    `held`: give everything that this rank keeps, not only what it owns (all elements of a parameter at stage 0, all
    elements of frozen ones up to stage 2). `lazily`: give values that are not in memory as `StoredValues`.
    """
    inner = states.inner
    templates, errors = StateTemplates(inner), _GroupErrors(runtime)
    for info in runtime.infos:
        group = layout.group_of(info.name)
        whole = held and (runtime.stage == 0 or (runtime.stage < 3 and not info.trainable))
        part, home = layout.part_of(info.name, whole=whole)
        if not held and not group.ranks.first_copy:
            part = LocalSlice(0, 0, 0)  # with hybrid sharding several ranks hold equal shards
        param: Any = read_elements(home, part.offset, part.numel, where, lazily=lazily)
        pieces = layout.masters_of(info.name)
        trainable = info.trainable
        found = own_states(states, pieces, part, templates, lazily, where, empty=held) if part.numel else {}
        yield ParamSlice(
            name=info.name,
            aliases=info.aliases,
            shape=info.shape,
            trainable=trainable,
            start=part.start,
            stop=part.stop,
            param=param,
            master=_own_master(group, pieces, part, param, lazily, where) if trainable else None,
            states={
                **{key: value for key, value in found.items() if not isinstance(value, ShapedState)},
                **errors.numbers_of(group),
            },
            ranges=(
                *(one for master in pieces for one in _own_ranges(inner, master)),
                *errors_of(errors.of(group), group, info.name),
            ),
            shaped=tuple(value for value in found.values() if isinstance(value, ShapedState)),
        )


class _GroupErrors:
    """Reads the compression errors of one flat group at a time; the group's parameters have them in common."""

    def __init__(self, runtime: Runtime) -> None:
        self._keepers = runtime.errors
        self._latest: tuple[FlatGroup | None, list[FlatError]] = (None, [])

    def of(self, group: FlatGroup) -> list[FlatError]:
        """All compression errors of `group`."""
        if not self._keepers or not group.trainable:
            return []
        if self._latest[0] is not group:
            self._latest = (group, [error for keeper in self._keepers for error in keeper.errors(group)])
        return self._latest[1]

    def numbers_of(self, group: FlatGroup) -> dict[str, int]:
        """The numbers that belong to them."""
        if not group.trainable:
            return {}
        return {key: number for keeper in self._keepers for key, number in keeper.numbers(group).items()}


def _own_ranges(inner: Any, master: Master) -> tuple[tuple[str, int, torch.Tensor], ...]:
    """States of optimizers that communicate by themselves, such as the errors of their compression."""
    give = getattr(inner, "state_ranges", None)
    return () if give is None else tuple(give(master.tensor))


def read_elements(home: Home, start: int, numel: int, where: Where, *, lazily: bool = False) -> Any:
    """Elements of a home for reading, 1-D. `lazily`: a `StoredValues` if they are not in memory."""
    if isinstance(home, DeviceHome):
        return where(home.memory)[start : start + numel].detach()
    if lazily and numel and home.view() is None:
        return StoredValues(((home, start, start + numel),))
    return read(home, start, start + numel).detach()


def _own_master(
    group: FlatGroup, pieces: Sequence[Master], part: LocalSlice, param: Any, lazily: bool, where: Where
) -> Any:
    if group.own_master is None:
        return param
    if not pieces or not part.numel:
        return read_elements(group.own_master, 0, 0, where)
    start = pieces[0].slice.offset + part.start - pieces[0].slice.start
    return read_elements(group.own_master, start, part.numel, where, lazily=lazily)


def _cut(master: Master, tensor: torch.Tensor, part: LocalSlice) -> torch.Tensor:
    """The owned elements of a tensor that has the layout of the master."""
    first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
    return tensor.detach().reshape(-1)[first - master.slice.start : max(first, last) - master.slice.start]


def own_states(
    states: OptimizerStates,
    pieces: Sequence[Master],
    part: LocalSlice,
    templates: StateTemplates,
    lazily: bool,
    where: Where,
    *,
    empty: bool = False,
) -> dict[str, Any]:
    """The states of the elements `part` of a parameter; `pieces` are this rank's masters of it. States with a shape of
    their own are `ShapedState`; those of which this rank has no element are left out, unless `empty` asks for them.

    Raises:
        ZeroStateError: a state is neither one value nor one value per element.
    """
    found = [_states_of(states, master, part, templates, lazily, where, empty) for master in pieces]
    stored: dict[str, Any] = _stored_states(states, pieces, part) if lazily else {}
    if len(found) <= 1:
        return (found[0] if found else {}) | stored
    return {key: _joined([piece[key] for piece in found if key in piece]) for key in found[0]} | stored


def _stored_states(states: OptimizerStates, pieces: Sequence[Master], part: LocalSlice) -> dict[str, StoredValues]:
    """The states per element whose values are not in memory."""
    ranges: dict[str, list[tuple[Home, int, int]]] = {}
    for master in pieces:
        first, last = max(part.start, master.slice.start), min(part.stop, master.slice.stop)
        for key, home in states.stored(master).items():
            start = first - master.slice.start
            ranges.setdefault(key, []).append((home, start, start + max(0, last - first)))
    return {key: StoredValues(tuple(found)) for key, found in ranges.items()}


def _joined(values: Sequence[Any]) -> Any:
    """One state of all pieces of a parameter: their elements joined. A single value is the same in all pieces."""
    if isinstance(values[0], ShapedState):
        return replace(values[0], values=torch.cat([value.values for value in values]))
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return torch.cat(tensors) if tensors else values[0]


def _states_of(
    states: OptimizerStates,
    master: Master,
    part: LocalSlice,
    templates: StateTemplates,
    lazily: bool,
    where: Where,
    empty: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in states.of(master, stored=not lazily).items():
        if isinstance(value, torch.Tensor):
            value = where(value)
        shaped = shaped_state(states, master, key, value, part)
        if shaped is not None:
            if shaped.values.numel() or empty:
                found[key] = shaped
        elif _is_elementwise(key, value, master, templates):
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
