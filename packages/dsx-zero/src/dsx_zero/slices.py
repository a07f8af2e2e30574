"""What this rank owns, by name: the view from which checkpoints are written and into which they are read.

A `ParamSlice` is a range of a parameter in row-major order with everything that belongs to it. Over all ranks the slices cover every
element exactly once, also at stage 0, where every rank holds everything and the writing is divided by the same arithmetic.
Loading is the reverse and needs no equal division: every rank asks a reader for the ranges it holds.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .errors import ZeroStateError
from .flat import FlatGroup
from .layout import LocalSlice
from .masters import Master, write_parameters

if TYPE_CHECKING:
    from .optimizer import Runtime

__all__ = ["ParamSlice", "Reader", "iter_slices", "load_slices"]

State = torch.Tensor | int | float | bool


@dataclass(frozen=True)
class ParamSlice:
    """Elements `[start, stop)` of one parameter, which this rank owns (possibly none).

    `param` is 1-D in the model's dtype, `master` 1-D in the master's (the same memory where there is no separate master; None for
    frozen parameters), `states` has 1-D tensors of the same length and single values.
    `ranges`: further states (key, first element in the parameter, 1-D values) that ranks hold in ranges of their own; each
    key is whole over the ranks and has an "@".
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
class _Place:
    group: FlatGroup
    index: int


def _places(runtime: Runtime) -> dict[str, _Place]:
    return {
        name: _Place(group, index)
        for unit in runtime.units
        for group in unit.groups
        for index, name in enumerate(group.layout.names)
    }


def iter_slices(
    runtime: Runtime, masters: Mapping[str, Master], inner: torch.optim.Optimizer, *, held: bool = False
) -> Iterator[ParamSlice]:
    """What this rank owns of every parameter, in definition order. `held`: everything it keeps (whole at stage 0, frozen ones up to stage 2)."""
    places = _places(runtime)
    for info in runtime.infos:
        group, index = places[info.name].group, places[info.name].index
        if held and (runtime.whole or (runtime.holds_whole_parameters and not info.trainable)):
            part = LocalSlice(0, info.numel, group.layout.offsets[index])
            param = group.full.narrow(0, part.offset, part.numel).detach()
        else:
            part = group.layout.local_slice(info.name, group.rank) or LocalSlice(0, 0, 0)
            param = group.shard.narrow(0, part.offset, part.numel).detach()
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
            states={} if master is None or not part.numel else _own_states(inner, master, part),
            ranges=_own_ranges(inner, master),
        )


def _own_ranges(inner: Any, master: Master | None) -> tuple[tuple[str, int, torch.Tensor], ...]:
    """States of optimizers that communicate by themselves, such as what compression has kept back."""
    give = getattr(inner, "state_ranges", None)
    return () if give is None or master is None else tuple(give(master.tensor))


def _own_master(group: FlatGroup, master: Master | None, part: LocalSlice, param: torch.Tensor) -> torch.Tensor:
    if master is None or group.master is None:
        return param if group.master is None else group.master[:0]
    if group.master.untyped_storage().data_ptr() == group.shard.untyped_storage().data_ptr():
        return param
    return _cut(master, master.tensor, part)


def _cut(master: Master, tensor: torch.Tensor, part: LocalSlice) -> torch.Tensor:
    """The owned elements of a tensor that is laid out like the master."""
    return tensor.detach().reshape(-1)[part.start - master.slice.start : part.stop - master.slice.start]


def _own_states(inner: torch.optim.Optimizer, master: Master, part: LocalSlice) -> dict[str, State]:
    found: dict[str, State] = {}
    for key, value in inner.state.get(master.tensor, {}).items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == master.tensor.shape:
            found[key] = _cut(master, value, part) if value.dim() else value
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[key] = value
        else:
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise ZeroStateError(
                f"{type(inner).__name__}.state[{master.name!r}][{key!r}] is {what}, expected one element per parameter element or "
                "a single value; such states cannot be written by ranges"
            )
    return found


