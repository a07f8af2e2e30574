"""The one gradient path of all stages: from the arrival of gradients to the values that the optimizer reads.

Every trainable parameter has a hook that runs when its gradient has been accumulated. The gradient moves into its
unit's flat buffer. When the unit has had as many arrivals as in earlier backwards, its reduction starts while backward
goes on; before its first backward, one arrival per trainable parameter is expected. Reductions that have not started
when backward ends (unused parameters) start then.
`ReduceOrder` decides on the order of reductions, `Reductions` executes them, and `BackwardClock` tells when a backward
begins and ends. Gradients that arrive after their unit was reduced are kept, and reduced in a second pass at the step.

Changes that users make to `.grad` between two backwards (`model.zero_grad()`, `p.grad = None`, other tensors) are
noticed when the next backward begins, at the step, and whenever gradients are read.

With one rank, and gradients that accumulate in the dtype of their parameters, nothing is reduced (`local`): there are
no buffers, and no hook runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dsx_core.modules import ModuleHook, outside_graphs
from torch import nn

from ..errors import ZeroStateError
from ..order.backward import BackwardClock
from ..order.protocol import ReduceOrder
from ..torch_names import current_graph_task_id, tree_leaves
from .buffers import GroupGradients
from .local import NoReductions
from .protocol import BackwardWatch
from .reductions import Reductions
from .rows import RowGradients

__all__ = ["Gradients"]


class _AfterForward(ModuleHook):
    """The hook on the model. It has a weak reference: the gradients end with the optimizer, and the model may be
    sharded again.
    """

    def __init__(self, gradients: Callable[[], Gradients | None]) -> None:
        self._gradients = gradients

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._run(output)

    @outside_graphs
    def _run(self, output: Any) -> None:
        owner = self._gradients()
        if owner is not None:
            owner.on_forward(output)


class Gradients:
    """The gradients of one sharded model: when they arrive, and when they are complete. Their values are asked of
    `reductions`.

    Args:
        model: its forwards announce backwards.
        on_complete: called when a unit has had as many gradients as in earlier backwards.
        keeps_local: whether each rank keeps its own gradients in the running step.

    Attributes:
        reductions: the values, and how they are reduced.
        order: the order in which units are reduced, and by which the ranks agree at a step.
        refusal: why backwards raise a `ZeroStateError` now; None: they need not.
        lost: why backwards raise until `clear` is called, because they would add to gradients that are lost; or None.
    """

    def __init__(
        self,
        model: nn.Module,
        reductions: Reductions | NoReductions,
        order: ReduceOrder,
        clock: BackwardClock,
        *,
        on_complete: Callable[[int], None] | None = None,
        keeps_local: Callable[[], bool] | None = None,
    ) -> None:
        self.reductions, self.order, self._clock = reductions, order, clock
        self._on_complete, self._keeps_local = on_complete, keeps_local
        self._groups = reductions.groups
        self._by_unit = reductions.by_unit
        self._expected = self._count_trainable()
        """The number of arrivals after which a unit is reduced."""
        self._known: set[int] = set()
        """The units whose number of arrivals was seen in a backward. With reentrant checkpointing it is not the number
        of parameters: a parameter gets a gradient from each backward inside the backward.
        """
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._sync = self._reducing = True
        """Whether backwards reduce (they do not under `no_sync`), and whether the running one does (it does not in a
        step whose optimizer needs this rank's own gradients).
        """
        self._arriving: tuple[GroupGradients | RowGradients, int] | None = None
        """The parameter whose arrival announces the running backward, while it is being announced; else None."""
        self._watch: BackwardWatch | None = None
        self._factor: float | None = None
        self.refusal: str | None = None
        self.lost: str | None = None
        self._new = False
        """Whether a backward has begun since the last step."""
        self._completed, self._due = True, False
        self._last = self._nested = False
        self._trainable = dict.fromkeys(self._by_unit, 0)
        self._handles = list(self._register(model))
        clock.watch(self)

    def _register(self, model: nn.Module) -> Iterator[Any]:
        me: Callable[[], Gradients | None] = weakref.ref(self)
        for unit, groups in self._by_unit.items():
            for place, buffers in enumerate(groups):
                for index, parameter in enumerate(buffers.group.parameters):
                    yield parameter.register_post_accumulate_grad_hook(self._hook(me, unit, place, index))
        if isinstance(self.reductions, Reductions):
            hook: Any = _AfterForward(me)
            yield model.register_forward_hook(hook)

    def remove_hooks(self) -> None:
        """Remove all hooks from the model, and all gradients from its parameters."""
        for handle in self._handles:
            handle.remove()
        for buffers in self._groups:
            buffers.clear()

    def follow(self, watch: BackwardWatch) -> None:
        """Multiply the gradients of each backward by the factor of `watch`. Call it again if `watch.needed` changes."""
        self._watch = watch
        if isinstance(self.reductions, NoReductions):
            self._handles += self.reductions.follow(watch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the context backwards only accumulate."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # Hooks ------------------------------------------------------------------------------------------------------------

    def on_forward(self, output: Any) -> None:
        """The model has returned. Hooks on its outputs tell when the outermost backward begins."""
        if not torch.is_grad_enabled():
            return
        if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise ZeroStateError(
                "the sharded model runs inside DistributedDataParallel, and both average its gradients; call the model"
                " that dsx_zero.shard returned"
            )
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, grad: torch.Tensor) -> None:
        self._clock.enter(outermost=True)

    def begin_backward(self) -> None:
        """See `BackwardWatcher`. Gradients of a backward that an error stopped are kept, as autograd keeps them."""
        if (why := self.refusal or self.lost) is not None:
            raise ZeroStateError(why)
        if self.reductions.watch is not None:
            self.reductions.watch.begin_backward()
        self._factor, self._completed, self._due, self._new = None, False, False, True
        self._reducing = self._sync and not (self._keeps_local is not None and self._keeps_local())
        self._arrived = dict.fromkeys(self._arrived, 0)
        scaled = self._watch is None or self._watch.factor() == 1.0
        arriving = self._arriving
        for buffers in self._groups:
            buffers.notice(arriving[1] if arriving is not None and arriving[0] is buffers else None)
        if not scaled:
            for buffers in self.reductions.showing_reduced:
                if buffers.group not in self.reductions.rows:
                    buffers.hide_views()
        for rows in self.reductions.rows.values():
            if arriving is None or arriving[0] is not rows:
                rows.hide_views()  # autograd would add to the shown values

    @staticmethod
    def _hook(me: Callable[[], Gradients | None], unit: int, place: int, index: int) -> Callable[[torch.Tensor], None]:
        """The hook that runs when the gradient of parameter `index` of group `place` of `unit` has been accumulated.

        `me` is a weak reference: Python's collector does not see the references of a tensor's hooks, and a strong one
        would keep the parameters forever.
        """

        def arrived(_: torch.Tensor) -> None:
            # All in one function, because it runs for every parameter of every backward (test_python_calls.py).
            self = me()
            if self is None:
                return
            buffers = self._by_unit[unit][place]
            factor = self._factor if self._clock.running else None
            if factor is None:
                factor = self._first_arrival(buffers, index)
            buffers.accumulate(index, factor)
            count = self._arrived[unit] = self._arrived[unit] + 1
            if self._last and current_graph_task_id() != self._clock.task:
                self._nested = True
            if count == self._expected[unit]:
                if self._on_complete is not None and unit in self._known:
                    self._on_complete(unit)
                if self._reducing:
                    self.order.reduce(unit)

        return arrived

    def _first_arrival(self, buffers: GroupGradients | RowGradients, index: int) -> float:
        """The first gradient of the running backward has arrived. Returns the factor for all its gradients."""
        if not self._clock.running:
            self._arriving = (buffers, index)
            self._clock.enter()
            self._arriving = None
        self._factor = self._chosen_factor(buffers, index)
        return self._factor

    def _chosen_factor(self, buffers: GroupGradients | RowGradients, index: int) -> float:
        if self._watch is None:
            return 1.0
        try:
            factor = self._watch.begin()
        except BaseException:
            buffers.refuse(index)
            for hidden in self.reductions.showing_reduced:
                hidden.show_views()
            raise
        # The engine learns of a direct `loss.backward()` here, and may have opened `no_sync` for it.
        self._reducing = self._sync and not (self._keeps_local is not None and self._keeps_local())
        return factor

    def end_backward(self) -> None:
        """See `BackwardWatcher`: reduce the gradients that have arrived and are not being reduced."""
        for unit, arrived in self._arrived.items():
            if arrived > 0:
                self._expected[unit] = max(self._expected[unit], arrived) if unit in self._known else arrived
                self._known.add(unit)
        for buffers in self.reductions.showing_reduced:
            buffers.show_views()
        if not self._reducing:
            return
        self._due = True
        for unit in self.reductions.dirty():
            self.order.reduce(unit)
        self._clock.end_pass()
        self.reductions.wait()
        for buffers in self.reductions.showing_reduced:
            buffers.hide_unreduced()
        self.reductions.drop_idle()

    # Between backwards -----------------------------------------------------------------------------------------------

    def finish(
        self, squares: Callable[[], float] | None = None, meanwhile: Callable[[], object] | None = None
    ) -> float | None:
        """The optimizer steps now: complete every reduction, late gradients included. The sum over the ranks of
        `squares()`, which reads reduced gradients, or None where it has to be added up otherwise.

        `meanwhile()` reads reduced gradients too; it runs while the ranks exchange words, where they do. Its last call
        sees the gradients that the step uses.
        """
        self._clock.forget()
        self._last = False
        total = None
        for buffers in self._groups:
            buffers.notice()
        if self._keeps_local is not None and self._keeps_local():
            self.reductions.finish_alone()
        else:
            total = self.order.boundary(self.reductions.dirty, squares, meanwhile)
            self.reductions.wait()
        self._completed, self._new = True, False
        self.reductions.drop_idle()
        return total

    def complete(self, *, due: bool = False) -> None:
        """Between backward and step: reduce the gradients that have arrived so far.

        The first call after a backward is collective; further calls do nothing until the next backward.

        Args:
            due: only if the last backward reduces, and the order has left some of its reductions for the step (after a
                step without gradients, for example).
        """
        # At stage 0 one rank alone may read a gradient: it is a collective only if a reduction is missing.
        if self._completed or (due and not (self._due and (self.reductions.stage > 0 or self.reductions.dirty()))):
            return
        for buffers in self._groups:
            buffers.notice()
        if self._keeps_local is not None and self._keeps_local():
            self.reductions.finish_alone()
        else:
            self.order.complete(self.reductions.dirty)
            self.reductions.wait()
        self._completed = True
        self.reductions.drop_idle()

    def clear(self) -> None:
        """Forget all gradients."""
        self._due, self._new, self.lost = False, False, None
        self.reductions.clear()

    def has_new(self) -> bool:
        """Whether there are gradients since the last step (or `clear`) that would be lost with this object."""
        for buffers in self._groups:
            buffers.notice()
        return (self._new and self.reductions.has_any()) or bool(self.reductions.dirty())

    def expect_last(self) -> None:
        """Note that the next backward is the last one before the step."""
        self._last, self._nested = True, False
        self._arrived = dict.fromkeys(self._arrived, 0)  # it had the arrivals of the backward before
        self._trainable = self._count_trainable()

    def _count_trainable(self) -> dict[int, int]:
        """The number of parameters of each unit that need gradients at present."""
        found = {}
        for unit, groups in self._by_unit.items():
            parameters = (parameter for buffers in groups for parameter in buffers.group.parameters)
            found[unit] = sum(parameter.requires_grad for parameter in parameters)
        return found

    def is_final(self, unit: int) -> bool:
        """Whether every trainable parameter of the unit has its gradient of the running backward, this backward is the
        last one before the step, and no further gradient can arrive on this rank. It is False if reentrant
        checkpointing runs backwards inside the backward: then a parameter gets several gradients.
        """
        return self._last and not self._nested and self._arrived[unit] == self._trainable[unit]
