"""The one gradient path of all stages: from autograd's arrivals to the values the optimizer reads.

Every trainable parameter has a hook that runs when its gradient has been accumulated. The gradient moves into its
unit's flat buffer; when the unit has seen as many arrivals as the step before, its reduction starts while backward goes
on. What has not started when backward ends (an unused parameter, the first step) starts then. The order of reductions
is the business of `ReduceOrder`.

When does backward end? Reentrant checkpointing runs backwards inside backwards, and a hook cannot tell which one it is
in. So the outputs of the model carry a hook too: it runs first, in the outermost one. A loss that does not come from
the model's own outputs is noticed by its first gradient. Gradients that come after their unit was reduced are kept and
reduced in a second pass at the step.

What users do to `.grad` between two backwards (`model.zero_grad()`, `p.grad = None`, other tensors) is noticed when the
next backward begins, at the step, and whenever gradients are read.

With one rank and no accumulation dtype of its own nothing of this is needed: `LocalGradients` reads autograd's `.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import dsx_comm
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ZeroStateError
from ..homes.home import Home, read, write
from ..homes.tiers import Tier
from ..lanes import Lane
from ..module_hooks import ModuleHook
from ..order.agreed import EditWatch
from ..params.flat import FlatGroup, Part, Unit
from ..params.memory import Kind, Memory, OrdinaryMemory
from ..plan.layout import LocalSlice
from ..precision import Precision
from .access import GradientAccess
from .buffers import GroupGradients, refuse_sparse
from .reduction import LocalReducer, ReductionEngine

__all__ = ["BackwardWatch", "Gradients", "LocalGradients", "ReduceOrder", "ReducedGradients"]

IN_FLIGHT = 2
"""From stage 2 on, units whose reductions may be under way at once: one on the wire, one being filled behind it. More
would hold more whole buffers. Stages 0-1 keep theirs anyway, so there backward never waits.
"""


class ReduceOrder(Protocol):
    """Decides, equally on all ranks, when each unit is reduced. It calls `run_reduce` of what it was bound to."""

    def reduce(self, unit: int) -> None:
        """This rank has the unit's gradients: all that it had in the step before, or backward has ended."""
        ...

    def end_backward(self) -> None:
        """The outermost backward has ended."""
        ...

    def boundary(self, pending: Callable[[], Sequence[int]]) -> None:
        """Step boundary. `pending()` gives the units whose gradients no reduction has taken yet."""
        ...

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        """Between backward and step: reduce what is pending on any rank. Every rank calls it."""
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """Compare its words at every boundary."""
        ...


class BackwardWatch(Protocol):
    """Whoever scales losses has a word on backwards whose loss was not scaled."""

    @property
    def needed(self) -> bool:
        """Whether such a backward can be wrong at the moment."""
        ...

    def factor(self) -> float:
        """What the gradients of the running backward are to be multiplied with; 0.0 if `begin` will refuse it."""
        ...

    def begin(self) -> float:
        """The first gradient of the running backward has arrived; the factor. May raise, to refuse that backward."""
        ...


