"""`ModelCopy`: a second set of a sharded model's values, sharded over the ranks as the first: an exponential moving
average (EMA), a reference or a teacher.

    ema = optimizer.copy_of()
    ...
    optimizer.step()
    ema.update(decay=0.999)  # on this rank's elements: no communication
    with ema.applied():  # the model computes with the copy
        evaluate(model)

The idea: a rank keeps of the copy what it keeps of the values that all others follow, which are the masters (and frozen
parameters). So an update is arithmetic on the rank's own memory, in the masters' precision, and the model itself serves
to compute with the copy: the values change places.

Left out: two forwards of both at once. A copy that computes beside the model is a second model, which `shard` takes
with `None` as its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from dsx_core.errors import first_few
from torch import nn

from .alike import agree, hash_of, telling
from .errors import ZeroStateError
from .held import HeldState
from .homes.home import Home, read, write
from .params.dtensors import is_dtensor
from .params.shard_view import Part, ShardView
from .params.whole import joining
from .plan.layout import LocalSlice
from .plan.units import ParameterInfo
from .state.slices import COPY, ParamSlice, Reader

__all__ = ["ModelCopy"]

_CALL = "ZeroOptimizer.copy_of"
_UPDATES = "updates"
_APPLIED = "the model has the values of a copy (inside copy.applied()); leave the context first"
_MAX_NAMED = 5


class ModelCopy:
    """A second set of a model's values: each rank has of it what it has of the model's masters and frozen parameters.
    `ZeroOptimizer.copy_of` makes it.

    Attributes:
        updates: number of calls of `update` so far.
    """

    def __init__(self, held: HeldState, what: Any, device: Any) -> None:
        run = held.parts.runtime
        with telling(run.ranks.group):
            held.update.collect_edits()
            names, buffers = _chosen(run.model, run.infos, what)
            self._device = None if device is None else torch.device(device)
        agree(_CALL, {"parameters": hash_of(names), "device": str(self._device)}, run.ranks.group)
        self._held, self._names = held, names
        self._values: dict[str, torch.Tensor] = {}
        for name, home, part in self._places():
            value = read(home, part.offset, part.offset + part.numel).detach()
            self._values[name] = value.to(self._device or value.device, copy=True)
        self._buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self.updates = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes on this rank."""
        return sum(value.nbytes for value in (*self._values.values(), *self._buffers.values()))

    def _places(self) -> Iterator[tuple[str, Home, LocalSlice]]:
        """The places where this rank has the model's values of the copied parameters."""
        for name in self._names:
            for home, part in self._held.layout.homes_of(name):
                yield name, home, part

    def _checked_places(self) -> list[tuple[str, Home, LocalSlice]]:
        """Raises ZeroStateError if the model was released or laid out anew since the copy was made."""
        self._held.update.collect_edits()
        places = list(self._places())
        for name, _, part in places:
            if name not in self._values or self._values[name].numel() != part.numel:
                raise ZeroStateError(
                    f"{name}: the model was given a new layout (parameters began to train) since copy_of was called;"
                    " make a new copy, and load into it what state_dict() of this one gave before"
                )
        return places

    @torch.no_grad()
    def update(self, decay: float = 0.0) -> None:
        """Move the copy towards the model's values: `copy = decay * copy + (1 - decay) * value`, element by element,
        computed as `torch.lerp(copy, value, 1 - decay)`. Nothing is communicated. Buffers are copied.

        Args:
            decay: in [0, 1]; 0 takes the present values.

        Raises:
            ZeroStateError: `decay` is another number, or the values cannot be read now.
        """
        if not isinstance(decay, (int, float)) or not 0.0 <= decay <= 1.0:
            raise ZeroStateError(f"decay: got {decay!r}, expected a number from 0 to 1")
        for name, home, part in self._checked_places():
            mine = self._values[name]
            value = read(home, part.offset, part.offset + part.numel, device=mine.device)
            if decay == 0.0 or not mine.is_floating_point():
                mine.copy_(value)
            else:
                mine.lerp_(value, 1.0 - decay)
        for name, buffer in self._model_buffers():
            self._buffers[name].copy_(buffer)
        self.updates += 1

    def _model_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self._held.parts.runtime.model.named_buffers():
            if name in self._buffers:
                yield name, buffer

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the context the model has the copy's values (collective, at both ends). For forwards: a step, a load
        or a save raises there. Afterwards the model's values are bitwise what they were.
        """
        with telling(self._held.parts.runtime.ranks.group):
            places = self._checked_places()
        self._exchange(places)
        try:
            with self._held.update.refused(_APPLIED):
                yield
        finally:
            self._exchange(places)

    @torch.no_grad()
    def _exchange(self, places: Iterable[tuple[str, Home, LocalSlice]]) -> None:
        for name, home, part in places:
            mine = self._values[name]
            before = read(home, part.offset, part.offset + part.numel).detach().to(mine.device, copy=True)
            write(home, mine, part.offset)
            mine.copy_(before)
        for name, buffer in self._model_buffers():
            before = buffer.detach().clone()
            buffer.copy_(self._buffers[name])
            self._buffers[name].copy_(before)
        self._held.note_loaded()

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The copy by parameter name, as `ShardView`s of this rank's elements, for `torch.distributed.checkpoint`:
        `dcp.save({"ema": copy}, ...)`. Whole tensors: `view.full_tensor()` of each, on every rank.
        """
        found: dict[str, Any] = {}
        run = self._held.parts.runtime
        for name in self._names:
            group = self._held.layout.group_of(name)
            shape, of = group.layout.shapes[group.layout.index(name)], group.global_of(name)
            part = next((part for _, part in self._held.layout.homes_of(name)), LocalSlice(0, 0, 0))
            values = self._values.get(name)
            if values is None:
                dtype = group.master_dtype if group.trainable else group.key.dtype
                values = torch.empty(0, dtype=dtype, device=self._device or group.key.device)
            if run.stage == 0 or (run.stage < 3 and not group.trainable) or group.ranks.size == 1:  # every rank has all
                found[name] = values.view(shape) if of is None else of.shown(values.view(shape))
                continue
            whole = joining(group.layout, name, group.ranks, values.dtype, group.key.device, of)
            found[name] = ShardView(values, Part.of_range(shape, part.start, part.stop, of), whole=whole)
        return {**found, **self._buffers, _UPDATES: self.updates}

    # In an engine's checkpoints: beside the optimizer's states, by ranges ---------------------------------------------

    def slices(self, slices: Iterable[ParamSlice], name: str) -> Iterator[ParamSlice]:
        """This rank's slices of the model (`ZeroOptimizer.slices`) with the copy's values in `ranges`.

        Args:
            name: of the copy; values have the key `copy.NAME@all`.
        """
        kept = {of: (part, self._values[of]) for of, _, part in self._checked_places()}
        for found in slices:
            part, values = kept.get(found.name, (LocalSlice(0, 0, 0), torch.empty(0, device="cpu")))
            first, last = max(part.start, found.start), min(part.stop, found.stop)
            if first < last:
                own = (_key(name), first, values[first - part.start : last - part.start])
                found = replace(found, ranges=(*found.ranges, own))
            yield found

    def read(self, reader: Reader, name: str) -> Callable[[], None] | None:
        """Read the values of `slices`, of any number of ranks. Nothing is changed, and nothing is communicated.

        Returns:
            A function that puts them into the copy; None if the checkpoint has no copy of this name, or its states are
            not read.

        Raises:
            ZeroStateError: the checkpoint's copy of this name has no values of a parameter.
        """
        key, places = _key(name), self._checked_places()
        has = {of: key in reader.state_keys(of) for of in self._names}
        if not any(has.values()):
            return None
        missing = [of for of, found in has.items() if not found and self._held.layout.group_of(of).trainable]
        if missing:
            raise ZeroStateError(
                f"{first_few(missing)}: the copy {name!r} has values of it, and that of the checkpoint has none: it was"
                " made by copy_of() of another part of the model; make this one of the same part"
            )
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for of, _, part in places:
            values = reader.state(key, of, part.start, part.stop)
            if isinstance(values, torch.Tensor):
                found.append((self._values[of], values))

        def install() -> None:
            for mine, values in found:
                mine.copy_(values.view_as(mine))

        return install

    def small_state(self) -> dict[str, Any]:
        """The state that `slices` has no place for: buffers, and the number of updates. Equal on all ranks."""
        return {"buffers": {n: b.clone() for n, b in self._buffers.items()}, _UPDATES: self.updates}

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Load what `small_state` gave."""
        for name, buffer in state["buffers"].items():
            if name in self._buffers:
                self._buffers[name].copy_(buffer)
        self.updates = int(state[_UPDATES])

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or whole tensors by parameter name, the same on every rank.

        Raises:
            ZeroStateError: names or shapes are not those of the copy. Nothing has been changed.
        """
        mine = self.state_dict()
        missing, unexpected = mine.keys() - state_dict.keys() - {_UPDATES}, state_dict.keys() - mine.keys()
        if missing or unexpected:
            raise ZeroStateError(
                f"the state is of another copy: missing {sorted(missing)[:_MAX_NAMED]}, unexpected"
                f" {sorted(unexpected)[:_MAX_NAMED]}"
            )
        for name, value in mine.items():
            if name != _UPDATES and tuple(state_dict[name].shape) != tuple(value.shape):
                raise ZeroStateError(
                    f"{name}: got shape {tuple(state_dict[name].shape)}, expected {tuple(value.shape)}"
                )
        for name, value in mine.items():
            if name in self._names and is_dtensor(value):
                of = self._held.layout.group_of(name).global_of(name)
                value.to_local().copy_(of.part_of(state_dict[name]))
            elif name != _UPDATES:
                value.copy_(state_dict[name])
        self.updates = int(state_dict.get(_UPDATES, self.updates))


