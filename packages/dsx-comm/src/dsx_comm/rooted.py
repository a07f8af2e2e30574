"""Collectives with a root: broadcast, reduce, gather and scatter, with the names and arguments of torch.distributed.

`src` and `dst` are global ranks, `group_src` and `group_dst` the group's, as in torch. What they add to torch's is in
`collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import composed
from .calls import Call, Labels, check_labels, run, share_volume
from .checks import (
    contiguous,
    described,
    nbytes,
    reduce_kind,
    root,
    tensor_list,
    tensor_of,
)
from .collectives import ReduceOp, averaged, checked_list, raise_sizes, settle
from .groups import Membership, member
from .ordered import reduce_in_order
from .shm.tensors import without_overlap
from .works import Done, Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """Reduce `tensor` over the ranks into global rank `dst`; elsewhere its content is undefined afterwards.

    `group_dst` gives the rank within `group` instead. Other arguments, result and errors as in `all_reduce`.
    """
    to = member(group)
    kind = reduce_kind(op, tensor_of(tensor, "reduce"), "reduce")
    dst, target = root(dst, group_dst, to, "reduce", "dst")
    size = nbytes(tensor)
    sent = 0 if to.rank == target else size
    detail = described(tensor.dtype, kind, target)
    call = Call("reduce", to.group, to.size, size, sent, tensor.device, check_labels(labels), 1, detail)

    def issue() -> Any:
        if tensor.numel() == 0 or to.size == 1:
            return settle(Done(), async_op)
        if to.composes(tensor) and tensor.is_contiguous():
            return settle(_composed_reduce(tensor, target, kind, to), async_op)
        start = lambda k: dist.reduce(tensor, dst, k, to.group, async_op=True)  # noqa: E731
        divides = to.rank == target
        return settle(averaged(start, tensor, kind, to, divide=divides, at_once=not async_op), async_op)

    return run(call, issue, async_op)


def _composed_reduce(tensor: torch.Tensor, target: int, kind: Any, to: Membership) -> Handle:
    nothing: list[torch.Tensor | None] = [None] * to.size
    if to.rank != target:
        sends = [tensor if p == target else None for p in range(to.size)]
        return composed.exchange(sends, nothing, to, composed.EXCHANGE_TAG)
    flat = tensor.view(-1)
    staging = [flat if p == target else torch.empty_like(flat) for p in range(to.size)]
    finish = lambda: reduce_in_order(staging, kind, flat)  # noqa: E731
    return composed.exchange(nothing, staging, to, composed.EXCHANGE_TAG, finish)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """On global rank `dst` (default 0): gather_list[p] = rank p's `tensor`. Elsewhere `gather_list` must be None or
    empty.
    """
    to = member(group)
    dst, target = root(dst, group_dst, to, "gather", "dst", 0)
    at_target = to.rank == target
    outputs = checked_list(gather_list, tensor, to, "gather", "gather_list") if at_target else None
    if not at_target and gather_list:
        raise_sizes("gather", "gather_list on a rank that is not dst", len(gather_list), 0)
    sent = 0 if at_target else nbytes(tensor)
    detail = described(tensor.dtype, root=target)
    call = Call("gather", to.group, to.size, nbytes(tensor), sent, tensor.device, check_labels(labels), 1, detail)

    def issue() -> Any:
        source = tensor.contiguous()
        if outputs is not None and (to.size == 1 or to.composes(tensor)):
            outputs[target].copy_(source.view(outputs[target].shape))
        if to.composes(tensor) or to.size == 1:
            sends = [source if p == target and not at_target else None for p in range(to.size)]
            receives = outputs or [None] * to.size
            return settle(composed.exchange(sends, receives, to, composed.EXCHANGE_TAG), async_op)
        return settle(dist.gather(source, outputs, dst, to.group, async_op=True), async_op)

    return run(call, issue, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """Copy global rank `src`'s `tensor` to all ranks of the group, in place."""
    to = member(group)
    src, source = root(src, group_src, to, "broadcast", "src")
    size = nbytes(tensor_of(tensor, "broadcast"))
    sent = size if to.rank == source and to.size > 1 else 0
    detail = described(tensor.dtype, root=source)
    call = Call("broadcast", to.group, to.size, size, sent, tensor.device, check_labels(labels), 1, detail)
    return run(call, lambda: settle(start_broadcast(tensor, src, source, to, not async_op), async_op), async_op)


def start_broadcast(tensor: torch.Tensor, src: int, source: int, to: Membership, at_once: bool = False) -> Any:
    """Issue a broadcast and return its handle; `at_once` as for `start_all_reduce`."""
    if tensor.numel() == 0 or to.size == 1:
        return Done()
    if not to.composes(tensor):
        return dist.broadcast(tensor, src, to.group, async_op=not (at_once and to.shared))
    # as bytes: gloo knows only some dtypes
    packed = tensor if tensor.is_contiguous() else tensor.contiguous()
    work = dist.broadcast(composed.as_bytes(packed), src, to.group, async_op=True)
    late = packed is not tensor and to.rank != source
    return Handle([work], (lambda: tensor.copy_(packed)) if late else None)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """tensor = global rank `src`'s (default 0) scatter_list[rank]. Elsewhere `scatter_list` must be None or empty."""
    to = member(group)
    src, source = root(src, group_src, to, "scatter", "src", 0)
    at_source = to.rank == source
    contiguous(tensor_of(tensor, "scatter"), "scatter", "tensor")
    inputs = tensor_list(scatter_list, tensor, to.size, "scatter", "scatter_list") if at_source else None
    if not at_source and scatter_list:
        raise_sizes("scatter", "scatter_list on a rank that is not src", len(scatter_list), 0)
    sent = share_volume(nbytes(tensor), to.size) if at_source else 0
    detail = described(tensor.dtype, root=source)
    call = Call("scatter", to.group, to.size, nbytes(tensor), sent, tensor.device, check_labels(labels), 1, detail)

    def issue() -> Any:
        parts = [part.contiguous() for part in inputs] if inputs is not None else None
        if parts is not None and not to.shared:
            parts = without_overlap(parts, [tensor])
        if not (to.composes(tensor) or to.size == 1):
            return settle(dist.scatter(tensor, parts, src, to.group, async_op=True), async_op)
        if parts is not None:
            tensor.view(-1).copy_(parts[source].view(-1))
        receives = [tensor if p == source and not at_source else None for p in range(to.size)]
        return settle(composed.exchange(parts or [None] * to.size, receives, to, composed.EXCHANGE_TAG), async_op)

    return run(call, issue, async_op)
