"""Reductions of gradients: from a unit's whole buffer on each rank to the shard that this rank keeps.

A reduction multiplies by `before`, sums or averages over the ranks, and multiplies by `after`. A transport carries the
buffers (`transports`), and a lane runs the reduction as a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import dsx_comm
import torch
from dsx_comm.lanes import Lane, Pending, Ticket

from ..errors import ZeroConfigError
from ..params.flat import FlatGroup
from ..transports.protocol import ReduceTransport, carrier_of

__all__ = ["LocalReducer", "PendingReduction", "Reducer", "Reduction", "ReductionEngine"]


@dataclass(frozen=True)
class Reduction:
    """How the gradients of the ranks are combined.

    Args:
        op: "mean" or "sum" over the ranks (`gradient_allreduce_op`).
        prescale: divide by the world size before the sum, not after it (`prescale_gradients`).
        predivide_factor: f: gradients are divided by f before the sum and by (world size / f) after it. The result is
            the mean for every f; f decides how large the sum becomes.
    """

    op: Literal["mean", "sum"] = "mean"
    prescale: bool = False
    predivide_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in ("mean", "sum"):
            raise ZeroConfigError("gradient_allreduce_op", f'got {self.op!r}, expected "mean" or "sum"')
        if not self.predivide_factor > 0:
            raise ZeroConfigError(
                "gradient_predivide_factor", f"got {self.predivide_factor}, expected a number above 0"
            )

    def factors(self, ranks: dsx_comm.RankSet) -> tuple[float, bool, float]:
        """(before, average, after): scale, then average (or sum) over the ranks, then scale."""
        if self.op == "sum":
            return 1.0, False, 1.0
        if self.prescale:
            return 1.0 / ranks.divisor, False, 1.0
        if self.predivide_factor != 1.0:
            return 1.0 / self.predivide_factor, False, self.predivide_factor / ranks.divisor
        average = ranks.divisor == ranks.size
        return 1.0, average, 1.0 if average else 1.0 / ranks.divisor


class PendingReduction:
    """A reduction in flight.

    Args:
        ticket: the job of a lane to wait for; None: there is none.
        complete: moves the result to its destination; None: it arrives there.
    """

    __slots__ = ("_complete", "_ticket")

    def __init__(self, ticket: Ticket | None, complete: Callable[[], None] | None) -> None:
        self._ticket, self._complete = ticket, complete

    def then(self, more: Callable[[], None]) -> PendingReduction:
        """The same reduction, with `more` called at its end."""
        complete = self._complete

        def both() -> None:
            if complete is not None:
                complete()
            more()

        return PendingReduction(self._ticket, both)

    def is_done(self) -> bool:
        """Whether `finish` would return without waiting."""
        return self._ticket is None or self._ticket.is_completed()

    def finish(self) -> None:
        """Wait, and move the result to its destination."""
        if self._ticket is not None:
            self._ticket.wait()
        if self._complete is not None:
            self._complete()


class ReductionEngine(Protocol):
    """Reduces flat gradient buffers over the ranks that share them."""

    def all_reduce(self, buffer: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """Reduce `buffer` (1-D, all elements of `group`) in place on every rank. `label` is its name if it hangs."""
        ...

    def reduce_scatter(
        self, buffer: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str, *, add: bool
    ) -> PendingReduction:
        """Reduce `buffer` (1-D, all elements of `group`), and copy (with `add`: add) this rank's shard of the result to
        `out`, which may be a part of `buffer`.
        """
        ...

    def reduce_rows(self, rows: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """Reduce `rows` (sparse COO, of the shape of the one parameter of `group`) on every rank into `out`, a sparse
        tensor that has no entries yet. `rows` may be changed.
        """
        ...

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are kept between two reductions."""
        ...


class _Route(NamedTuple):
    """How the gradients of one flat group are sent.

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


class LocalReducer:
    """The `ReductionEngine` of one rank: the reduced gradient is the rank's own, times `factor`.

    The factor is below 1 for an expert that only this rank holds: its gradient is averaged over all ranks whose tokens
    reach it.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    @classmethod
    def of(cls, ranks: dsx_comm.RankSet, reduction: Reduction) -> LocalReducer:
        """The engine for a set of one rank."""
        before, _, after = reduction.factors(ranks)
        return cls(before * after)

    def all_reduce(self, buffer: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """See `ReductionEngine.all_reduce`: only the factor is applied."""
        return PendingReduction(None, lambda: self._scale(buffer))

    def reduce_rows(self, rows: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str) -> PendingReduction:
        """See `ReductionEngine.reduce_rows`: copy the rows."""

        def complete() -> None:
            out.copy_(rows)
            if self._factor != 1.0:
                out._values().mul_(self._factor)

        return PendingReduction(None, complete)

    def tensors(self) -> list[torch.Tensor]:
        """No tensors are kept."""
        return []

    def _scale(self, buffer: torch.Tensor) -> None:
        if self._factor != 1.0:
            buffer.mul_(self._factor)

    def reduce_scatter(
        self, buffer: torch.Tensor, out: torch.Tensor, group: FlatGroup, label: str, *, add: bool
    ) -> PendingReduction:
        """See `ReductionEngine.reduce_scatter`: copy or add, unless `out` is the buffer."""

        def complete() -> None:
            if add:
                out.add_(buffer, alpha=self._factor)
                return
            if out.data_ptr() != buffer.data_ptr():
                out.copy_(buffer)
            self._scale(out)

        return PendingReduction(None, complete)