def _key(name: str) -> str:
    return f"{COPY}{name}@all"


def _chosen(
    model: nn.Module, infos: Sequence[ParameterInfo], what: Any
) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """The first names of the parameters that are meant, in the model's order, and the buffers."""
    known = {name: info.name for info in infos for name in (info.name, *info.aliases)}
    if what is None or what is model:
        prefix: str | None = ""
    elif isinstance(what, nn.Module):
        prefix = next((f"{name}." for name, module in model.named_modules() if module is what), None)
        if prefix is None:
            raise ZeroStateError(f"copy_of: got a {type(what).__name__} that is no part of the sharded model")
    else:
        names = list(what)
        unknown = [str(name) for name in names if name not in known]
        if unknown or isinstance(what, str):
            got = repr(what) if isinstance(what, str) else str(unknown[:_MAX_NAMED])
            raise ZeroStateError(
                f"copy_of: got {got}, expected names of the model's parameters (as named_parameters() gives them), a"
                " part of the model, or nothing for all of it"
            )
        wanted = {known[name] for name in names}
        return tuple(info.name for info in infos if info.name in wanted), {}
    inside = {first for name, first in known.items() if name.startswith(prefix)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.startswith(prefix)}
    return tuple(info.name for info in infos if info.name in inside), buffers
