"""The gradients of one rank alone, in the dtype of their parameters: autograd's own `.grad` tensors are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_comm.lanes import Ticket

from ..homes.blocks import HostBlocks
from ..homes.home import Home, block_norm
from ..params.flat import FlatGroup, Part, Unit
from ..plan.layout import LocalSlice
from ..torch_names import current_graph_task_id, will_engine_execute_node
from .buffers import GroupGradients
from .protocol import BackwardWatch, ReductionWatch
from .rows import RowGradients, refuse_sparse

__all__ = ["NoReductions"]


def _multiplied(
    reductions: Callable[[], NoReductions | None], watch: BackwardWatch, place: int, index: int, grad: torch.Tensor
) -> torch.Tensor | None:
    owner = reductions()
    return None if owner is None else owner.on_gradient(watch, place, index, grad)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running backward adds to the parameter's `.grad`: `torch.autograd.grad` runs the hooks, too."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return will_engine_execute_node(node)
    except RuntimeError:  # torch raises it if `torch.autograd.grad` was called for this parameter
        return False


class NoReductions:
    """Takes the place of `Reductions` where nothing is reduced: no gradient is copied, none is in a buffer. Missing
    ones count as zeros.
    """

    stage = 0
    groups: tuple[GroupGradients | RowGradients, ...] = ()
    showing_reduced: tuple[GroupGradients | RowGradients, ...] = ()
    by_unit: Mapping[int, list[GroupGradients | RowGradients]] = {}
    rows: Mapping[FlatGroup, RowGradients] = {}
    watch: ReductionWatch | None = None

    def __init__(self, units: Sequence[Unit]) -> None:
        self._groups = [group for unit in units for group in unit.trainable]
        self._followed = False
        self._task, self._factor = -1, 1.0

    def follow(self, watch: BackwardWatch) -> list[Any]:
        """See `Gradients.follow`. If `watch` is needed, every parameter gets a hook; the handles of these."""
        if not watch.needed or self._followed:
            return []
        self._followed, me = True, weakref.ref(self)
        return [
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

    def dirty(self) -> list[int]:
        """None: there is no gradient that a reduction would have to take."""
        return []

    def wait(self) -> None:
        """Give parameters without a gradient zeros."""
        for group in self._groups:
            for name, parameter in zip(group.layout.names, group.parameters):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                refuse_sparse(parameter.grad, name)

    def finish_alone(self) -> None:
        """See `wait`."""
        self.wait()

    def parts(
        self, group: FlatGroup, parts: Sequence[Part], blocks: HostBlocks | None = None, *, as_kept: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """See `Reductions.parts`. Where these gradients are used, nothing is offloaded."""
        del blocks, as_kept
        grads = [_grad(group.parameters[group.layout.index(part.name)]) for part in parts]
        if (master := group.master) is not None:
            grads = [grad.to(device=master.device, dtype=master.dtype) for grad in grads]
        return tuple(grad.reshape(-1)[part.slice.start : part.slice.stop] for grad, part in zip(grads, parts))

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """See `Reductions.norms`: the norm of every `.grad`."""
        return ((group.ranks, block_norm(_grad(p))) for group in self._groups for p in group.parameters if p.numel())

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """See `Reductions.read`."""
        grad = group.parameters[index].grad
        return None if grad is None else grad.view(-1)[part.start : part.stop]

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """See `Reductions.write`."""
        if (grad := self.read(group, index, part)) is not None:
            grad.copy_(values)

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """See `Reductions.unreduced`: with one rank there is nothing to reduce."""
        return None

    def has_any(self) -> bool:
        """False: no gradient would be lost with this object, because every `.grad` stays where it is."""
        return False

    def changed(self) -> None:
        """Nothing to do: nothing is cached."""

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

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """There are none: autograd keeps the gradients."""
        return []


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("gradients were read before finish()")
    return parameter.grad
