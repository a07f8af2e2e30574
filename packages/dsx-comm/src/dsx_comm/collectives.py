"""Collectives on tensors, with the names and arguments of torch.distributed.

What is added: AVG on every backend, clear errors before anything is sent, byte counting, the communication log
(`prof`, `log_name`, `debug`), and on gloo host tensors the composed algorithms of `composed.py` (any dtype, sums in
rank order). `async_op=True` returns a handle with `wait()` and `is_completed()`; otherwise the functions return None.
Those with a root (`broadcast`, `reduce`, `gather`, `scatter`) are in `rooted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import composed
from .calls import Call, Labels, all_reduce_volume, check_labels, run, share_volume
from .checks import (
    check_even_split,
    contiguous,
    described,
    nbytes,
    not_overlapping,
    reduce_kind,
    tensor_list,
    tensor_of,
)
from .groups import Membership, member
from .hang import WATCH
from .shm.tensors import without_overlap
from .works import Done, Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack

ReduceOp = dist.ReduceOp
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
# torch 2.13 has given these another name
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
COMPOSED_REDUCE = (torch.float16, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)


def settle(handle: Any, async_op: bool) -> Any:
    """The handle for asynchronous calls, else None once it is done."""
    if async_op:
        return handle if isinstance(handle, Handle) else Handle((handle,))  # a hang in its wait can be explained
    if isinstance(handle, Handle):
        handle.wait()
    elif handle is not None:
        note = WATCH.current()
        limit = None if note is None else WATCH.resume(note, (handle,))
        handle.wait() if limit is None else handle.wait(limit)
    return None


def averaged(
    issue: Callable[..., Any],
    tensor: torch.Tensor,
    kind: Any,
    to: Membership,
    divide: bool = True,
    at_once: bool = False,
) -> Any:
    """AVG where the backend has none: SUM, then a division where the result is. Done already with `at_once`."""
    if kind is not _AVG or to.averages(tensor):
        return issue(kind)
    work = issue(_SUM)
    if not at_once:
        return Handle([work], (lambda: tensor.div_(to.size)) if divide else None)
    settle(work, False)  # a handle of ours would only be waited for
    if divide:
        tensor.div_(to.size)
    return None


# - reductions


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **labels: Unpack[Labels]
) -> Any:
    """Reduce `tensor` in place over the ranks of the group, and give all of them the result.

    Args:
        tensor: contiguous; the same shape and dtype on all ranks.
        op: `ReduceOp.SUM`, `AVG`, `MAX`, `MIN`, `PRODUCT` or a bitwise one; `AVG` works on every backend.
        group: default: all ranks.
        async_op: return a handle at once; the result is there when its `wait()` has returned.

    Returns:
        None, or the handle.

    Raises:
        CommArgumentError: no tensor, not contiguous, or an operator that its dtype does not have.
        MismatchError: ranks call something else, or with other sizes.
        PeerLostError: the process of a rank has ended.
    """
    return reduce_everywhere("all_reduce", tensor, op, group, async_op, labels)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **labels: Unpack[Labels]
) -> Any:
    """`all_reduce` under the name that inference code uses, with its arguments and results; logged apart."""
    return reduce_everywhere("inference_all_reduce", tensor, op, group, async_op, labels)


def reduce_everywhere(name: str, tensor: torch.Tensor, op: Any, group: Any, async_op: bool, labels: Any) -> Any:
    """The body of the all-reduce functions."""
    to = member(group)
    kind = reduce_kind(op, tensor_of(tensor, name), name)
    size = nbytes(tensor)
    sent = all_reduce_volume(size, to.size)
    call = Call(
        name, to.group, to.size, size, sent, tensor.device, check_labels(labels), to.size, described(tensor.dtype, kind)
    )
    return run(call, lambda: settle(start_all_reduce(tensor, kind, to, not async_op), async_op), async_op)


def start_all_reduce(tensor: torch.Tensor, kind: Any, to: Membership, at_once: bool = False) -> Any:
    """Issue an all-reduce and return its handle; `at_once`: the caller waits, so None will do if it is done."""
    if tensor.numel() == 0 or to.size == 1:
        return Done()
    if at_once and to.shared:
        return dist.all_reduce(tensor, kind, to.group)
    if to.composes(tensor) and tensor.dtype in COMPOSED_REDUCE and composed.direct(to.size, nbytes(tensor) // to.size):
        if tensor.is_contiguous():
            return composed.all_reduce(tensor, kind, to)
        packed = tensor.contiguous()
        return _then(composed.all_reduce(packed, kind, to), lambda: tensor.copy_(packed))
    start = lambda k: dist.all_reduce(tensor, k, to.group, async_op=True)  # noqa: E731
    return averaged(start, tensor, kind, to, at_once=at_once)


def _then(first: Handle, finish: Callable[[], Any]) -> Handle:
    return Handle([first], finish)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output (s elements) = part `rank` of the reduction of all ranks' `input` (N s elements, flattened).

    `output` may be a part of `input`. On gloo, 16-bit floats are summed in float32, all in rank order. Other arguments
    and results as in `all_reduce`.

    Raises:
        CommArgumentError: `input` has not N times as many elements as `output`, or another dtype or device.
        MismatchError: ranks call something else, or with other sizes.
    """
    name = "reduce_scatter_tensor"
    to = member(group)
    check_even_split(input, output, to, name, ("input", "output"))
    contiguous(output, name, "output")
    kind = reduce_kind(op, input, name)
    size, detail = nbytes(output), described(input.dtype, kind)
    sent = share_volume(size, to.size)
    call = Call(name, to.group, to.size, size, sent, input.device, check_labels(labels), 1, detail)
    return run(call, lambda: settle(start_reduce_scatter(output, input, kind, to, not async_op), async_op), async_op)


