"""Gathers and reductions that send plain values: exact, in another dtype, and in pieces of a maximum size.

Each stage has one kind of reduction: stage 0 all-reduces in place, stages 1-3 reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dsx_comm
import torch
from dsx_comm.lanes import Pending

from ..params.flat import FlatGroup
from ..plan.layout import pieces
from .protocol import ReduceTransport, Stateless, Then

__all__ = ["AllReduce", "Cast", "HybridReduceScatter", "InPieces", "PlainGather", "ReduceScatter", "RowsAllReduce"]


class PlainGather(Stateless):
    """One all-gather over `RankSet.gather_group`, which is prepared once per flat group."""

    def __init__(self) -> None:
        self._prepared: dict[FlatGroup, dsx_comm.PreparedCollective] = {}

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        prepared = self._prepared.get(group)
        if prepared is None:
            ranks = group.ranks
            if ranks.size == 1:
                out.copy_(source)
                return None
            prepared = self._prepared[group] = dsx_comm.prepare_all_gather(
                group.layout.shard_numel, group.key.dtype, group.key.device, ranks.gather_group, label=label
            )
        return prepared.start(out, source)


class AllReduce(Stateless):
    """Computes the sum or mean in place, on every rank.

    Args:
        op: `dsx_comm.ReduceOp.SUM` or `AVG`.
    """

    def __init__(self, op: Any) -> None:
        self._op = op

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        with dsx_comm.unit(label):
            return dsx_comm.all_reduce(source, op=self._op, group=group.ranks.group, async_op=True)


class RowsAllReduce(Stateless):
    """Computes the sum or mean of sparse COO gradients while backward goes on.

    Only rows that some rank has are sent (`dsx_comm.sparse_allreduce`). `out` is a sparse tensor too.

    Args:
        op: `dsx_comm.ReduceOp.SUM` or `AVG`.
        group: the process group. Nothing else may use it, because the second message starts in the background.
    """

    def __init__(self, op: Any, group: Any) -> None:
        self._op, self._group, self._lane = op, group, dsx_comm.StepLane()

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        with dsx_comm.unit(label):
            work = dsx_comm.sparse_allreduce(source, self._op, self._group, async_op=True, lane=self._lane)
        return Then([work], lambda: out.copy_(work.result()))


class ReduceScatter(Stateless):
    """Computes this rank's shard of the sum or mean: one reduce-scatter, prepared once per group and size."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._prepared: dict[tuple[FlatGroup, int, torch.dtype], dsx_comm.PreparedCollective] = {}

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        key = (group, out.numel(), source.dtype)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = dsx_comm.prepare_reduce_scatter(
                out.numel(), source.dtype, group.key.device, self._op, group.ranks.group, label=label
            )
        return prepared.start(out, source)


class HybridReduceScatter(Stateless):
    """Computes this rank's shard of the sum or mean over all copies of the buffer (hybrid sharding).

    It is a reduce-scatter among the ranks that share a copy, then an all-reduce of the shard over `RankSet.copies`.
    """

    def __init__(self, op: Any) -> None:
        self._op = op

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        ranks = group.ranks
        copies = None if ranks.copies is None else ranks.copies.group
        with dsx_comm.unit(label):
            return dsx_comm.hybrid_reduce_scatter(out, source, copies, self._op, ranks.group, async_op=True)


class Cast:
    """Sends gradients in another dtype than that of their buffer.

    Args:
        inner: sends them.
        wire: maps the dtype of a parameter to the dtype in which its gradient is sent.
    """

    def __init__(self, inner: ReduceTransport, wire: Callable[[torch.dtype], torch.dtype]) -> None:
        self._inner, self._wire = inner, wire

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return self._inner.tensors()

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return self._inner.result_dtype(self._wire(group.key.dtype), group)

    def passes(self, numel: int, dtype: torch.dtype, group: FlatGroup) -> ReduceTransport | None:
        """See `Wrapper.passes`."""
        return self._inner if dtype == self._wire(group.key.dtype) else None

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        wire = self._wire(group.key.dtype)
        if wire == source.dtype:
            return self._inner.start(out, source, group, label)
        message = source.to(wire)
        if out is not source:
            return Then([self._inner.start(out, message, group, label)], keeps=message)
        pending = self._inner.start(message, message, group, label)
        return Then([pending], lambda: out.copy_(message))


class InPieces:
    """Cuts messages into pieces of at most `most` elements. All pieces are sent at once.

    The pieces of a reduce-scatter are copies, which are freed when the unit's reduction is complete.
    """

    def __init__(self, inner: ReduceTransport, most: int) -> None:
        self._inner, self._most = inner, most

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return self._inner.tensors()

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return self._inner.result_dtype(source, group)

    def passes(self, numel: int, dtype: torch.dtype, group: FlatGroup) -> ReduceTransport | None:
        """See `Wrapper.passes`."""
        return self._inner if numel <= self._most else None

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        inner = self._inner
        if source.numel() <= self._most:
            return inner.start(out, source, group, label)
        if out is source:
            parts = [source[start:stop] for start, stop in pieces(source.numel(), self._most)]
            return Then([inner.start(part, part, group, label) for part in parts])
        rows = source.view(group.ranks.size, -1)  # row r is for rank r
        cuts = pieces(rows.shape[1], self._most // group.ranks.size)
        parts = [rows[:, start:stop].reshape(-1) for start, stop in cuts]
        return Then(
            [inner.start(out[start:stop], part, group, label) for (start, stop), part in zip(cuts, parts)], keeps=parts
        )
