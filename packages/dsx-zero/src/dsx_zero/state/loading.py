"""Fills a sharded model from named ranges, in two steps: read and check everything, then change the model.

`read_slices` asks a reader for every range this rank holds and checks that it fits. It changes nothing and does not
communicate, so that the ranks can agree on its outcome before one of them changes anything. `SliceLoad.install` then
writes what was read and makes it visible, which is collective. Between the two steps the values are in host memory: as
many bytes as this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ZeroStateError
from ..homes.home import Home, write
from ..plan.layout import LocalSlice
from ..step.masters import Master, write_parameters
from ..step.states import OptimizerStates, without_containers
from ..transports.errors import note_lost
from .layout import ModelLayout
from .shapes import Held, held_of_state
from .slices import COPY, Reader, State
from .templates import StateTemplates, is_single

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["SliceLoad", "publish_masters", "read_master", "read_slices"]


class SliceLoad:
    """Values that were read and checked, and the writes that install them."""

    def __init__(self, runtime: Runtime, inner: torch.optim.Optimizer) -> None:
        self._runtime, self._inner = runtime, inner
        self._writes: list[Callable[[], None]] = []
        self._installed: Callable[[], None] = lambda: None

    def call_when_installed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the model has the new values."""
        self._installed = callback

    def add(self, write: Callable[[], None]) -> None:
        """Call `write` when the values are installed."""
        self._writes.append(write)

    def write(self) -> None:
        """Write all values and release them. Nothing is made visible yet."""
        with torch.no_grad():
            self._writes.reverse()
            while self._writes:
                self._writes.pop()()

    def install(self) -> None:
        """Write all values and make them visible. Collective. Can be called only once, because values are released when
        they are written.
        """
        run, inner = self._runtime, self._inner
        with torch.no_grad():
            self.write()
            if hasattr(inner, "states_loaded"):  # optimizers that communicate by themselves count steps in their states
                inner.states_loaded()  # type: ignore[attr-defined]
            publish_masters(run)
        self._installed()


def publish_masters(runtime: Runtime) -> None:
    """Write the new values of masters and frozen parameters to the parameters and make them visible (collective)."""
    for unit in runtime.units:
        for group in unit.trainable:
            write_parameters(group)
        for group in unit.groups:
            group.note_replaced()
        runtime.publisher.publish(unit)
    runtime.publisher.finish()


def read_slices(
    runtime: Runtime,
    layout: ModelLayout,
    states: OptimizerStates,
    reader: Reader,
    *,
    from_masters: bool,
) -> SliceLoad:
    """Read everything this rank holds; nothing is changed yet, and no rank waits for another.

    Args:
        from_masters: read stored masters where there are some, otherwise stored parameters.

    Raises:
        ZeroStateError: stored states are not those this optimizer keeps, or have another form.
    """
    templates, load = StateTemplates(states.inner), SliceLoad(runtime, states.inner)
    for info in runtime.infos:
        if not info.trainable:
            _read_frozen(load, layout, reader, info.name)
            continue
        for master in layout.masters_of(info.name):
            read_master(load, states, reader, master, templates, from_masters=from_masters)
    groups = [group for unit in runtime.trainable_units() for group in unit.trainable]
    for keeper in runtime.errors:
        for group in groups:
            load.add(keeper.read_errors(group, reader))
    note_lost(reader, groups, runtime.errors)
    return load


def read_master(
    load: SliceLoad,
    states: OptimizerStates,
    reader: Reader,
    master: Master,
    templates: StateTemplates,
    *,
    from_masters: bool = True,
) -> None:
    """Read one master and its states; see `read_slices`."""
    _read_master(load, reader, master, from_masters)
    _read_states(load, states, reader, master, templates)


def _read_master(load: SliceLoad, reader: Reader, master: Master, from_masters: bool) -> None:
    start, stop = master.slice.start, master.slice.stop
    value = reader.master(master.name, start, stop) if from_masters else None
    if value is None:
        value = reader.param(master.name, start, stop)
    if value is not None and master.group.master is not None:
        load.add(_copy(master.name, master.group.master, master.slice, value))


def _read_frozen(load: SliceLoad, layout: ModelLayout, reader: Reader, name: str) -> None:
    for home, part in layout.homes_of(name):
        value = reader.param(name, part.start, part.stop)
        if value is not None:
            load.add(_copy(name, home, part, value))