def start_reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, kind: Any, to: Membership, at_once: bool = False
) -> Any:
    """Issue a reduce-scatter and return its handle; `at_once` as for `start_all_reduce`."""
    if output.numel() == 0:
        return Done()
    source = source.contiguous()
    if to.size == 1:
        if output.data_ptr() != source.data_ptr():
            output.view(-1).copy_(source.view(-1))
        return Done()
    if to.composes(source) and composed.direct(to.size, nbytes(output)):
        return composed.reduce_scatter(output, source, kind, to)
    native = getattr(dist, REDUCE_SCATTER)
    place, flat = _flat(output), _flat(source)
    if at_once and to.shared:
        return native(place, flat, kind, to.group)
    start = lambda k: native(place, flat, k, to.group, async_op=True)  # noqa: E731
    return averaged(start, output, kind, to, at_once=at_once)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor in one dimension (a view costs a microsecond)."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output = reduction of all ranks' `input_list[rank]`. The list has one tensor for each rank; they may differ in
    size (the same sizes on all ranks). Other arguments and results as in `all_reduce`.

    Raises:
        CommArgumentError: another number of tensors than ranks, or `output` has not the size of its part.
    """
    name = "reduce_scatter"
    to = member(group)
    contiguous(tensor_of(output, name, "output"), name, "output")
    parts = [p.contiguous() for p in tensor_list(input_list, output, to.size, name, "input_list", same_size=False)]
    if parts[to.rank].numel() != output.numel():
        raise_sizes(name, f"input_list[{to.rank}]", parts[to.rank].numel(), output.numel())
    kind = reduce_kind(op, output, name)
    sent = sum(nbytes(part) for p, part in enumerate(parts) if p != to.rank)
    size, detail = nbytes(output), described(output.dtype, kind)
    call = Call(name, to.group, to.size, size, sent, output.device, check_labels(labels), 1, detail)

    def issue() -> Any:
        if to.size == 1:
            output.view(-1).copy_(parts[0].view(-1))
            return settle(Done(), async_op)
        if to.composes(output):
            return settle(composed.reduce_scatter_parts(output, parts, kind, to), async_op)
        start = lambda k: dist.reduce_scatter(output, parts, k, to.group, async_op=True)  # noqa: E731
        return settle(averaged(start, output, kind, to, at_once=not async_op), async_op)

    return run(call, issue, async_op)


def raise_sizes(name: str, what: str, got: int, expected: int) -> None:
    """Raise the error of two sizes that should be one."""
    from .errors import CommArgumentError

    raise CommArgumentError(f"{name}: {what} has {got} elements, expected {expected}")


def reduce_scatter_fn(
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """`reduce_scatter_tensor` under the name that DeepSpeed gives it; `tensor` is its `input`."""
    return reduce_scatter_tensor(output, tensor, op, group, async_op, **labels)


# - gathers


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output_tensor (N s elements) = the ranks' `input_tensor` (s elements) one after the other.

    In place is legal: `input_tensor` may be this rank's part of `output_tensor`; any other overlap is an error.
    """
    name = "all_gather_into_tensor"
    to, output, input = member(group), output_tensor, input_tensor
    check_even_split(output, input, to, name, ("output", "input"))
    contiguous(output, name, "output")
    not_overlapping(output, input, to.rank, name)
    size, detail = nbytes(input), described(input.dtype)
    sent = share_volume(size, to.size)
    call = Call(name, to.group, to.size, size, sent, input.device, check_labels(labels), 1, detail)
    return run(call, lambda: settle(start_all_gather(output, input, to, not async_op), async_op), async_op)


