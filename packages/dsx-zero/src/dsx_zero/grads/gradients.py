"""The one gradient path of all stages: from the arrival of gradients to the values that the optimizer reads.

Every trainable parameter has a hook that runs when its gradient has been accumulated. The gradient moves into its
unit's flat buffer. When the unit has had as many arrivals as in earlier backwards, its reduction starts while backward
goes on; before its first backward, one arrival per trainable parameter is expected. Reductions that have not started
when backward ends (unused parameters) start then.
`ReduceOrder` decides on the order of reductions, `Reductions` executes them, and `BackwardClock` tells when a backward
begins and ends. Gradients that arrive after their unit was reduced are kept, and reduced in a second pass at the step.

Changes that users make to `.grad` between two backwards (`model.zero_grad()`, `p.grad = None`, other tensors) are
noticed when the next backward begins, at the step, and whenever gradients are read.

With one rank, and gradients that accumulate in the dtype of their parameters, none of this is needed:
`LocalGradients` reads autograd's `.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import dsx_comm
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ZeroStateError
from ..homes.home import Home
from ..lanes import Ticket
from ..module_hooks import CallingHook
from ..order.backward import BackwardClock
from ..order.protocol import EditWatch
from ..params.flat import FlatGroup, Part, Unit
from ..plan.layout import LocalSlice
from .block_norm import block_norm
from .buffers import GroupGradients, refuse_sparse
from .reductions import Reductions, ReductionWatch
from .rows import RowGradients

__all__ = ["BackwardWatch", "Gradients", "LocalGradients", "ReduceOrder", "ReducedGradients"]

_T = TypeVar("_T")


class ReduceOrder(Protocol):
    """Decides, equally on all ranks, when each unit is reduced. Its executor calls `Reductions.run_reduce`."""

    def reduce(self, unit: int) -> None:
        """This rank has as many gradients of the unit as in the step before, or backward has ended."""
        ...

    def end_backward(self) -> None:
        """The outermost backward has ended."""
        ...

    def boundary(
        self,
        pending: Callable[[], Sequence[int]],
        squares: Callable[[], float] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> float | None:
        """Step boundary. `pending()` gives the units whose gradients no reduction has taken yet; the sum of `squares()`
        over the ranks, which travels with what they agree on. `meanwhile()` is called while that is under way.
        """
        ...

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        """Between backward and step: reduce what is pending on any rank. Every rank calls it."""
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """From now on compare the words of `watch` over the ranks at every boundary."""
        ...


class BackwardWatch(Protocol):
    """Lets the object that scales losses correct, or refuse, a backward whose loss was not scaled."""

    @property
    def needed(self) -> bool:
        """Whether the gradients of such a backward would be wrong at present."""
        ...

    def factor(self) -> float:
        """The factor for the gradients of the running backward; 0.0 if `begin` will refuse it."""
        ...

    def begin(self) -> float:
        """The first gradient of the running backward has arrived. Returns the factor; raises to refuse it."""
        ...


class Gradients(Protocol):
    """The gradients as the optimizer uses them."""

    def no_sync(self) -> Any: ...

    def finish(
        self, squares: Callable[[], float] | None = None, meanwhile: Callable[[], object] | None = None
    ) -> float | None:
        """The optimizer steps now: complete every reduction. The sum over the ranks of `squares()`, which reads reduced
        gradients, or None where it has to be added up otherwise.

        `meanwhile()` reads reduced gradients too; it runs while the ranks exchange words, where they do. Its last call
        sees the gradients that the step uses.
        """
        ...

    def complete(self) -> None:
        """Between backward and step: reduce the gradients that have arrived so far.

        The first call after a backward is collective; further calls do nothing until the next backward.
        """
        ...

    def complete_due(self) -> None:
        """Call `complete` if the last backward reduces, and the order has left some of its reductions for the step
        (after a step without gradients, for example). Collective, as `complete`.
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """From now on compare over the ranks, at each step, what users wrote into parameters."""
        ...

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """The gradients of these parts of the group's parameters, 1-D, in the dtype and on the device of the masters.

        Args:
            parts: in order of their offsets.
        """
        ...

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """The L2 norms (0-dim, fp32 or fp64) of the buffers that together have every gradient that this rank steps,
        each once; and the ranks that share each buffer. A buffer is freed before the next one is read.
        """
        ...

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """The reduced gradient of the part of a parameter that this rank steps, 1-D; None if there is none."""
        ...

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """Set the gradient that `read` returns. If there is none, nothing happens."""
        ...

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """This rank's own gradient of a parameter that no reduction has taken, in the parameter's shape; None if there
        is none.
        """
        ...

    def clear(self) -> None: ...

    def has_new(self) -> bool:
        """Whether there are gradients since the last step (or `clear`) that would be lost with this object."""
        ...

    def has_any(self) -> bool:
        """Whether there are gradients, stepped or not, that would be lost with this object."""
        ...

    def refuse_until_clear(self, why: str) -> None:
        """Earlier gradients are lost: refuse backwards, which would add to them, until `clear` is called.

        Args:
            why: text of the `ZeroStateError`.
        """
        ...

    def changed(self) -> None:
        """Note that gradients were written."""
        ...

    def follow(self, watch: BackwardWatch) -> None:
        """Multiply the gradients of each backward by the factor of `watch`. Call it again if `watch.needed` changes."""
        ...

    def remove_hooks(self) -> None: ...

    def tensors(self) -> list[torch.Tensor]: ...

    def homes(self) -> list[Home]:
        """The homes of reduced gradients."""
        ...

    def idle_bytes(self) -> int: ...

    def drop_idle(self) -> None:
        """Free the memory that is kept for the buffers of later backwards."""
        ...

    def expect_last(self) -> None:
        """Note that the next backward is the last one before the step."""
        ...

    def watch_reductions(self, watch: ReductionWatch) -> None:
        """Tell `watch` of every reduction from now on."""
        ...

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """For each trainable group of a unit: the home of the reduced gradients, and the ticket to wait for before
        another thread reads them there.
        """
        ...

    def is_final(self, unit: int) -> bool:
        """Whether every trainable parameter of the unit has its gradient of the running backward, this backward is the
        last one before the step, and no further gradient can arrive on this rank.
        """
        ...

    def refuse_backwards(self, why: str | None) -> None:
        """Make backwards raise a `ZeroStateError` with this text; None: allow backwards again."""
        ...


