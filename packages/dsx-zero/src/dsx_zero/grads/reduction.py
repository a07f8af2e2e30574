"""The way in which gradients of the ranks are combined (`Reduction`), the `ReductionEngine` that does it, and that of
one rank alone. `reductions.Reducer` is the one of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import dsx_comm
import torch
from dsx_comm.lanes import Ticket

from ..errors import ZeroConfigError
from ..params.flat import FlatGroup

__all__ = ["LocalReducer", "PendingReduction", "Reduction", "ReductionEngine"]


@dataclass(frozen=True)
class Reduction:
    """The way in which the gradients of the ranks are combined.

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


class PendingReduction(NamedTuple):
    """A reduction in flight.

    Attributes:
        ticket: the job of a lane to wait for; None: there is none.
        complete: moves the result to its destination; None: it arrives there.
    """

    ticket: Ticket | None
    complete: Callable[[], None] | None

    def finish(self) -> None:
        """Wait, and move the result to its destination."""
        if self.ticket is not None:
            self.ticket.wait()
        if self.complete is not None:
            self.complete()


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
