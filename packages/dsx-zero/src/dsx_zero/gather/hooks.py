"""Puts the methods of `GatherLifetime` on modules as hooks, outside whatever is compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..module_hooks import ModuleHook
from ..params.partitioned_unit import PartitionedUnit
from .lifetime import GatherLifetime
from .side_outputs import attribute_tensors, watch_iterators

__all__ = ["UnitHooks"]


@dataclass
class _Running:
    """A hooked forward that has not returned.

    Attributes:
        error: the exception that was being handled when it began.
        side_outputs: what the hooked forwards inside it left on their modules.
    """

    error: BaseException | None
    side_outputs: list[torch.Tensor] = field(default_factory=list)


class UnitHooks:
    """The hooks of a sharded model: on each unit's module, and on the root to know where a forward ends.

    `keeps` is what has to live as long as the model uses the hooks.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[PartitionedUnit], lifetime: GatherLifetime, keeps: Any = None
    ) -> None:
        self._model, self._lifetime, self._keeps = model, lifetime, keeps
        self._handles: list[Any] = []
        self._names = {unit.index: unit.plan.names for unit in units}
        self._by_module = self._users(units)
        self._running: list[_Running] = []
        self._pauses = 0
        self._hooks = (ModuleHook(self._before), ModuleHook(self._after))
        for module in self._by_module:
            self._register(module)

    def _users(self, units: Sequence[PartitionedUnit]) -> dict[nn.Module, list[int]]:
        """The modules that have hooks, with the units that they use."""
        found: dict[nn.Module, list[int]] = {self._model: []}
        for unit in units:
            for name in unit.plan.users:
                found.setdefault(self._model.get_submodule(name), []).append(unit.index)
        return found

    def serve(self, units: Sequence[PartitionedUnit], lifetime: GatherLifetime, keeps: Any) -> None:
        """The model is laid out anew: do the same for these units. Hooks stay where they are, because torch has listed
        those of a forward that is about to begin.
        """
        before, names = self._by_module, self._names
        self._lifetime, self._keeps = lifetime, keeps
        self._names = {unit.index: unit.plan.names for unit in units}
        self._by_module = self._users(units)
        number_of = {name: index for index, found in self._names.items() for name in found}
        for module, used in before.items():
            for index in used:
                for name in names[index]:  # those of external parameters too
                    if name in number_of:
                        self.add(module, number_of[name], hooked=True)
        for module in self._by_module:
            if module not in before:
                self._register(module)

    def _register(self, module: nn.Module) -> None:
        before, after = self._hooks
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def add(self, module: nn.Module, unit: int, *, hooked: bool = False) -> None:
        """Let ``module``'s forward use a unit besides its own (an external parameter). ``hooked``: it has hooks."""
        if module not in self._by_module:
            self._by_module[module] = []
            if not hooked:
                self._register(module)
        if unit not in self._by_module[module]:
            self._by_module[module].append(unit)

    def drop(self, module: nn.Module, unit: int) -> None:
        """Undo ``add``."""
        if unit in self._by_module.get(module, ()):
            self._by_module[module].remove(unit)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside neither gather nor free: whoever pauses holds every unit."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pauses or module not in self._by_module:  # a shallow copy of a module has its hooks
            return
        self._lifetime.enter_forward(root=module is self._model)
        self._running.append(_Running(sys.exc_info()[1]))
        for unit in self._by_module[module]:
            self._lifetime.before_forward(unit, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._pauses or module not in self._by_module:
            return None
        # With ``always_call`` this also runs while an exception passes through; then it is one that was not there
        # before.
        running = self._running.pop() if self._running else _Running(None)
        failed = sys.exc_info()[1] is not running.error
        units = tuple(reversed(self._by_module[module]))
        left = self._side_outputs(module, running)
        uses = [(unit, self._lifetime.after_forward(unit, (output, left))) for unit in units]
        self._lifetime.leave_forward(failed=failed)
        if not uses or not torch.is_grad_enabled():
            return None
        if isinstance(output, torch.Tensor):
            return None
        watched = watch_iterators(output, partial(self._lifetime.watch_item, uses))
        return None if watched is output else watched

    def _side_outputs(self, module: nn.Module, running: _Running) -> list[torch.Tensor]:
        if not torch.is_grad_enabled():
            return []
        found = running.side_outputs + attribute_tensors(module, self._by_module)
        if self._running:
            self._running[-1].side_outputs += found
        return found
