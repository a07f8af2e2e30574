"""The reductions of one model: the gradients of its flat groups, unit by unit, and the reductions in flight.

`Reductions` is made before the order of collectives, which calls `run_reduce`. `Gradients` is made after the order, and
knows when gradients arrive. The `Reducer` of a rank set sends a unit's whole buffer on each rank, and what arrives is
the shard that this rank keeps: it multiplies by `before`, sums or averages over the ranks, and multiplies by `after`.
A transport carries the buffers (`transports`), and a lane runs the reduction as a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import dsx_comm
import torch
from dsx_comm.lanes import Lane, Pending, Ticket

from ..homes.blocks import HostBlocks
from ..homes.home import Home, block_norm, read, write
from ..homes.ring import Ring
from ..homes.tiers import Tier
from ..params.flat import FlatGroup, Part, Unit, cut_parts
from ..params.memory import Kind, Memory, OrdinaryMemory
from ..plan.layout import LocalSlice
from ..precision import Precision
from ..transports.protocol import ReduceTransport, carrier_of
from .access import GradientAccess
from .buffers import GroupGradients
from .protocol import ReductionWatch
from .reduction import LocalReducer, PendingReduction, Reduction, ReductionEngine
from .rows import RowGradients

__all__ = ["Reducer", "Reductions"]

IN_FLIGHT = 2
"""From stage 2 on, the number of units whose reductions may be in flight: while one is sent, the next one is filled.
With more, more whole buffers would be in memory. Stages 0-1 keep all of theirs, so there backward never waits, unless
reduced values leave the device.
"""


class Reductions:
    """Reduces the gradients of one model unit by unit, and keeps account of the reductions in flight.

    Args:
        units: all units; those with trainable parameters are reduced.
        stage: stage of ZeRO, 0 to 3.
        precision: dtypes of gradients.
        reducer: makes the engine that reduces the gradients of one rank set.
        complete: reduces the gradients that no reduction has taken yet, for users who read `.grad` (collective).
        grads_are_views: at stage 0 `.grad` is a view of the reduced values.
        norm_groups: process groups over which a flag of one rank (its gradients are not finite) reaches all ranks.
        overlap: False: wait for each reduction immediately.
        memory: gives the memory of whole buffers, for the ranks that share them.
        tier: gives the tier in which the reduced values of a unit live; None: on the device.
        lane: copies reduced values to their tier.
        ring: carries them to tiers that would make the host wait; None: there is none.
        differ: the ranks have different parameters, so that no rank alone can compute the norm.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        stage: int,
        precision: Precision,
        reducer: Callable[[dsx_comm.RankSet], ReductionEngine],
        complete: Callable[[], None],
        grads_are_views: bool,
        norm_groups: Sequence[Any] = (),
        overlap: bool = True,
        memory: Callable[[dsx_comm.RankSet], Memory] = lambda ranks: OrdinaryMemory(),
        tier: Callable[[int], Tier | None] = lambda unit: None,
        lane: Lane | None = None,
        ring: Ring | None = None,
        differ: bool = False,
    ) -> None:
        self.stage, self._overlap = stage, overlap
        kinds: dict[dsx_comm.RankSet, list[Kind]] = {}
        for unit in units:
            for group in unit.trainable:
                if group.key.sparse:
                    kinds.setdefault(group.ranks, [])
                    continue
                kind = (group.layout.numel, precision.gradient_dtype(group.key.dtype), group.key.device)
                kinds.setdefault(group.ranks, []).append(kind)
        self._pools = {
            ranks: memory(ranks).pool(found, idle=IN_FLIGHT if stage >= 2 else len(found))
            for ranks, found in kinds.items()
        }
        self._access = GradientAccess(complete, divided=stage > 0, norm_groups=norm_groups, differ=differ)
        self._reducers = {ranks: reducer(ranks) for ranks in kinds}
        self._of: dict[FlatGroup, GroupGradients] = {}
        self.rows: dict[FlatGroup, RowGradients] = {}
        """The gradients of sparse embeddings."""
        self.by_unit: dict[int, list[GroupGradients | RowGradients]] = {}
        """The gradients of each unit that trains, in the order of `Unit.trainable`."""
        for unit in units:
            for group in unit.trainable:
                if group.key.sparse:
                    rows = self.rows[group] = RowGradients(
                        group,
                        dtype=precision.gradient_dtype(group.key.dtype),
                        label=f"{unit.plan}, rows of {group.key.sparse}",
                    )
                    self.by_unit.setdefault(unit.index, []).append(rows)
                    continue
                buffers = GroupGradients(
                    group,
                    dtype=precision.gradient_dtype(group.key.dtype),
                    stage=stage,
                    pool=self._pools[group.ranks],
                    # Values that `.grad` shows are averaged again with late gradients. That changes nothing only if
                    # the average is the mean of equal values.
                    grads_are_views=grads_are_views and group.ranks.divisor == group.ranks.size,
                    access=self._access,
                    label=f"{unit.plan}, gradients",
                    tier=tier(unit.index),
                    lane=lane,
                    ring=ring,
                )
                self._of[group] = buffers
                self.by_unit.setdefault(unit.index, []).append(buffers)
        self.groups: tuple[GroupGradients | RowGradients, ...] = (*self._of.values(), *self.rows.values())
        """The gradients of all trainable groups."""
        self.showing_reduced = tuple(buffers for buffers in self.groups if buffers.shows_reduced)
        """The gradients of the groups whose `.grad` shows the reduced values."""
        # Stages 0-1 keep their buffers for good, so there backward never waits for one. What leaves the device has
        # other memory there meanwhile.
        leaves = any(buffers.leaves for buffers in self._of.values())
        self._limit = IN_FLIGHT if stage >= 2 or leaves else len(units)
        self._in_flight: list[int] = []
        self._leaving: list[int] = []
        self._newest: list[GroupGradients | RowGradients] = []  # what left last, until it was waited for
        self.watch: ReductionWatch | None = None
        """Is told of every reduction. No null object, because a call per unit costs time (test_python_calls.py)."""

    def of(self, group: FlatGroup) -> GroupGradients | RowGradients:
        """The gradients of a group."""
        return self.rows[group] if group in self.rows else self._of[group]

    def dirty(self) -> list[int]:
        """Units with gradients that no reduction has taken, in the order in which backward tends to complete them."""
        found = []
        for unit, groups in self.by_unit.items():
            for buffers in groups:
                if buffers.dirty:
                    found.append(unit)
                    break
        return sorted(found, reverse=True)

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """For each trainable group of a unit: the home of the reduced gradients, and the ticket to wait for before
        another thread reads them there.
        """
        return [(b.group, *b.reduced()) for b in self.by_unit[unit] if isinstance(b, GroupGradients)]

    # In flight --------------------------------------------------------------------------------------------------------

    def run_reduce(self, unit: int) -> None:
        """See `Executor`: start the reduction of a unit with what has arrived, in the same order on every rank."""
        while self._in_flight and (len(self._in_flight) >= self._limit or self._is_done(self._in_flight[0])):
            self._finish_unit(self._in_flight.pop(0))
        for buffers in self.by_unit[unit]:
            self._start(buffers, self._reducers[buffers.group.ranks])
        self._in_flight.append(unit)
        if self.watch is not None:
            self.watch.started(unit)
        if not self._overlap:
            self.wait()

    def _start(self, buffers: GroupGradients | RowGradients, reducer: ReductionEngine) -> None:
        group, label = buffers.group, buffers.label
        if isinstance(buffers, RowGradients):
            rows, found = buffers.launch()
            buffers.pending = reducer.reduce_rows(rows, found, group, label)
            return
        buffer, out, add = buffers.launch()
        if out is buffer:
            buffers.pending = reducer.all_reduce(buffer, group, label)
        else:
            buffers.pending = reducer.reduce_scatter(buffer, out, group, label, add=add)

    def _is_done(self, unit: int) -> bool:
        for buffers in self.by_unit[unit]:  # a loop, because every step of a generator is a Python call
            ticket = None if buffers.pending is None else buffers.pending.ticket
            if ticket is not None and not ticket.is_completed():
                return False
        return True

    def _finish_unit(self, unit: int) -> None:
        """The reduction is complete. If its result lives in another tier, the copy to it begins."""
        leaves = False
        for buffers in self.by_unit[unit]:
            leaves = buffers.finish() or leaves
        if leaves:
            self._leaving.append(unit)
            self._newest = self.by_unit[unit]
        if self.watch is not None:
            self.watch.finished(unit)
        while len(self._leaving) > IN_FLIGHT:
            for buffers in self.by_unit[self._leaving.pop(0)]:
                buffers.let_go()

    def wait(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._finish_unit(self._in_flight.pop(0))

    def finish_alone(self) -> None:
        """Use this rank's own gradients as the reduced ones. Nothing is exchanged, so the ranks need not agree."""
        for buffers in self.groups:
            self._start(buffers, LocalReducer())
            buffers.finish()

    # Values -----------------------------------------------------------------------------------------------------------

    def parts(
        self, group: FlatGroup, parts: Sequence[Part], blocks: HostBlocks | None = None, *, as_kept: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of these parts of the group's parameters, 1-D, in the dtype and on the device of the masters.

        Args:
            parts: in order of their offsets.
            blocks: memory for gradients that are kept in host memory, in another dtype than the masters'.
            as_kept: leave those in the dtype in which they are kept.
        """
        if group in self.rows:
            return (self.rows[group].stepped(),) if parts else ()
        newest, self._newest = self._newest, []
        for buffers in reversed(newest):  # when its copy has arrived on the host, the earlier ones have, too
            if isinstance(buffers, GroupGradients):
                read(buffers.values(), 0, 0)
        return cut_parts(self._of[group].values(), group, parts, blocks, as_kept=as_kept) if parts else ()

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """The L2 norms (0-dim, fp32 or fp64) of the buffers that together have every gradient that this rank steps,
        each once; and the ranks that share each buffer. A buffer is freed before the next one is read.
        """
        self.wait()
        # Loops: every step of a generator within this one is a Python call (test_python_calls.py).
        for group, buffers in self._of.items():
            yield group.ranks, buffers.norm()
        for group, rows in self.rows.items():
            yield group.ranks, block_norm(rows.rows().values())

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """The reduced gradient of the part of parameter `index` that this rank steps, 1-D; None if there is none."""
        if group in self.rows:
            return self.rows[group].read(part)
        buffers = self._of[group]
        buffers.notice()
        if buffers.result is None:
            return None
        return read(buffers.values(), part.offset, part.offset + part.numel)

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """Set the gradient that `read` returns. If there is none, nothing happens."""
        if group in self.rows:
            self.rows[group].write(part, values)
        elif self._of[group].result is not None:
            home = self._of[group].values()  # before: what adds values up keeps their norm
            self._of[group].forget_norm()
            write(home, values, part.offset)

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """This rank's own gradient of a parameter that no reduction has taken, in the parameter's shape; None if there
        is none.
        """
        buffers = self.of(group)
        buffers.notice()
        return buffers.unreduced(index)

    def has_any(self) -> bool:
        """Whether there are gradients, stepped or not, that would be lost with this object."""
        return any(buffers.has_any() for buffers in self.groups)

    def changed(self) -> None:
        """Note that gradients were written."""
        self._access.changed()

    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        for buffers in self.groups:
            buffers.clear()
        self.drop_idle()

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are kept for gradients."""
        kept = [tensor for engine in self._reducers.values() for tensor in engine.tensors()]
        return kept + [tensor for buffers in self.groups for tensor in buffers.tensors()]

    def homes(self) -> list[Home]:
        """The homes of reduced gradients."""
        return [home for buffers in self.groups for home in buffers.homes()]

    def idle_bytes(self) -> int:
        """Bytes of memory that is kept for the buffers of later backwards."""
        return sum(pool.idle_bytes() for pool in self._pools.values())

    def drop_idle(self) -> None:
        """Free that memory."""
        for pool in self._pools.values():
            pool.drop()


class _Route(NamedTuple):
    """The way in which the gradients of one flat group are sent.

    Attributes:
        start: `Transport.start` of the transport that carries them.
        dtype: dtype in which results arrive.
    """

    start: Callable[[torch.Tensor, torch.Tensor, FlatGroup, str], Pending | None]
    dtype: torch.dtype


class Reducer:
    """All-reduce and reduce-scatter over one set of ranks.

    Args:
        ranks: the ranks that share the buffers.
        reduction: how their gradients are combined.
        transport: makes the transport, for `dsx_comm.ReduceOp.SUM` or `AVG` and these ranks.
        lane: runs the reductions.
        rows: makes the transport for gradients of rows; None: the ranks share no sparse embeddings.
    """

    def __init__(
        self,
        ranks: dsx_comm.RankSet,
        reduction: Reduction,
        transport: Callable[[Any, dsx_comm.RankSet], ReduceTransport],
        lane: Lane,
        rows: Callable[[Any], ReduceTransport] | None = None,
    ) -> None:
        self._ranks, self._lane = ranks, lane
        self._before, average, self._after = reduction.factors(ranks)
        op = dsx_comm.ReduceOp.AVG if average else dsx_comm.ReduceOp.SUM
        self._transport = transport(op, ranks)
        self._rows = self._transport if rows is None else rows(op)
        self._routes: dict[FlatGroup, _Route] = {}

    def all_reduce(self, buffer: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """See `ReductionEngine.all_reduce`."""
        route = self._routes.get(group) or self._route(buffer, group)
        ticket = self._submit(buffer, buffer, group, label, route)
        complete = None if self._after == 1.0 else partial(self._deliver, buffer, buffer, False)
        return PendingReduction(ticket, complete)

    def reduce_scatter(
        self, buffer: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str, *, add: bool
    ) -> PendingReduction:
        """See `ReductionEngine.reduce_scatter`."""
        route = self._routes.get(group) or self._route(buffer, group)
        # While `buffer` is sent, the result may arrive in a part of it only with shared memory: there each rank writes
        # where no other rank reads.
        apart = out.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        direct = out.dtype == route.dtype and (apart or dsx_comm.is_symmetric(buffer, self._ranks.group)) and not add
        result = out if direct else torch.empty_like(out, dtype=route.dtype)
        ticket = self._submit(result, buffer, group, label, route)
        complete = None if direct and self._after == 1.0 else partial(self._deliver, result, out, add)
        return PendingReduction(ticket, complete)

    def reduce_rows(self, rows: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """See `ReductionEngine.reduce_rows`."""
        if self._before != 1.0:
            rows._values().mul_(self._before)
        lane, start = self._lane, self._rows.start
        lane.see_writes_so_far()
        ticket = lane.submit(lambda: start(out, rows, group, label))

        def complete() -> None:
            if self._after != 1.0:
                out._values().mul_(self._after)

        return PendingReduction(ticket, complete)

    def tensors(self) -> list[torch.Tensor]:
        """See `ReductionEngine.tensors`."""
        return self._transport.tensors()

    def _route(self, buffer: torch.Tensor, group: FlatGroup) -> _Route:
        """Find out how the gradients of a group are sent. All its buffers are alike, so this is called once."""
        carrier = carrier_of(self._transport, buffer.numel(), buffer.dtype, group)
        route = self._routes[group] = _Route(carrier.start, self._transport.result_dtype(buffer.dtype, group))
        return route

    def _submit(self, out: torch.Tensor, buffer: torch.Tensor, group: FlatGroup, label: str, route: _Route) -> Ticket:
        if self._before != 1.0:
            buffer.mul_(self._before)
        job = partial(route.start, out, buffer, group, label)
        return self._lane.submit(job, see_writes_so_far=True)  # backward has written the buffer

    def _deliver(self, result: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        if self._after != 1.0:
            result.mul_(self._after)
        if add:
            out.add_(result)
        elif result is not out:
            out.copy_(result)