def _copy(name: str, home: Home, part: LocalSlice, value: Any) -> Callable[[], None]:
    if not isinstance(value, torch.Tensor) or value.numel() != part.numel:
        got = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ZeroStateError(f"{name}: the reader gave {got}, expected a tensor of {part.numel} elements")
    return lambda: write(home, value, part.offset)


def _read_states(
    load: SliceLoad, states: OptimizerStates, reader: Reader, master: Master, templates: StateTemplates
) -> None:
    inner = states.inner
    stored = reader.state_keys(master.name)
    keys = [key for key in stored if "@" not in key]  # the others belong to ranks: only their optimizer reads them
    if not keys:
        return
    take = getattr(inner, "read_state_ranges", None)
    if take is not None:
        ranges = [key for key in stored if "@" in key and not key.startswith(COPY)]
        load.add(take(master.tensor, ranges, lambda k, a, b: reader.state(k, master.name, a, b)))
    kinds = states.of(master)
    if not any(isinstance(kind, torch.Tensor) for kind in kinds.values()):  # at most numbers of a constructor, no step
        kinds, containers = without_containers(templates.of(master)), templates.containers_of(master)
        load.add(lambda: states.make_containers(master, containers))
    held_of = {key: held_of_state(states, master, key, kinds.get(key)) for key in {*kinds, *keys}}
    # Of a small state some tensor slices have nothing, and where slices are saved alone, they have not saved it.
    nothing = {key for key, held in held_of.items() if held is not None and not prod(held.form)}
    _check_complete(inner, master, keys, {key: kind for key, kind in kinds.items() if key not in nothing})
    for key in keys:
        kind, held = kinds.get(key), held_of[key]
        if held is not None:
            _read_shaped(load, states, reader, master, key, held)
            continue
        value = reader.state(key, master.name, master.slice.start, master.slice.stop)
        if value is not None:
            _check_form(inner, master, key, kind, value)
            load.add(lambda m=master, k=key, kind=kind, value=value: states.set(m, k, _like(kind, value, m)))


def _read_shaped(
    load: SliceLoad, states: OptimizerStates, reader: Reader, master: Master, key: str, held: Held
) -> None:
    """A state with a shape of its own."""
    form = held.form
    value = reader.shaped_state(key, master.name, held.start, held.start + prod(form), held.shape)
    if value is None:
        return
    if value.numel() != prod(form):
        raise ZeroStateError(
            f"{master.name}: got {value.numel()} elements of optimizer state {key!r}, expected {prod(form)}, which is"
            f" what {type(states.inner).__name__} keeps here"
        )
    device = master.tensor.device
    load.add(lambda: states.set(master, key, value.detach().to(device=device, copy=True).reshape(form)))


def _check_complete(inner: Any, master: Master, keys: list[str], kinds: Mapping[str, Any]) -> None:
    """Require all states of a parameter, or none: a zero momentum with a variance that is not zero gives a wrong
    step.
    """
    # Optimizers that communicate by themselves fill in counters that a plain optimizer's checkpoint does not have.
    own_counters = hasattr(inner, "states_loaded")
    needed = [key for key, kind in kinds.items() if not (own_counters and is_single(kind))]
    missing = [key for key in needed if key not in keys]
    if missing:
        raise ZeroStateError(
            f"{master.name}: got the optimizer states {', '.join(sorted(keys))}; expected those of "
            f"{type(inner).__name__}, which also keeps {', '.join(sorted(missing))}; load without optimizer states to "
            "start them again"
        )


def _check_form(inner: Any, master: Master, key: str, kind: Any, value: State) -> None:
    numel = value.numel() if isinstance(value, torch.Tensor) else 1
    expected = 1 if is_single(kind) else master.numel
    if kind is not None and numel != expected:
        raise ZeroStateError(
            f"{master.name}: got {numel} elements of optimizer state {key!r}, expected {expected}, which is what "
            f"{type(inner).__name__} keeps here"
        )


def _like(kind: Any, value: State, master: Master) -> Any:
    """The value in the form that the optimizer keeps: a tensor of the master's or of the example's shape, or a
    number.
    """
    elementwise = not is_single(kind)
    if isinstance(value, torch.Tensor) and elementwise and value.numel() == master.numel:
        dtype = kind.dtype if isinstance(kind, torch.Tensor) else value.dtype
        return value.detach().to(device=master.tensor.device, dtype=dtype, copy=True).reshape(master.shape)
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(kind, torch.Tensor):
        shape = master.shape if elementwise else kind.shape
        return torch.full(shape, number, dtype=kind.dtype, device=kind.device)
    return type(kind)(number) if isinstance(kind, (int, float)) else number
