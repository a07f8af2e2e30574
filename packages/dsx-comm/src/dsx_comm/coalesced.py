"""Several tensors in one call: one handle, one entry in counters and log.

On nccl the calls are coalesced into one launch. Elsewhere an all-reduce packs the tensors of each dtype into one flat
buffer (one message instead of many), and gathers and scatters are issued one behind the other without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .calls import Call, Labels, all_reduce_volume, check_labels, run, share_volume
from .checks import check_even_split, contiguous, described, nbytes, not_overlapping, reduce_kind, tensor_of
from .collectives import settle, start_all_gather, start_all_reduce, start_reduce_scatter
from .errors import CommArgumentError
from .groups import Membership, member
from .works import Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """Reduce every tensor in place over the ranks, as `all_reduce` does, in few messages; shapes and dtypes may differ
    from tensor to tensor, and are the same on all ranks. Other arguments and results as in `all_reduce`.

    Raises:
        CommArgumentError: the list is empty, or an entry is no contiguous tensor.
    """
    name = "all_reduce_coalesced"
    to = member(group)
    _not_empty(tensors, name)
    kinds = {t.dtype: reduce_kind(op, tensor_of(t, name), name) for t in tensors}
    size = sum(map(nbytes, tensors))
    sent = all_reduce_volume(size, to.size)
    detail = "".join(described(dtype, kind) for dtype, kind in kinds.items())
    call = Call(name, to.group, to.size, size, sent, tensors[0].device, check_labels(labels), to.size, detail)

    def issue() -> Any:
        if to.backends.get(tensors[0].device.type) == "nccl":
            return settle(_fused(to, tensors[0].device, [_reduce(t, kinds[t.dtype], to) for t in tensors]), async_op)
        handles = [_packed([t for t in tensors if t.dtype == dtype], kind, to) for dtype, kind in kinds.items()]
        return settle(Handle(handles), async_op)

    return run(call, issue, async_op)


def _reduce(tensor: torch.Tensor, kind: Any, to: Membership) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor, kind, to.group, async_op=True)


def _packed(tensors: list[torch.Tensor], kind: Any, to: Membership) -> Any:
    if len(tensors) == 1 or to.size == 1:
        handles = [start_all_reduce(t, kind, to) for t in tensors]
        return handles[0] if len(handles) == 1 else Handle(handles)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    work = start_all_reduce(flat, kind, to)

    def unpack() -> None:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view(tensor.shape))

    return Handle([work], unpack)


def _fused(to: Membership, device: torch.device, starts: list[Callable[[], Any]]) -> Handle:
    """nccl: one launch for all."""
    manager = dist._coalescing_manager(to.group, device, async_ops=True)  # pyright: ignore[reportPrivateImportUsage]
    with manager as issued:
        for start in starts:
            start()
    return Handle(issued.works)  # the manager itself can only be waited for


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output_tensors[i] = the ranks' input_tensors[i] one after the other, for every i; in place is legal."""
    name = "all_gather_coalesced"
    to = member(group)
    names = ("output_tensors", "input_tensors")

    def start(output: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
        check_even_split(output, source, to, name, ("output", "input"))
        not_overlapping(output, source, to.rank, name)
        return lambda: start_all_gather(output, source, to)

    return _pairwise(name, names, output_tensors, input_tensors, input_tensors, start, to, async_op, labels)


def reduce_scatter_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output_tensors[i] (s elements) = part `rank` of the reduction of input_tensors[i] (N s elements), for every i.
    Other arguments and results as in `reduce_scatter_tensor`.

    Raises:
        CommArgumentError: the lists differ in length, or a pair does not fit.
    """
    name = "reduce_scatter_coalesced"
    to = member(group)
    names = ("output_tensors", "input_tensors")

    def start(output: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
        check_even_split(source, output, to, name, ("input", "output"))
        kind = reduce_kind(op, source, name)
        return lambda: start_reduce_scatter(output, source, kind, to)

    return _pairwise(name, names, output_tensors, input_tensors, output_tensors, start, to, async_op, labels)


def _pairwise(
    name: str,
    names: tuple[str, str],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    shares: Sequence[torch.Tensor],
    start: Callable[[torch.Tensor, torch.Tensor], Callable[[], Any]],
    to: Membership,
    async_op: bool,
    labels: Any,
) -> Any:
    """Check all pairs (`start` does it for one, and says how to issue it), then issue all; `shares` are the smaller
    sides.
    """
    _pairs(outputs, inputs, name, names)
    starts = []
    for output, source in zip(outputs, inputs):
        starts.append(start(output, source))
        contiguous(output, name, "output")
    size = sum(map(nbytes, shares))
    device = inputs[0].device
    detail = "".join(map(described, dict.fromkeys(t.dtype for t in inputs)))
    call = Call(name, to.group, to.size, size, share_volume(size, to.size), device, check_labels(labels), detail=detail)
    return run(call, lambda: settle(_together(starts, device, to), async_op), async_op)


def _together(starts: list[Callable[[], Any]], device: torch.device, to: Membership) -> Any:
    if to.size > 1 and to.backends.get(device.type) == "nccl":
        return _fused(to, device, starts)
    return Handle([start() for start in starts])


def _not_empty(tensors: Sequence[Any], name: str) -> None:
    if not tensors:
        raise CommArgumentError(f"{name}: got an empty list of tensors, expected at least one")


def _pairs(outputs: Sequence[Any], inputs: Sequence[Any], name: str, names: tuple[str, str]) -> None:
    _not_empty(outputs, name)
    if len(outputs) != len(inputs):
        raise CommArgumentError(
            f"{name}: {names[0]} has {len(outputs)} tensors, {names[1]} {len(inputs)}; expected as many"
        )


# - what this torch and backend can do, under the names that programs written for DeepSpeed call


def has_all_gather_into_tensor() -> bool:
    """True: `all_gather_into_tensor` is there on every backend."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: `reduce_scatter_tensor` is there on every backend."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: `all_reduce_coalesced` is there on every backend."""
    return True


def has_coalescing_manager() -> bool:
    """True if torch can fuse several nccl calls into one launch."""
    return hasattr(dist, "_coalescing_manager")
