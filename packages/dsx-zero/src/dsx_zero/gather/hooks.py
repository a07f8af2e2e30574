"""The hooks of stage 3 on modules, which call `GatherLifetime`. They stay outside of compiled graphs."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from dsx_core.modules import ModuleHook, outside_graphs
from torch import nn

from ..params.partitioned_unit import PartitionedUnit
from .iterators import watch_iterators
from .lifetime import GatherLifetime

__all__ = ["UnitHooks"]

_PLAIN = frozenset({bool, int, float, str, type(None), dict, set})
"""Types of nearly all attributes of modules, which are not searched. The lookup is faster than `isinstance`."""


@dataclass
class _Running:
    """A hooked forward that has not returned.

    Attributes:
        error: the exception that was being handled when the forward began.
        side_outputs: tensors that the hooked forwards inside it stored on their modules.
    """

    error: BaseException | None
    side_outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Forwards:
    """The state that the hooks of one model share.

    Attributes:
        model: the model.
        lifetime: is told of forwards.
        keeps: an object that must live as long as the hooks.
        by_module: the indices of the units that each hooked module uses.
        running: the hooked forwards that have not returned, the innermost last.
        pauses: number of `UnitHooks.paused` contexts that are open.
    """

    model: nn.Module
    lifetime: GatherLifetime
    keeps: Any
    by_module: dict[nn.Module, list[int]]
    running: list[_Running] = field(default_factory=list)
    pauses: int = 0


def _side_outputs(module: nn.Module, stop: Container[nn.Module]) -> list[torch.Tensor]:
    """Tensors with a graph among the attributes of a module and of those below it, down to the modules in `stop`.

    Backward can enter a module through them although its forward did not return them (auxiliary losses). Attributes
    may be tensors, or lists and tuples of them. Each module is searched once per forward: by the innermost hooked
    module around it, which passes on what it finds.
    """
    found: list[torch.Tensor] = []
    left = [module]
    while left:
        attributes = left.pop().__dict__
        for child in attributes["_modules"].values():
            if child is not None and child not in stop:
                left.append(child)
        for value in attributes.values():
            if type(value) not in _PLAIN and isinstance(value, (torch.Tensor, list, tuple)):
                for item in (value,) if isinstance(value, torch.Tensor) else value:
                    if isinstance(item, torch.Tensor) and item.grad_fn is not None:
                        found.append(item)
    return found


class _BeforeForward(ModuleHook):
    def __init__(self, forwards: _Forwards) -> None:
        self._forwards = forwards

    @outside_graphs
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        forwards = self._forwards
        units = forwards.by_module.get(module)
        if forwards.pauses or units is None:  # a shallow copy of a module has its hooks, but is not in the table
            return
        forwards.running.append(_Running(sys.exc_info()[1]))
        forwards.lifetime.before_forward(units, (args, kwargs), root=module is forwards.model)


class _AfterForward(ModuleHook):
    def __init__(self, forwards: _Forwards) -> None:
        self._forwards = forwards

    @outside_graphs
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        forwards = self._forwards
        units = forwards.by_module.get(module)
        if forwards.pauses or units is None:
            return None
        # With ``always_call`` this also runs when the forward raises. Then the exception being handled is another one
        # than before.
        running = forwards.running.pop() if forwards.running else _Running(None)
        failed = sys.exc_info()[1] is not running.error
        traced = torch.is_grad_enabled()
        left: list[torch.Tensor] = []
        if traced:
            left = running.side_outputs + _side_outputs(module, forwards.by_module)
            if forwards.running:
                forwards.running[-1].side_outputs += left
        uses = forwards.lifetime.after_forward(units[::-1], (output, left) if left else output, failed=failed)
        if not uses or not traced or isinstance(output, torch.Tensor):
            return None
        watched = watch_iterators(output, partial(forwards.lifetime.watch_item, uses))
        return None if watched is output else watched


class UnitHooks:
    """The hooks of a sharded model: on each unit's modules, and on the root to see where a forward ends.

    Args:
        keeps: an object that must live as long as the hooks.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[PartitionedUnit], lifetime: GatherLifetime, keeps: Any = None
    ) -> None:
        self._handles: list[Any] = []
        self._names = {unit.index: unit.plan.names for unit in units}
        self._forwards = _Forwards(model, lifetime, keeps, _users(model, units))
        self._hooks: tuple[Any, Any] = (_BeforeForward(self._forwards), _AfterForward(self._forwards))
        for module in self._forwards.by_module:
            self._register(module)

    def serve(self, units: Sequence[PartitionedUnit], lifetime: GatherLifetime, keeps: Any) -> None:
        """The model gets a new layout: serve these units from now on.

        The hooks stay the same objects, because torch has already listed the hooks of a forward that is about to begin.
        """
        forwards, names = self._forwards, self._names
        before = forwards.by_module
        forwards.lifetime, forwards.keeps = lifetime, keeps
        forwards.by_module = _users(forwards.model, units)
        self._names = {unit.index: unit.plan.names for unit in units}
        number_of = {name: index for index, found in self._names.items() for name in found}
        for module, used in before.items():
            for index in used:
                for name in names[index]:  # external parameters, too
                    if name in number_of:
                        self.add(module, number_of[name], hooked=True)
        for module in forwards.by_module:
            if module not in before:
                self._register(module)

    def _register(self, module: nn.Module) -> None:
        before, after = self._hooks
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def add(self, module: nn.Module, unit: int, *, hooked: bool = False) -> None:
        """Gather a unit for ``module``'s forward, besides its own units (an external parameter).

        Args:
            hooked: ``module`` has the hooks already.
        """
        by_module = self._forwards.by_module
        if module not in by_module:
            by_module[module] = []
            if not hooked:
                self._register(module)
        if unit not in by_module[module]:
            by_module[module].append(unit)

    def drop(self, module: nn.Module, unit: int) -> None:
        """Undo ``add``."""
        if unit in self._forwards.by_module.get(module, ()):
            self._forwards.by_module[module].remove(unit)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context forwards neither gather nor free: the caller has gathered every unit."""
        self._forwards.pauses += 1
        try:
            yield
        finally:
            self._forwards.pauses -= 1


def _users(model: nn.Module, units: Sequence[PartitionedUnit]) -> dict[nn.Module, list[int]]:
    """The modules that need hooks, with the indices of the units that they use."""
    found: dict[nn.Module, list[int]] = {model: []}
    for unit in units:
        for name in unit.plan.users:
            found.setdefault(model.get_submodule(name), []).append(unit.index)
    return found
