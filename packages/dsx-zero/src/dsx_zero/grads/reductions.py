"""The reductions of one model: the gradients of its flat groups, unit by unit, and which reductions are in flight.

They are made before the order of collectives, which calls `run_reduce`. `ReducedGradients`, which is made after it,
knows when gradients arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import dsx_comm
import torch

from ..homes.home import Home, read, write
from ..homes.tiers import Tier
from ..lanes import Lane, Ticket
from ..params.flat import FlatGroup, Part, Unit
from ..params.memory import Kind, Memory, OrdinaryMemory
from ..plan.layout import LocalSlice
from ..precision import Precision
from .access import GradientAccess
from .block_norm import block_norm
from .buffers import GroupGradients
from .reduction import LocalReducer, ReductionEngine
from .rows import RowGradients

__all__ = ["ReductionWatch", "Reductions", "cut_parts"]

IN_FLIGHT = 2
"""From stage 2 on, units whose reductions may be under way at once: one on the wire, one being filled behind it. More
would hold more whole buffers. Stages 0-1 keep theirs anyway, so there backward never waits.
"""


class ReductionWatch(Protocol):
    """Follows the reductions of one model."""

    def begin_backward(self) -> None:
        """A backward begins. May raise, to refuse it."""
        ...

    def started(self, unit: int) -> None:
        """The reduction of a unit was started. Calls come in the same order on every rank."""
        ...

    def finished(self, unit: int) -> None:
        """It is complete: the reduced gradients are in their home, or on their way to it."""
        ...


class Reductions:
    """See the module's text.

    Args:
        units: all units; those with something to train are reduced.
        stage: of ZeRO.
        precision: dtypes of gradients.
        reducer: moves the gradients of one rank set.
        complete: reduces what no reduction has taken yet, for users who read `.grad` (collective).
        expose: at stage 0 `.grad` shows the reduced values.
        norm_groups: groups over which a flag of one rank's gradients (not finite) is spread to all ranks.
        overlap: False waits for each reduction where it is started.
        memory: where whole buffers come from.
        tier, lane: where the reduced values of a unit live, and the lane on which they go there.
        differ: the ranks have different parameters, of which no rank can tell the norm alone.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        stage: int,
        precision: Precision,
        reducer: Callable[[dsx_comm.RankSet], ReductionEngine],
        complete: Callable[[], None],
        expose: bool,
        norm_groups: Sequence[Any] = (),
        overlap: bool = True,
        memory: Callable[[dsx_comm.RankSet], Memory] = lambda ranks: OrdinaryMemory(),
        tier: Callable[[int], Tier | None] = lambda unit: None,
        lane: Lane | None = None,
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
        # Stages 0-1 keep their buffers for good, so there backward never waits for one.
        self._limit = IN_FLIGHT if stage >= 2 else len(units)
        self._pools = {
            ranks: memory(ranks).pool(found, idle=IN_FLIGHT if stage >= 2 else len(found))
            for ranks, found in kinds.items()
        }
        self._access = GradientAccess(complete, divided=stage > 0, norm_groups=norm_groups, differ=differ)
        self._reducers = reducers = {ranks: reducer(ranks) for ranks in kinds}
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
                        reducer=reducers[group.ranks],
                        label=f"{unit.plan}, rows of {group.key.sparse}",
                    )
                    self.by_unit.setdefault(unit.index, []).append(rows)
                    continue
                buffers = GroupGradients(
                    group,
                    dtype=precision.gradient_dtype(group.key.dtype),
                    stage=stage,
                    reducer=reducers[group.ranks],
                    pool=self._pools[group.ranks],
                    # What is visible is averaged again with what comes late: only a mean of equal values changes
                    # nothing.
                    expose=expose and group.ranks.divisor == group.ranks.size,
                    access=self._access,
                    label=f"{unit.plan}, gradients",
                    tier=tier(unit.index),
                    lane=lane,
                )
                self._of[group] = buffers
                self.by_unit.setdefault(unit.index, []).append(buffers)
        self.groups: tuple[GroupGradients | RowGradients, ...] = (*self._of.values(), *self.rows.values())
        """All of them."""
        self.exposed = tuple(buffers for buffers in self.groups if buffers.exposes)
        """Those whose `.grad` show the reduced values."""
        self._in_flight: list[int] = []
        self._leaving: list[int] = []
        self.watch: ReductionWatch | None = None
        """Is told of every reduction. No null object: a call per unit would count (test_python_calls.py)."""

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
        """See `Gradients.reduced`."""
        return [(b.group, *b.reduced()) for b in self.by_unit[unit] if isinstance(b, GroupGradients)]

    # Under way --------------------------------------------------------------------------------------------------------

    def run_reduce(self, unit: int) -> None:
        """See `Executor`: start the reduction of a unit with what has arrived, in the same order on every rank."""
        while self._in_flight and (len(self._in_flight) >= self._limit or self._is_done(self._in_flight[0])):
            self._finish_unit(self._in_flight.pop(0))
        for buffers in self.by_unit[unit]:
            buffers.launch()
        self._in_flight.append(unit)
        if self.watch is not None:
            self.watch.started(unit)
        if not self._overlap:
            self.wait()

    def _is_done(self, unit: int) -> bool:
        for buffers in self.by_unit[unit]:  # a loop: a generator's every step is a call
            if buffers.pending is not None and not buffers.pending.is_done():
                return False
        return True

    def _finish_unit(self, unit: int) -> None:
        """The reduction is complete; where its result goes to another tier, that copy begins."""
        leaves = False
        for buffers in self.by_unit[unit]:
            leaves = buffers.finish() or leaves
        if leaves:
            self._leaving.append(unit)
        if self.watch is not None:
            self.watch.finished(unit)
        while len(self._leaving) > IN_FLIGHT:
            for buffers in self.by_unit[self._leaving.pop(0)]:
                buffers.arrive()

    def wait(self) -> None:
        """Wait for all that are under way."""
        while self._in_flight:
            self._finish_unit(self._in_flight.pop(0))

    def finish_alone(self) -> None:
        """This rank's own gradients are the reduced ones. Nothing is exchanged, so there is nothing to agree on."""
        for buffers in self.groups:
            buffers.launch(LocalReducer())
            buffers.finish()

    # Values -----------------------------------------------------------------------------------------------------------

    def parts(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """See `Gradients.parts`."""
        if group in self.rows:
            return (self.rows[group].stepped(),) if parts else ()
        return cut_parts(self._of[group].values(), group, parts) if parts else ()

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """See `Gradients.norms`: of the reduced buffers, and of the rows of sparse embeddings."""
        yield from ((group.ranks, buffers.norm()) for group, buffers in self._of.items())
        yield from ((group.ranks, block_norm(rows.rows().values())) for group, rows in self.rows.items())

    def read(self, group: FlatGroup, part: LocalSlice) -> torch.Tensor | None:
        """See `Gradients.read`."""
        if group in self.rows:
            return self.rows[group].read(part)
        buffers = self._of[group]
        buffers.notice()
        if buffers.result is None:
            return None
        return read(buffers.values(), part.offset, part.offset + part.numel)

    def write(self, group: FlatGroup, part: LocalSlice, values: torch.Tensor) -> None:
        """See `Gradients.write`."""
        if group in self.rows:
            self.rows[group].write(part, values)
        elif self._of[group].result is not None:
            self._of[group].forget_norm()
            write(self._of[group].values(), values, part.offset)

    def changed(self) -> None:
        """Gradients were written."""
        self._access.changed()

    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        for buffers in self.groups:
            buffers.clear()
        self.drop_idle()

    def tensors(self) -> list[torch.Tensor]:
        """Everything held for gradients."""
        kept = [tensor for engine in self._reducers.values() for tensor in engine.tensors()]
        return kept + [tensor for buffers in self.groups for tensor in buffers.tensors()]

    def homes(self) -> list[Home]:
        """Where reduced gradients live."""
        return [home for buffers in self.groups for home in buffers.homes()]

    def idle_bytes(self) -> int:
        """Memory kept for the buffers of backwards to come."""
        return sum(pool.idle_bytes() for pool in self._pools.values())

    def drop_idle(self) -> None:
        """Give that memory back."""
        for pool in self._pools.values():
            pool.drop()


def cut_parts(values: Home, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
    """Parts (at least one, in order of their offsets) of the reduced gradients of a group, 1-D, in the dtype and on the
    device of its masters.
    """
    first, last = parts[0].slice.offset, parts[-1].slice.offset + parts[-1].slice.numel
    block = read(values, first, last)
    master = group.master
    if master is not None:
        block = block.to(device=master.device, dtype=master.dtype)
    found = []
    for part in parts:  # a loop: no call per parameter
        found.append(block.narrow(0, part.slice.offset - first, part.slice.numel))
    return tuple(found)
