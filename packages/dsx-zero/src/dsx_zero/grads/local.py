"""The gradients of one rank alone, in the dtype of their parameters: autograd's own `.grad` tensors are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_comm.lanes import Ticket

from ..homes.blocks import HostBlocks
from ..homes.home import Home, block_norm
from ..order.protocol import EditWatch, RowSum
from ..params.flat import FlatGroup, Part, Unit
from ..plan.layout import LocalSlice
from ..torch_names import current_graph_task_id, will_engine_execute_node
from .protocol import BackwardWatch
from .reductions import ReductionWatch
from .rows import refuse_sparse

__all__ = ["LocalGradients"]


def _multiplied(
    gradients: Callable[[], LocalGradients | None], watch: BackwardWatch, place: int, index: int, grad: torch.Tensor
) -> torch.Tensor | None:
    owner = gradients()
    return None if owner is None else owner.on_gradient(watch, place, index, grad)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running backward adds to the parameter's `.grad`: `torch.autograd.grad` runs the hooks, too."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return will_engine_execute_node(node)
    except RuntimeError:  # torch raises it if `torch.autograd.grad` was called for this parameter
        return False


class LocalGradients:
    """The gradients of one rank alone: autograd's own `.grad` tensors. Missing ones count as zeros."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._groups = [group for unit in units for group in unit.trainable]
        self._handles: list[Any] = []
        self._task, self._factor = -1, 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to do: nothing is reduced."""
        yield

    def follow(self, watch: BackwardWatch) -> None:
        """See `Gradients.follow`. If `watch` is needed, every parameter gets a hook."""
        if not watch.needed or self._handles:
            return
        me = weakref.ref(self)
        self._handles = [
            parameter.register_hook(partial(_multiplied, me, watch, place, index))
            for place, group in enumerate(self._groups)
            for index, parameter in enumerate(group.parameters)
            if parameter.requires_grad
        ]

    def on_gradient(self, watch: BackwardWatch, place: int, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient of parameter `index` of group `place` was computed. Returns its replacement, or None."""
        task = current_graph_task_id()
        if task != self._task:
            self._factor = watch.begin() if _accumulates(self._groups[place].parameters[index]) else 1.0
            self._task = task
        return None if self._factor == 1.0 else grad * self._factor

    def changed(self) -> None:
        """Nothing to do: nothing is cached."""

    def complete(self) -> None:
        """Nothing to do: gradients are always complete."""

    def complete_due(self) -> None:
        """Nothing to do: gradients are always complete."""

    def watch_edits(self, watch: EditWatch) -> None:
        """Nothing to do: there is one rank."""

    def agree_by(self, row_sum: RowSum) -> None:
        """Nothing to do: there is one rank."""

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(
        self, squares: Callable[[], float] | None = None, meanwhile: Callable[[], object] | None = None
    ) -> float | None:
        """Give parameters without a gradient zeros. There is no other rank."""
        for group in self._groups:
            for name, parameter in zip(group.layout.names, group.parameters):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                refuse_sparse(parameter.grad, name)
        return None

    def parts(
        self, group: FlatGroup, parts: Sequence[Part], blocks: HostBlocks | None = None, *, as_kept: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """See `Gradients.parts`. Where these gradients are used, nothing is offloaded."""
        del blocks, as_kept
        grads = [_grad(group.parameters[group.layout.index(part.name)]) for part in parts]
        if (master := group.master) is not None:
            grads = [grad.to(device=master.device, dtype=master.dtype) for grad in grads]
        return tuple(grad.reshape(-1)[part.slice.start : part.slice.stop] for grad, part in zip(grads, parts))

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """See `Gradients.norms`: the norm of every `.grad`."""
        return ((group.ranks, block_norm(_grad(p))) for group in self._groups for p in group.parameters if p.numel())

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """See `Gradients.read`."""
        grad = group.parameters[index].grad
        return None if grad is None else grad.view(-1)[part.start : part.stop]

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """See `Gradients.write`."""
        if (grad := self.read(group, index, part)) is not None:
            grad.copy_(values)

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """See `Gradients.unreduced`: with one rank there is nothing to reduce."""
        return None

    def has_new(self) -> bool:
        """False: no gradient would be lost, because every `.grad` stays where it is."""
        return False

    def has_any(self) -> bool:
        """False: no gradient would be lost."""
        return False

    def refuse_until_clear(self, why: str) -> None:
        """Nothing to do: no gradient is lost."""

    def clear(self) -> None:
        """Set every `.grad` to None."""
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """Every `.grad` that is not None."""
        return [p.grad for group in self._groups for p in group.parameters if p.grad is not None]

    def homes(self) -> list[Home]:
        """There are none: autograd keeps the gradients."""
        return []

    def idle_bytes(self) -> int:
        """No memory is kept."""
        return 0

    def drop_idle(self) -> None:
        """No memory is kept."""

    def expect_last(self) -> None:
        """Nothing to do: nothing is reduced."""

    def watch_reductions(self, watch: ReductionWatch) -> None:
        """Nothing to do: there are no reductions."""

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """There are none: autograd keeps the gradients."""
        return []

    def is_final(self, unit: int) -> bool:
        """False: it is not known."""
        return False

    def refuse_backwards(self, why: str | None) -> None:
        """Nothing to do: autograd itself refuses to add to a `.grad` that has no memory of its own."""


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("gradients were read before finish()")
    return parameter.grad
