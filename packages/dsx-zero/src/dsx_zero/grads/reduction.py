"""Moving gradients: one unit's buffer becomes the reduced gradient of what this rank keeps.

A reduction is `g * before`, a sum or average over the ranks, `g * after`. Messages larger than the bucket size, or in
another dtype than the buffer's, go through a message buffer of constant size, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import dsx_comm
import torch

from ..errors import ZeroConfigError
from ..plan.layout import pieces

__all__ = ["LocalReducer", "Pending", "Reducer", "Reduction", "ReductionEngine"]


@dataclass(frozen=True)
class Reduction:
    """What becomes of the ranks' gradients.

    Args:
        op: "mean" or "sum" over the ranks (`gradient_allreduce_op`).
        prescale: divide by the world size before the sum, not after it (`prescale_gradients`).
        predivide_factor: f of `g / f`, sum, `g * f / world`: the mean for every f, at another place in the number
            range.
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


@dataclass
class Pending:
    """A reduction under way: `finish()` waits for it and puts the result in its place."""

    work: Any
    complete: Callable[[], None]

    def is_done(self) -> bool:
        """Would `finish` return without waiting?"""
        return self.work is None or self.work.is_completed()

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.complete()


class Reducer:
    """All-reduce and reduce-scatter of flat gradient buffers over one set of ranks."""

    def __init__(self, ranks: dsx_comm.RankSet, reduction: Reduction, bucket_size: int) -> None:
        self._group, self._world_size = ranks.group, ranks.size
        self._bucket_size = bucket_size
        self._before, average, self._after = reduction.factors(ranks)
        self._op = dsx_comm.ReduceOp.AVG if average else dsx_comm.ReduceOp.SUM

    def all_reduce(self, buffer: torch.Tensor, wire: torch.dtype) -> Pending:
        """Reduce `buffer` (1-D) in place on every rank."""
        self._scale(buffer, self._before)
        if wire == buffer.dtype and buffer.numel() <= self._bucket_size:
            work = dsx_comm.all_reduce(buffer, op=self._op, group=self._group, async_op=True)
            return Pending(work, lambda: self._scale(buffer, self._after))
        for start, stop in pieces(buffer.numel(), self._bucket_size):
            part = buffer[start:stop]
            message = part.to(wire)
            dsx_comm.all_reduce(message, op=self._op, group=self._group)
            part.copy_(message)
        return Pending(None, lambda: self._scale(buffer, self._after))

    def reduce_scatter(self, buffer: torch.Tensor, out: torch.Tensor, wire: torch.dtype, *, add: bool) -> Pending:
        """Reduce `buffer` (1-D) and put (or `add`) this rank's shard of the result into `out`, which may be part of
        `buffer`.
        """
        self._scale(buffer, self._before)
        if wire == buffer.dtype and buffer.numel() <= self._bucket_size:
            shared = out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            # over shared memory each rank writes only where nobody else reads: the result may replace its part of the
            # buffer
            in_place = not shared or dsx_comm.is_symmetric(buffer, self._group)
            direct = not add and in_place and out.dtype == wire
            result = out if direct else torch.empty_like(out, dtype=wire)
            work = dsx_comm.reduce_scatter_tensor(result, buffer, op=self._op, group=self._group, async_op=True)
            return Pending(work, lambda: self._put(result, out, add))
        rows = buffer.view(self._world_size, -1)
        for start, stop in pieces(rows.shape[1], self._bucket_size // self._world_size):
            message = rows[:, start:stop].to(wire).contiguous()
            result = message.new_empty(stop - start)
            dsx_comm.reduce_scatter_tensor(result, message.view(-1), op=self._op, group=self._group)
            self._put(result, out[start:stop], add)
        return Pending(None, lambda: None)

    def _put(self, result: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        self._scale(result, self._after)
        if add:
            out.add_(result)
        elif result is not out:
            out.copy_(result)

    @staticmethod
    def _scale(buffer: torch.Tensor, factor: float) -> None:
        if factor != 1.0:
            buffer.mul_(factor)


class LocalReducer:
    """One rank: the reduced gradient is the rank's own, times `factor` (an expert that only this rank holds is averaged
    over all ranks whose tokens reach it).
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    @classmethod
    def of(cls, ranks: dsx_comm.RankSet, reduction: Reduction) -> LocalReducer:
        """For a set of one rank."""
        before, _, after = reduction.factors(ranks)
        return cls(before * after)

    def all_reduce(self, buffer: torch.Tensor, wire: torch.dtype) -> Pending:
        """It is there already."""
        return Pending(None, lambda: self._scale(buffer))

    def _scale(self, buffer: torch.Tensor) -> None:
        if self._factor != 1.0:
            buffer.mul_(self._factor)

    def reduce_scatter(self, buffer: torch.Tensor, out: torch.Tensor, wire: torch.dtype, *, add: bool) -> Pending:
        """Copy or add, unless `out` is the buffer."""

        def complete() -> None:
            if add:
                out.add_(buffer, alpha=self._factor)
                return
            if out.data_ptr() != buffer.data_ptr():
                out.copy_(buffer)
            self._scale(out)

        return Pending(None, complete)


ReductionEngine = Reducer | LocalReducer