def load_slices(
    runtime: Runtime, masters: Mapping[str, Master], inner: torch.optim.Optimizer, reader: Reader, *, from_masters: bool
) -> None:
    """Fill everything this rank holds and make it visible (collective).

    `from_masters`: take stored masters where there are some, else the stored parameters.
    """
    places, templates = _places(runtime), _Templates(inner)
    with torch.no_grad():
        for info in runtime.infos:
            place, master = places[info.name], masters.get(info.name)
            if info.trainable:
                if master is not None:
                    _load_master(reader, master, from_masters)
                    _load_states(inner, reader, master, templates)
            else:
                _load_frozen(runtime, reader, info.name, place)
        if hasattr(inner, "states_loaded"):  # optimizers that communicate by themselves count steps in their states
            inner.states_loaded()  # type: ignore[attr-defined]
        for unit in runtime.units:
            for group in unit.trainable:
                write_parameters(group, whole=runtime.whole)
            runtime.residency.publish(unit)
        runtime.residency.finish()


def _load_master(reader: Reader, master: Master, from_masters: bool) -> None:
    start, stop = master.slice.start, master.slice.stop
    value = reader.master(master.name, start, stop) if from_masters else None
    if value is None:
        value = reader.param(master.name, start, stop)
    if value is not None:
        master.tensor.detach().copy_(value.reshape(master.tensor.shape))


def _load_frozen(runtime: Runtime, reader: Reader, name: str, place: _Place) -> None:
    group = place.group
    if runtime.holds_whole_parameters:
        value = reader.param(name, 0, group.layout.sizes[place.index])
        if value is not None:
            view = group.views(group.full)[place.index]
            view.copy_(value.reshape(view.shape))
        return
    part = group.layout.local_slice(name, group.rank)
    if part is None:
        return
    value = reader.param(name, part.start, part.stop)
    if value is not None:
        group.shard.narrow(0, part.offset, part.numel).copy_(value)


def _load_states(inner: torch.optim.Optimizer, reader: Reader, master: Master, templates: _Templates) -> None:
    stored = reader.state_keys(master.name)
    keys = [key for key in stored if "@" not in key]  # the others belong to ranks: only who wrote such takes them
    take = getattr(inner, "load_state_ranges", None)
    if take is not None and keys:
        take(master.tensor, [key for key in stored if "@" in key], lambda k, a, b: reader.state(k, master.name, a, b))
    if not keys:
        return
    present = inner.state[master.tensor]
    kinds = present or templates.of(master)
    for key in keys:
        value = reader.state(key, master.name, master.slice.start, master.slice.stop)
        if value is not None:
            present[key] = _like(kinds.get(key), value, master)


def _like(kind: Any, value: State, master: Master) -> Any:
    """The value in the form the optimizer keeps: a tensor of the master's shape, a 0-dim tensor, or a number."""
    if isinstance(value, torch.Tensor) and value.numel() == master.tensor.numel() and not _is_single(kind):
        dtype = kind.dtype if isinstance(kind, torch.Tensor) else value.dtype
        return value.detach().to(device=master.tensor.device, dtype=dtype, copy=True).reshape(master.tensor.shape)
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(kind, torch.Tensor):
        return torch.full((), number, dtype=kind.dtype, device=kind.device)
    return type(kind)(number) if isinstance(kind, (int, float)) else number


def _is_single(kind: Any) -> bool:
    return isinstance(kind, (int, float)) or (isinstance(kind, torch.Tensor) and kind.dim() == 0)


class _Templates:
    """Which states an optimizer keeps and in what form, learnt from one step of a copy of it on a parameter of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._known: dict[tuple[int, torch.dtype, torch.device], dict[str, Any]] = {}

    def of(self, master: Master) -> dict[str, Any]:
        """Names and examples of the states of a master that has none yet."""
        for number, group in enumerate(self._inner.param_groups):
            if any(tensor is master.tensor for tensor in group["params"]):
                key = (number, master.tensor.dtype, master.tensor.device)
                if key not in self._known:
                    self._known[key] = self._learn(group, master.tensor)
                return self._known[key]
        return {}

    def _learn(self, group: dict[str, Any], like: torch.Tensor) -> dict[str, Any]:
        if hasattr(self._inner, "state_template"):  # a step of those would communicate
            return self._inner.state_template(like)  # type: ignore[attr-defined]
        probe = copy.copy(self._inner)
        sample = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
        sample.grad = torch.zeros_like(sample)
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "param_names"}
        probe.param_groups = [{**options, "params": [sample]}]
        probe.state = defaultdict(dict)
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(probe, hooks, OrderedDict())
        if hasattr(probe, "norm_reducer"):
            probe.norm_reducer = None  # type: ignore[attr-defined]
        type(probe).step(probe)
        return dict(probe.state[sample])