class Gradients(Protocol):
    """What the optimizer needs of gradients."""

    def no_sync(self) -> Any: ...

    def finish(self) -> None:
        """The optimizer steps now: complete every reduction."""
        ...

    def complete(self) -> None:
        """Between backward and step: reduce what has arrived so far. Collective after a backward, until the next
        one.
        """
        ...

    def complete_due(self) -> None:
        """`complete` if the last backward was one that reduces, and the ranks' agreement left reductions of it for the
        step (after a step without gradients, for instance). Collective, as `complete`.
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """At each step compare over the ranks what users wrote into parameters."""
        ...

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """Gradients of these parts of the group's parameters (in order of their offsets), 1-D, in the dtype and on the
        device of its masters.
        """
        ...

    def blocks(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """Tensors that together hold every gradient this rank steps with, once each, for norms, and who shares them."""
        ...

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """The reduced gradient of what this rank steps of a parameter (`part`), 1-D; None when there is none."""
        ...

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """Set what `read` gives, where there is something."""
        ...

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """This rank's own gradient of a parameter, as far as no reduction has taken it, in the parameter's shape;
        None where there is none.
        """
        ...

    def clear(self) -> None: ...

    def changed(self) -> None:
        """Gradients were written."""
        ...

    def follow(self, watch: BackwardWatch) -> None:
        """Multiply the gradients of each backward with what `watch` says. To be called again when its `needed`
        changes.
        """
        ...

    def remove_hooks(self) -> None: ...

    def tensors(self) -> list[torch.Tensor]: ...

    def homes(self) -> list[Home]:
        """Where reduced gradients live."""
        ...

    def idle_bytes(self) -> int: ...


class ReducedGradients:
    """Gradients that are reduced over ranks into flat buffers."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        stage: int,
        precision: Precision,
        reducer: Callable[[dsx_comm.RankSet], ReductionEngine],
        order: ReduceOrder,
        expose: bool,
        norm_groups: Sequence[Any] = (),
        on_complete: Callable[[int], None] | None = None,
        overlap: bool = True,
        keeps_local: Callable[[], bool] = lambda: False,
        memory: Callable[[dsx_comm.RankSet], Memory] = lambda ranks: OrdinaryMemory(),
        tier: Tier | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._overlap, self._keeps_local = overlap, keeps_local
        kinds: dict[dsx_comm.RankSet, list[Kind]] = {}
        for unit in units:
            for group in unit.trainable:
                kind = (group.layout.numel, precision.gradient_dtype(group.key.dtype), group.key.device)
                kinds.setdefault(group.ranks, []).append(kind)
        # Stages 0-1 keep their buffers for good, so there backward never waits for one.
        self._limit = IN_FLIGHT if stage >= 2 else len(units)
        self._pools = {
            ranks: memory(ranks).pool(found, idle=IN_FLIGHT if stage >= 2 else len(found))
            for ranks, found in kinds.items()
        }
        self._order, self._on_complete = order, on_complete
        self._access = GradientAccess(self.complete, divided=stage > 0, norm_groups=norm_groups)
        reducers = {ranks: reducer(ranks) for ranks in kinds}
        self._of: dict[FlatGroup, GroupGradients] = {}
        self._by_unit: dict[int, list[GroupGradients]] = {}
        self._names = {unit.index: f"{unit.plan}, gradients" for unit in units}
        for unit in units:
            for group in unit.trainable:
                buffers = GroupGradients(
                    group,
                    dtype=precision.gradient_dtype(group.key.dtype),
                    wire=precision.wire_dtype(group.key.dtype),
                    stage=stage,
                    reducer=reducers[group.ranks],
                    pool=self._pools[group.ranks],
                    # What is visible is averaged again with what comes late: only a mean of equal values changes
                    # nothing.
                    expose=expose and group.ranks.divisor == group.ranks.size,
                    access=self._access,
                    tier=tier,
                    lane=lane,
                )
                self._of[group] = buffers
                self._by_unit.setdefault(unit.index, []).append(buffers)
        self._expected = dict.fromkeys(self._by_unit, 0)
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._in_flight: list[int] = []
        self._leaving: list[int] = []
        self._sync, self._task = True, None
        self._watch: BackwardWatch | None = None
        self._factor: float | None = None
        self._completed, self._due, self._stage = True, False, stage
        self._handles = list(self._register(model, units))

    def _register(self, model: nn.Module, units: Sequence[Unit]) -> Iterator[Any]:
        me = weakref.ref(self)
        for unit in units:
            for place, group in enumerate(unit.trainable):
                for index, parameter in enumerate(group.parameters):
                    yield parameter.register_post_accumulate_grad_hook(partial(_arrived, me, unit.index, place, index))
        yield model.register_forward_hook(ModuleHook(partial(_returned, me)))

    def remove_hooks(self) -> None:
        """Take all hooks off the model, and all gradients off its parameters."""
        for handle in self._handles:
            handle.remove()
        for buffers in self._of.values():
            buffers.clear()

    def follow(self, watch: BackwardWatch) -> None:
        """See `Gradients.follow`."""
        self._watch = watch

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # Hooks ------------------------------------------------------------------------------------------------------------

    def on_forward(self, output: Any) -> None:
        """The model has returned: its outputs tell when the outermost backward begins."""
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
        self.begin_backward()

    def begin_backward(self, arriving: tuple[GroupGradients, int] | None = None) -> None:
        """Mark the running backward as the outermost one. Stage 3 calls it from its own hooks too.

        `arriving`: the parameter whose gradient is there already, if that is how the backward was noticed.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or task == self._task:
            return
        # Another task that never ended was stopped by an error; what it left is kept, as autograd keeps it in `.grad`.
        self._task, self._factor, self._completed, self._due = task, None, False, False
        self._arrived = dict.fromkeys(self._arrived, 0)
        scaled = self._watch is None or self._watch.factor() == 1.0
        for buffers in self._of.values():
            buffers.notice(arriving[1] if arriving is not None and arriving[0] is buffers else None)
            if not scaled:
                buffers.hide_views()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def on_arrival(self, unit: int, place: int, index: int) -> None:
        """The gradient of a parameter has been accumulated: number `index` of group `place` of `unit`."""
        buffers = self._by_unit[unit][place]
        if self._task is None:
            self.begin_backward((buffers, index))
        if self._factor is None:
            self._factor = self._first_arrival(buffers, index)
        buffers.absorb(index, self._factor)
        arrived = self._arrived[unit] = self._arrived[unit] + 1
        if arrived == self._expected[unit]:
            if self._on_complete is not None:
                self._on_complete(unit)
            if self._reduces():
                self._order.reduce(unit)

    def _first_arrival(self, buffers: GroupGradients, index: int) -> float:
        """What the running backward's gradients are multiplied with."""
        if self._watch is None:
            return 1.0
        try:
            return self._watch.begin()
        except BaseException:
            buffers.refuse(index)
            for hidden in self._of.values():
                hidden.show_views()
            raise

    def _end_backward(self) -> None:
        self._task = None
        for unit, arrived in self._arrived.items():
            self._expected[unit] = max(self._expected[unit], arrived)
            self._arrived[unit] = 0
        for buffers in self._of.values():
            buffers.show_views()
        if not self._reduces():
            return
        self._due = True
        for unit in self._dirty():
            self._order.reduce(unit)
        self._order.end_backward()
        self._wait()
        for buffers in self._of.values():
            buffers.hide_unreduced()
        self._drop_idle()

    def _reduces(self) -> bool:
        """Not under `no_sync`, and not in a step whose optimizer wants this rank's own gradients."""
        return self._sync and not self._keeps_local()

    def _dirty(self) -> list[int]:
        """Units with gradients that no reduction has taken, in the order in which backward tends to complete them."""
        units = (unit for unit, groups in self._by_unit.items() if any(buffers.dirty for buffers in groups))
        return sorted(units, reverse=True)

    # Reductions -------------------------------------------------------------------------------------------------------

    def run_reduce(self, unit: int) -> None:
        """Start the reduction of a unit with what has arrived. Called by the order, in the same order on every rank."""
        while len(self._in_flight) >= self._limit or (self._in_flight and self._is_done(self._in_flight[0])):
            self._finish_unit(self._in_flight.pop(0))
        with dsx_comm.unit(self._names[unit]):
            for buffers in self._by_unit[unit]:
                buffers.launch()
        self._in_flight.append(unit)
        if not self._overlap:
            self._wait()

    def _is_done(self, unit: int) -> bool:
        return all(buffers.is_done() for buffers in self._by_unit[unit])

    def _finish_unit(self, unit: int) -> None:
        """The reduction is complete; where its result goes to another tier, that copy begins."""
        for buffers in self._by_unit[unit]:
            buffers.finish()
        if any(buffers.is_leaving for buffers in self._by_unit[unit]):
            self._leaving.append(unit)
        while len(self._leaving) > IN_FLIGHT:
            for buffers in self._by_unit[self._leaving.pop(0)]:
                buffers.arrive()

    def _wait(self) -> None:
        while self._in_flight:
            self._finish_unit(self._in_flight.pop(0))

    def finish(self) -> None:
        """Complete every reduction, late gradients included."""
        self._task = None
        for buffers in self._of.values():
            buffers.notice()
        if self._keeps_local():
            self._finish_alone()
        else:
            self._order.boundary(self._dirty)
            self._wait()
        self._completed = True
        self._drop_idle()

    def watch_edits(self, watch: EditWatch) -> None:
        """See `Gradients.watch_edits`."""
        self._order.watch_edits(watch)

    def complete(self) -> None:
        """See `Gradients.complete`."""
        if self._completed:
            return
        for buffers in self._of.values():
            buffers.notice()
        if self._keeps_local():
            self._finish_alone()
        else:
            self._order.complete(self._dirty)
            self._wait()
        self._completed = True
        self._drop_idle()

    def complete_due(self) -> None:
        """See `Gradients.complete_due`."""
        # At stage 0 a gradient may be read by one rank alone; only what is really missing makes that a collective.
        if self._due and (self._stage > 0 or self._dirty()):
            self.complete()

    def _finish_alone(self) -> None:
        """Nothing is exchanged, so there is nothing to agree on."""
        for buffers in self._of.values():
            buffers.launch(LocalReducer())
            buffers.finish()

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """See `Gradients.parts`."""
        if not parts:
            return ()
        first, last = parts[0].slice.offset, parts[-1].slice.offset + parts[-1].slice.numel
        block = read(self._of[group].values(), first, last)
        master = group.master
        if master is not None:
            block = block.to(device=master.device, dtype=master.dtype)
        return tuple(block.narrow(0, part.slice.offset - first, part.slice.numel) for part in parts)

    def blocks(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """The reduced buffers."""
        return ((group.ranks, read(buffers.values())) for group, buffers in self._of.items())

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """See `Gradients.read`."""
        self._of[group].notice()
        if self._of[group].result is None:
            return None
        return read(self._of[group].values(), part.offset, part.offset + part.numel)

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """See `Gradients.write`."""
        if self._of[group].result is not None:
            write(self._of[group].values(), values, part.offset)

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """See `Gradients.unreduced`."""
        self._of[group].notice()
        return self._of[group].unreduced(index)

    def changed(self) -> None:
        """See `Gradients.changed`."""
        self._access.changed()

    def clear(self) -> None:
        """Forget all gradients."""
        self._due = False
        self._wait()
        for buffers in self._of.values():
            buffers.clear()
        self._drop_idle()

    def tensors(self) -> list[torch.Tensor]:
        """Everything held for gradients."""
        return [tensor for buffers in self._of.values() for tensor in buffers.tensors()]

    def homes(self) -> list[Home]:
        """See `Gradients.homes`."""
        return [home for buffers in self._of.values() for home in buffers.homes()]

    def idle_bytes(self) -> int:
        """Memory kept for the buffers of backwards to come."""
        return sum(pool.idle_bytes() for pool in self._pools.values())

    def _drop_idle(self) -> None:
        for pool in self._pools.values():
            pool.drop()


def _arrived(
    gradients: Callable[[], ReducedGradients | None], unit: int, place: int, index: int, _: torch.Tensor
) -> None:
    # Python's collector does not see what a tensor's hooks hold: a strong reference would keep the parameters for ever.
    owner = gradients()
    if owner is not None:
        owner.on_arrival(unit, place, index)


def _returned(gradients: Callable[[], ReducedGradients | None], module: nn.Module, args: Any, output: Any) -> None:
    # Weakly, as above: who drops the optimizer has dropped the gradients, and may shard the model anew.
    owner = gradients()
    if owner is not None:
        owner.on_forward(output)


def _multiplied(
    gradients: Callable[[], LocalGradients | None], watch: BackwardWatch, place: int, index: int, grad: torch.Tensor
) -> torch.Tensor | None:
    owner = gradients()
    return None if owner is None else owner.on_gradient(watch, place, index, grad)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running backward adds to the parameter's `.grad`. `torch.autograd.grad` runs the hooks of a tensor
    too.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch says where the gradient of this very parameter is asked for
        return False


class LocalGradients:
    """One rank: autograd's own `.grad` tensors are the gradients. Missing ones are zeros."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._groups = [group for unit in units for group in unit.trainable]
        self._handles: list[Any] = []
        self._task, self._factor = -1, 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to hold back."""
        yield

    def follow(self, watch: BackwardWatch) -> None:
        """See `Gradients.follow`; puts a hook on every parameter, once it is needed."""
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
        """A gradient is there for parameter `index` of group `place`; what it is replaced with, if it is."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._factor = watch.begin() if _accumulates(self._groups[place].parameters[index]) else 1.0
            self._task = task
        return None if self._factor == 1.0 else grad * self._factor

    def changed(self) -> None:
        """Nothing is kept that could be stale."""

    def complete(self) -> None:
        """They are complete."""

    def complete_due(self) -> None:
        """They are complete."""

    def watch_edits(self, watch: EditWatch) -> None:
        """There is one rank."""

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        """Give parameters without a gradient zeros."""
        for group in self._groups:
            for name, parameter in zip(group.layout.names, group.parameters):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                refuse_sparse(parameter.grad, name)

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """See `Gradients.parts`."""
        grads = [_grad(group.parameters[group.layout.index(part.name)]) for part in parts]
        if (master := group.master) is not None:
            grads = [grad.to(device=master.device, dtype=master.dtype) for grad in grads]
        return tuple(grad.reshape(-1)[part.slice.start : part.slice.stop] for grad, part in zip(grads, parts))

    def blocks(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """Every `.grad`."""
        return ((group.ranks, _grad(p)) for group in self._groups for p in group.parameters if p.numel())

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

    def clear(self) -> None:
        """Drop all `.grad`s."""
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """Every `.grad` there is."""
        return [p.grad for group in self._groups for p in group.parameters if p.grad is not None]

    def homes(self) -> list[Home]:
        """They are autograd's."""
        return []

    def idle_bytes(self) -> int:
        """Nothing is kept."""
        return 0


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("gradients were read before finish()")
    return parameter.grad