class ReducedGradients:
    """Gradients that are reduced over ranks into flat buffers."""

    def __init__(
        self,
        model: nn.Module,
        reductions: Reductions,
        order: ReduceOrder,
        clock: BackwardClock,
        *,
        on_complete: Callable[[int], None] | None = None,
        keeps_local: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reductions, self._order, self._clock = reductions, order, clock
        self.parts = reductions.parts
        """See `Gradients.parts`. It is the method itself, because it is called for every group in every step."""
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
        self._refused: str | None = None
        self._gone: str | None = None
        self._new = False
        """Whether a backward has begun since the last step."""
        self._completed, self._due = True, False
        self._last = self._nested = False
        self._trainable = dict.fromkeys(self._by_unit, 0)
        self._handles = list(self._register(model))
        clock.watch(self)

    def _register(self, model: nn.Module) -> Iterator[Any]:
        me: Callable[[], ReducedGradients | None] = weakref.ref(self)
        for unit, groups in self._by_unit.items():
            for place, buffers in enumerate(groups):
                for index, parameter in enumerate(buffers.group.parameters):
                    yield parameter.register_post_accumulate_grad_hook(self._hook(me, unit, place, index))
        yield model.register_forward_hook(CallingHook(partial(_returned, me)))

    def remove_hooks(self) -> None:
        """Remove all hooks from the model, and all gradients from its parameters."""
        for handle in self._handles:
            handle.remove()
        for buffers in self._groups:
            buffers.clear()

    def follow(self, watch: BackwardWatch) -> None:
        """See `Gradients.follow`."""
        self._watch = watch

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
        if (why := self._refused or self._gone) is not None:
            raise ZeroStateError(why)
        if self._reductions.watch is not None:
            self._reductions.watch.begin_backward()
        self._factor, self._completed, self._due, self._new = None, False, False, True
        self._reducing = self._sync and not self._keeps_local()
        self._arrived = dict.fromkeys(self._arrived, 0)
        scaled = self._watch is None or self._watch.factor() == 1.0
        arriving = self._arriving
        for buffers in self._groups:
            buffers.notice(arriving[1] if arriving is not None and arriving[0] is buffers else None)
        if not scaled:
            for buffers in self._reductions.showing_reduced:
                if buffers.group not in self._reductions.rows:
                    buffers.hide_views()
        for rows in self._reductions.rows.values():
            if arriving is None or arriving[0] is not rows:
                rows.hide_views()  # autograd would add to the shown values

    @staticmethod
    def _hook(
        me: Callable[[], ReducedGradients | None], unit: int, place: int, index: int
    ) -> Callable[[torch.Tensor], None]:
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
            if self._last and torch._C._current_graph_task_id() != self._clock.task:
                self._nested = True
            if count == self._expected[unit]:
                if self._on_complete is not None and unit in self._known:
                    self._on_complete(unit)
                if self._reducing:
                    self._order.reduce(unit)

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
            for hidden in self._reductions.showing_reduced:
                hidden.show_views()
            raise
        # The engine learns of a direct `loss.backward()` here, and may have opened `no_sync` for it.
        self._reducing = self._sync and not self._keeps_local()
        return factor

    def end_backward(self) -> None:
        """See `BackwardWatcher`: reduce the gradients that have arrived and are not being reduced."""
        for unit, arrived in self._arrived.items():
            if arrived > 0:
                self._expected[unit] = max(self._expected[unit], arrived) if unit in self._known else arrived
                self._known.add(unit)
        for buffers in self._reductions.showing_reduced:
            buffers.show_views()
        if not self._reducing:
            return
        self._due = True
        for unit in self._reductions.dirty():
            self._order.reduce(unit)
        self._clock.end_pass()
        self._reductions.wait()
        for buffers in self._reductions.showing_reduced:
            buffers.hide_unreduced()
        self._reductions.drop_idle()

    # Between backwards -----------------------------------------------------------------------------------------------

    def finish(
        self, squares: Callable[[], float] | None = None, meanwhile: Callable[[], object] | None = None
    ) -> float | None:
        """Complete every reduction, late gradients included. See `Gradients.finish`."""
        self._clock.forget()
        self._last = False
        total = None
        for buffers in self._groups:
            buffers.notice()
        if self._keeps_local():
            self._reductions.finish_alone()
        else:
            asked = None if squares is None else partial(self._reduced, squares)
            beside = None if meanwhile is None else partial(self._reduced, meanwhile)
            total = self._order.boundary(self._reductions.dirty, asked, beside)
            self._reductions.wait()
        self._completed, self._new = True, False
        self._reductions.drop_idle()
        return total

    def _reduced(self, read: Callable[[], _T]) -> _T:
        """`read()` of gradients whose reductions are complete."""
        self._reductions.wait()
        return read()

    def watch_edits(self, watch: EditWatch) -> None:
        """See `Gradients.watch_edits`."""
        self._order.watch_edits(watch)

    def complete(self) -> None:
        """See `Gradients.complete`."""
        if self._completed:
            return
        for buffers in self._groups:
            buffers.notice()
        if self._keeps_local():
            self._reductions.finish_alone()
        else:
            self._order.complete(self._reductions.dirty)
            self._reductions.wait()
        self._completed = True
        self._reductions.drop_idle()

    def complete_due(self) -> None:
        """See `Gradients.complete_due`."""
        # At stage 0 one rank alone may read a gradient: it is a collective only if a reduction is missing.
        if self._due and (self._reductions.stage > 0 or self._reductions.dirty()):
            self.complete()

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """See `Gradients.norms`: the norms of the reduced buffers."""
        return self._reductions.norms()

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """See `Gradients.read`."""
        return self._reductions.read(group, part)

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """See `Gradients.write`."""
        self._reductions.write(group, part, values)

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """See `Gradients.unreduced`."""
        buffers = self._reductions.of(group)
        buffers.notice()
        return buffers.unreduced(index)

    def changed(self) -> None:
        """See `Gradients.changed`."""
        self._reductions.changed()

    def clear(self) -> None:
        """Forget all gradients."""
        self._due, self._new, self._gone = False, False, None
        self._reductions.clear()

    def has_new(self) -> bool:
        """See `Gradients.has_new`."""
        for buffers in self._groups:
            buffers.notice()
        return (self._new and self.has_any()) or bool(self._reductions.dirty())

    def has_any(self) -> bool:
        """See `Gradients.has_any`."""
        return any(buffers.has_any() for buffers in self._groups)

    def refuse_until_clear(self, why: str) -> None:
        """See `Gradients.refuse_until_clear`."""
        self._gone = why

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are kept for gradients."""
        return self._reductions.tensors()

    def homes(self) -> list[Home]:
        """See `Gradients.homes`."""
        return self._reductions.homes()

    def idle_bytes(self) -> int:
        """Bytes of memory that is kept for the buffers of later backwards."""
        return self._reductions.idle_bytes()

    def drop_idle(self) -> None:
        """See `Gradients.drop_idle`."""
        self._reductions.drop_idle()

    def expect_last(self) -> None:
        """See `Gradients.expect_last`."""
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

    def watch_reductions(self, watch: ReductionWatch) -> None:
        """See `Gradients.watch_reductions`."""
        self._reductions.watch = watch

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """See `Gradients.reduced`."""
        return self._reductions.reduced(unit)

    def is_final(self, unit: int) -> bool:
        """See `Gradients.is_final`. It is False if reentrant checkpointing runs backwards inside the backward: then a
        parameter gets several gradients.
        """
        return self._last and not self._nested and self._arrived[unit] == self._trainable[unit]

    def refuse_backwards(self, why: str | None) -> None:
        """See `Gradients.refuse_backwards`."""
        self._refused = why


def _returned(gradients: Callable[[], ReducedGradients | None], module: nn.Module, args: Any, output: Any) -> None:
    # A weak reference, as above: the gradients end with the optimizer, and the model may be sharded again.
    owner = gradients()
    if owner is not None:
        owner.on_forward(output)


def _multiplied(
    gradients: Callable[[], LocalGradients | None], watch: BackwardWatch, place: int, index: int, grad: torch.Tensor
) -> torch.Tensor | None:
    owner = gradients()
    return None if owner is None else owner.on_gradient(watch, place, index, grad)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running backward adds to the parameter's `.grad`: `torch.autograd.grad` runs the hooks, too."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
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
        task = torch._C._current_graph_task_id()
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

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """See `Gradients.parts`."""
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