def start_all_gather(output: torch.Tensor, source: torch.Tensor, to: Membership, at_once: bool = False) -> Any:
    """Issue an all-gather and return its handle; `at_once` as for `start_all_reduce`."""
    if output.numel() == 0:
        return Done()
    if to.size == 1:
        if output.data_ptr() != source.data_ptr():
            output.view(-1).copy_(source.reshape(-1))
        return Done()
    flat = _flat(source.contiguous())
    if to.composes(source):
        if composed.direct_gather(to.size, nbytes(source)):
            return composed.all_gather(output.view(-1), flat, to)
        output, flat = composed.as_bytes(output), composed.as_bytes(flat)  # gloo knows only some dtypes
    return getattr(dist, ALL_GATHER)(_flat(output), flat, to.group, async_op=not (at_once and to.shared))


def allgather_fn(
    output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False, **labels: Unpack[Labels]
) -> Any:
    """`all_gather_into_tensor` under the name that DeepSpeed gives it: output (N s elements) = all ranks' `input`
    (s elements each), in rank order.
    """
    return all_gather_into_tensor(output, input, group, async_op, **labels)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """tensor_list[p] = rank p's `tensor`; all of one size."""
    to = member(group)
    outputs = checked_list(tensor_list, tensor, to, "all_gather", "tensor_list")
    sent = share_volume(nbytes(tensor), to.size)
    detail = described(tensor.dtype)
    call = Call("all_gather", to.group, to.size, nbytes(tensor), sent, tensor.device, check_labels(labels), 1, detail)

    def issue() -> Any:
        source = tensor.contiguous()
        if to.composes(tensor):
            (source,) = without_overlap([source], outputs[: to.rank] + outputs[to.rank + 1 :])
        outputs[to.rank].copy_(source.view(outputs[to.rank].shape))
        if tensor.numel() == 0 or to.size == 1:
            return settle(Done(), async_op)
        if to.composes(tensor):
            return settle(composed.exchange([source] * to.size, outputs, to, composed.GATHER_TAG), async_op)
        return settle(dist.all_gather(outputs, source, to.group, async_op=True), async_op)

    return run(call, issue, async_op)


def checked_list(values: Any, like: torch.Tensor, to: Membership, name: str, what: str) -> list[torch.Tensor]:
    tensors = tensor_list(values, tensor_of(like, name), to.size, name, what)
    for i, tensor in enumerate(tensors):
        contiguous(tensor, name, f"{what}[{i}]")
    return tensors
