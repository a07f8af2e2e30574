"""The all-reduce of sparse gradients: only the rows that have a gradient travel.

A batch touches a few rows of a large embedding; with `torch.nn.Embedding(sparse=True)` its gradient is a sparse COO
tensor of these rows. Each rank gathers the indices and values of all ranks and adds up values of equal index. With N
ranks of at most k entries each, that sends (N-1) k (index + value) bytes instead of 2 (N-1)/N times the dense gradient.

How much to send is known only when all ranks have said how many entries they have. So an asynchronous call has two
messages, and the second one needs a thread: a `StepLane` does both while the caller computes.

Left out: asynchronous calls on a device (the host reads the numbers of entries, and waits), compressed (CSR) layouts,
other operators than SUM and AVG.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .calls import Call, Labels, check_labels, guarded, run, share_volume
from .checks import described, nbytes, reduce_kind
from .collectives import ReduceOp, settle, start_all_gather
from .errors import CommArgumentError, MismatchError
from .groups import Membership, member
from .hang import WATCH, unit
from .step_lane import StepLane
from .works import Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAME = "sparse_allreduce"
_SMALL = torch.iinfo(torch.int32).max


class SparseWork(Handle):
    """A `sparse_allreduce` under way: a handle with a result."""

    def __init__(self, transfers: Sequence[Any], reduction: _Reduction) -> None:
        super().__init__(transfers)
        self._reduction = reduction

    def result(self) -> torch.Tensor:
        """The reduced tensor; waits for it."""
        self.wait()
        found = self._reduction.total
        if found is None:
            raise RuntimeError(f"{_NAME}: the operation has ended without a result")
        return found


def sparse_allreduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    lane: StepLane | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """The sum or mean over the ranks of a sparse COO tensor: a new, coalesced one, bitwise identical on all ranks.

    Ranks may have different numbers of entries, also none. An entry that a rank has not counts as zero there. 16-bit
    floats are added up in float32 and rounded once.

    Args:
        tensor: sparse COO, of the same shape and dtype on all ranks; dimensions of dense values are fine (rows of an
            embedding). An asynchronous call reads it until its handle was waited for.
        op: ReduceOp.SUM or ReduceOp.AVG.
        group: None for the default group.
        async_op: return a `SparseWork` at once, whose `result()` is the tensor. On a device it is done by then.
        lane: does the work of asynchronous calls, in their order. The group is then to be left to calls on this lane.

    Raises:
        CommArgumentError: another layout or operator, or an asynchronous call without a lane.
        MismatchError: shapes or dtypes differ between ranks; on all ranks.
    """
    to = member(group)
    kind = _check(tensor, op)
    if async_op and lane is None:
        raise CommArgumentError(
            f"{_NAME}: got async_op=True without a lane; give lane=dsx_comm.StepLane(), one for all calls on this"
            " group, and use the group for nothing else"
        )
    reduction = _Reduction(tensor.detach(), kind, to, check_labels(labels))
    if lane is None or to.size == 1 or tensor.device.type != "cpu":
        with torch.no_grad():
            reduction.run()
        return SparseWork((), reduction) if async_op else reduction.total
    handle = lane.do([(None, reduction.run)], (tensor,), async_op)
    return reduction.total if handle is None else settle(SparseWork((handle,), reduction), True)


class _Reduction:
    """One reduction. `total`: its result, once `run` has returned."""

    def __init__(self, tensor: torch.Tensor, kind: Any, to: Membership, labels: Labels) -> None:
        self._tensor, self._kind, self._to, self._labels = tensor, kind, to, labels
        self._unit = WATCH.label()
        self.total: torch.Tensor | None = None

    def run(self) -> None:
        """Reduce. Maybe in another thread than the caller's, on behalf of whom the caller acted."""
        with unit(self._unit):
            self._run()

    def _run(self) -> None:
        to, own = self._to, self._tensor.coalesce()
        if to.size == 1:
            self.total = own
            return
        counts = _counts(own, to)
        longest = max(counts)
        indices = _padded(own.indices().t(), longest, torch.int32 if max(own.shape) <= _SMALL else torch.int64)
        values = _padded(own.values(), longest, own.dtype)
        size = nbytes(indices) + nbytes(values)
        sent = share_volume(size + 16, to.size)  # the counts, too
        detail = described(own.dtype, self._kind)
        call = Call(_NAME, to.group, to.size, size, sent, own.device, self._labels, 1, detail)
        all_indices, all_values = (part.new_empty((to.size, *part.shape)) for part in (indices, values))

        def issue() -> None:
            if longest:
                settle(start_all_gather(all_indices, indices, to), False)
                settle(start_all_gather(all_values, values, to), False)

        run(call, issue)
        divisor = to.size if self._kind is ReduceOp.AVG else 1
        self.total = _added_up(own, counts, all_indices, all_values, divisor)


def _check(tensor: Any, op: Any) -> Any:
    """The operator. Raises CommArgumentError."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        got = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CommArgumentError(
            f"{_NAME}: tensor: got {got}, expected a sparse COO tensor; all_reduce takes dense ones"
        )
    kind = reduce_kind(op, tensor, _NAME)
    if kind is not ReduceOp.SUM and kind is not ReduceOp.AVG:
        raise CommArgumentError(f"{_NAME}: op: got {op}, expected ReduceOp.SUM or ReduceOp.AVG")
    return kind


def _counts(own: torch.Tensor, to: Membership) -> list[int]:
    """The number of entries of each rank. Raises MismatchError on all ranks if their shapes or dtypes differ."""
    form = f"{tuple(own.shape)} {own.dtype}, {own.sparse_dim()} sparse dimension(s)"
    mine = torch.tensor([own._nnz(), zlib.crc32(form.encode())], dtype=torch.int64, device=own.device)
    counts = mine.new_empty(to.size, 2)
    ask = Call(_NAME, to.group, to.size, 16, 0, own.device, {})
    guarded(ask, lambda: settle(start_all_gather(counts, mine, to), False))
    rows = counts.tolist()
    if len({checksum for _, checksum in rows}) > 1:
        alike = [rank for rank, (_, checksum) in zip(to.ranks, rows) if checksum == rows[to.rank][1]]
        raise MismatchError(
            f"{_NAME}: tensors differ between ranks: rank(s) {', '.join(map(str, alike))} have {form}, others do not"
        )
    return [count for count, _ in rows]


def _padded(rows: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """`length` rows of `dtype`, those beyond what there is zero: messages of all ranks have one size."""
    whole = torch.zeros((length, *rows.shape[1:]), dtype=dtype, device=rows.device)
    whole[: len(rows)] = rows
    return whole


def _added_up(
    own: torch.Tensor, counts: list[int], indices: torch.Tensor, values: torch.Tensor, divisor: int
) -> torch.Tensor:
    """The sum of all ranks' entries, in rank order."""
    place = torch.cat([part[:count] for part, count in zip(indices, counts)]).t().to(torch.int64)
    value = torch.cat([part[:count] for part, count in zip(values, counts)])
    wide = torch.float32 if value.is_floating_point() and value.element_size() < 4 else value.dtype
    total = torch.sparse_coo_tensor(place, value.to(wide), own.shape, check_invariants=False).coalesce()
    if divisor != 1:
        total.values().div_(divisor)
    return total if wide == own.dtype else total.to(own.dtype)
