"""What this rank owns, by name: the view from which checkpoints are written.

A `ParamSlice` is a range of a parameter in row-major order with everything that belongs to it. Over all ranks the
slices cover every element exactly once, also at stage 0, where every rank holds everything and the writing is divided
by the same arithmetic. Loading (`loading.py`) is the reverse and needs no equal division: every rank asks a reader for
the ranges it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ZeroStateError
from ..homes.home import read
from ..params.flat import FlatGroup
from ..plan.layout import LocalSlice
from ..step.masters import Master
from .templates import StateTemplates, is_single

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["ParamSlice", "Place", "Reader", "State", "iter_slices", "places_of"]

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
    runtime: Runtime, masters: Mapping[str, Master], inner: torch.optim.Optimizer, *, held: bool = False
) -> Iterator[ParamSlice]:
    """What this rank owns of every parameter, in definition order.

    `held`: everything it keeps (whole parameters at stage 0, whole frozen ones up to stage 2).
    """
    places, templates = places_of(runtime), StateTemplates(inner)
    for info in runtime.infos:
        group, index = places[info.name].group, places[info.name].index
        if held and (runtime.whole or (runtime.holds_whole_parameters and not info.trainable)):
            part, home = group.whole_slice(index), group.all_visible()
        else:
            part, home = group.layout.local_slice(info.name, group.rank) or LocalSlice(0, 0, 0), group.shard
        param = read(home, part.offset, part.offset + part.numel).detach()
        master = masters.get(info.name)
        trainable = info.trainable
        yield ParamSlice(
            name=info.name,
            aliases=info.aliases,
            shape=info.shape,
            trainable=trainable,
            start=part.start,
            stop=part.stop,
            param=param,
            master=_own_master(group, master, part, param) if trainable else None,
            states={} if master is None or not part.numel else _own_states(inner, master, part, templates),
            ranges=_own_ranges(inner, master),
        )


def _own_ranges(inner: Any, master: Master | None) -> tuple[tuple[str, int, torch.Tensor], ...]:
    """States of optimizers that communicate by themselves, such as what compression has kept back."""
    give = getattr(inner, "state_ranges", None)
    return () if give is None or master is None else tuple(give(master.tensor))


def _own_master(group: FlatGroup, master: Master | None, part: LocalSlice, param: torch.Tensor) -> torch.Tensor:
    if group.own_master is None:
        return param
    if master is None:
        return read(group.own_master, 0, 0)
    start = master.slice.offset + part.start - master.slice.start
    return read(group.own_master, start, start + part.numel)


def _cut(master: Master, tensor: torch.Tensor, part: LocalSlice) -> torch.Tensor:
    """The owned elements of a tensor that is laid out like the master."""
    return tensor.detach().reshape(-1)[part.start - master.slice.start : part.stop - master.slice.start]


def _own_states(
    inner: torch.optim.Optimizer, master: Master, part: LocalSlice, templates: StateTemplates
) -> dict[str, State]:
    found: dict[str, State] = {}
    for key, value in inner.state.get(master.tensor, {}).items():
        if value is None:
            continue
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
                f"{type(inner).__name__}.state[{master.name!r}][{key!r}] is {what}, expected one element per parameter "
                "element or a single value; such states cannot be written by ranges"
            )
    return found


def _is_elementwise(key: str, value: Any, master: Master, templates: StateTemplates) -> bool:
    """Does a state have one value per element of the parameter?"""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != master.tensor.numel():
        return False
    if value.numel() == 1:  # the shape does not tell: see `templates.py`
        kind = templates.of(master).get(key)
        return value.shape == master.tensor.shape if kind is None else not is_single(kind)
    return value.shape == master.tensor.shape
