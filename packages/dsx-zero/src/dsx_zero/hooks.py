"""Puts the residency's methods on modules as hooks, outside whatever is compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .partitioned_unit import PartitionedUnit
from .residency import Residency

__all__ = ["UnitHooks"]


def side_outputs(module: nn.Module) -> list[torch.Tensor]:
    """Tensors of the running graph that a forward left on its modules (auxiliary losses): another way into its backward."""
    if not torch.is_grad_enabled():
        return []
    return [
        tensor
        for child in module.modules()
        for value in child.__dict__.values()
        if isinstance(value, (torch.Tensor, list, tuple))
        for tensor in ((value,) if isinstance(value, torch.Tensor) else value)
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
    ]


class UnitHooks:
    """The hooks of a sharded model: on each unit's module, and on the root to know where a forward ends.

    `keeps` is what has to live as long as the model uses the hooks.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[PartitionedUnit], residency: Residency, keeps: Any = None
    ) -> None:
        self._model, self._residency, self._keeps = model, residency, keeps
        self._handles: list[Any] = []
        self._by_module: dict[nn.Module, list[int]] = {model: []}
        for unit in units:
            for name in unit.plan.users:
                self._by_module.setdefault(model.get_submodule(name), []).append(unit.index)
        self._failures: list[BaseException | None] = []
        self._pauses = 0
        # A compiled module (``module.compile()``) traces its hooks; these must stay outside the graph.
        self._hooks: tuple[Any, Any] = (torch.compiler.disable(self._before), torch.compiler.disable(self._after))
        for module in self._by_module:
            self._register(module)

    def _register(self, module: nn.Module) -> None:
        before, after = self._hooks
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def add(self, module: nn.Module, unit: int) -> None:
        """Let ``module``'s forward use a unit besides its own (an external parameter)."""
        if module not in self._by_module:
            self._by_module[module] = []
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
        if self._pauses:
            return
        self._residency.enter_forward(root=module is self._model)
        self._failures.append(sys.exc_info()[1])
        for unit in self._by_module[module]:
            self._residency.before_forward(unit, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pauses:
            return
        # With ``always_call`` this also runs while an exception passes through; then it is one that was not there before.
        failed = self._failures and sys.exc_info()[1] is not self._failures.pop()
        for unit in reversed(self._by_module[module]):
            self._residency.after_forward(unit, (output, side_outputs(module)))
        self._residency.leave_forward(failed=bool(failed))
