"""All-to-all and barriers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsx_core.device import Device

from . import composed
from .calls import Call, Labels, check_labels, run
from .checks import contiguous, described, nbytes, tensor_list, tensor_of
from .collectives import settle
from .errors import CommArgumentError, CommError
from .groups import Membership, member
from .shm.tensors import without_overlap
from .works import Done, Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """Split `input` along dim 0, send piece p to rank p, and concatenate in `output` what came from rank 0, 1, ...

    Without split sizes dim 0 must divide evenly. Pieces may be empty. Where `output` shares memory with `input`, what
    is sent is copied first.

    Args:
        output, input: of one dtype and device; all dimensions but the first are equal.
        output_split_sizes: rows that come from each rank; their sum is the first dimension of `output`.
        input_split_sizes: rows that go to each rank; their sum is the first dimension of `input`.
        group: default: all ranks.
        async_op: return a handle at once; the rows are there when its `wait()` has returned.

    Raises:
        CommArgumentError: dtypes, devices or sizes do not fit together.
        MismatchError: a rank sends another number of rows than its receiver expects.
    """
    name = "all_to_all_single"
    to = member(group)
    tensor_of(input, name, "input")
    contiguous(tensor_of(output, name, "output"), name, "output")
    if output.dtype != input.dtype or output.device != input.device:
        raise CommArgumentError(
            f"{name}: output is {output.dtype} on {output.device}, input {input.dtype} on {input.device}; expected the "
            "same"
        )
    source = input.contiguous()
    if not to.shared:  # groups in shared memory see to it by themselves, and copy less
        (source,) = without_overlap([source], [output])
    pieces = _split(source, input_split_sizes, to.size, name, "input")
    places = _split(output, output_split_sizes, to.size, name, "output")
    sent = sum(nbytes(piece) for p, piece in enumerate(pieces) if p != to.rank)
    detail = described(source.dtype)
    call = Call(name, to.group, to.size, nbytes(source), sent, source.device, check_labels(labels), detail=detail)

    def issue() -> Any:
        if to.composes(source) or to.size == 1:
            return settle(_composed(places, pieces, to, name), async_op)
        sizes = (list(s) if s else None for s in (output_split_sizes, input_split_sizes))
        return settle(dist.all_to_all_single(output, source, *sizes, group=to.group, async_op=True), async_op)

    return run(call, issue, async_op)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """output_tensor_list[p] = rank p's input_tensor_list[rank]; sizes may differ pair by pair.

    Inputs that share memory with outputs are copied first.
    """
    name = "all_to_all"
    to = member(group)
    sources = tensor_list(input_tensor_list, None, to.size, name, "input_tensor_list", same_size=False)
    places = tensor_list(output_tensor_list, sources[0], to.size, name, "output_tensor_list", same_size=False)
    for i, place in enumerate(places):
        contiguous(place, name, f"output_tensor_list[{i}]")
    pieces = [piece.contiguous() for piece in sources]
    if not to.shared:
        pieces = without_overlap(pieces, places)
    sent = sum(nbytes(piece) for p, piece in enumerate(pieces) if p != to.rank)
    size, detail = sum(map(nbytes, pieces)), described(pieces[0].dtype)
    call = Call(name, to.group, to.size, size, sent, pieces[0].device, check_labels(labels), detail=detail)

    def issue() -> Any:
        if to.composes(pieces[0]) or to.size == 1:
            return settle(_composed(places, pieces, to, name), async_op)
        return settle(dist.all_to_all(places, pieces, to.group, async_op=True), async_op)

    return run(call, issue, async_op)


def start_all_to_all(output: torch.Tensor, source: torch.Tensor, to: Membership) -> Any:
    """Issue an all-to-all of equal pieces (1-D and contiguous) and return its handle; counts and checks nothing."""
    if to.composes(source) or to.size == 1:
        pieces, places = (list(t.view(to.size, -1).unbind(0)) for t in (source, output))
        return _composed(places, pieces, to, "all_to_all")
    return dist.all_to_all_single(output, source, group=to.group, async_op=True)


def _split(tensor: torch.Tensor, sizes: Sequence[int] | None, count: int, name: str, what: str) -> list[torch.Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if sizes is None or len(sizes) == 0:
        if tensor.dim() == 0 or rows % count:
            raise CommArgumentError(
                f"{name}: {what} has {rows} rows, which {count} (group size) does not divide: give {what}_split_sizes"
            )
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
        raise CommArgumentError(
            f"{name}: {what}_split_sizes: got {list(sizes)}, expected {count} sizes that add up to {rows} (rows of "
            f"{what})"
        )
    return list(tensor.split(list(sizes)))


def _composed(places: list[torch.Tensor], pieces: list[torch.Tensor], to: Membership, name: str) -> Any:
    own, place = pieces[to.rank], places[to.rank]
    if own.numel() != place.numel():
        raise CommArgumentError(
            f"{name}: this rank sends itself {own.numel()} elements but expects {place.numel()} from itself"
        )
    place.view(-1).copy_(own.view(-1))
    return Done() if to.size == 1 else composed.exchange(pieces, places, to, composed.EXCHANGE_TAG)


def barrier(
    group: Any = None, async_op: bool = False, device_ids: list[int] | None = None, **labels: Unpack[Labels]
) -> Any:
    """Return (with `async_op`: let the handle complete) once every rank of the group has come here. `device_ids`: for
    nccl, as torch has it.
    """
    to = member(group)
    call = Call("barrier", to.group, to.size, 0, 0, _device_of(to), check_labels(labels))

    def issue() -> Any:
        if to.size == 1:
            return settle(Done(), async_op)
        if to.shared and not async_op:
            return dist.barrier(to.group)
        return settle(Handle([dist.barrier(to.group, async_op=True, device_ids=device_ids)]), async_op)

    return run(call, issue, async_op)


def _device_of(to: Membership) -> torch.device:
    """The device on which a call without tensors runs: as in torch, the accelerator if the group serves one."""
    current = Device.current()
    return current.torch_device if current.kind in to.backends else torch.device("cpu")


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **labels: Unpack[Labels]
) -> None:
    """A barrier whose failure names the missing ranks (the first, or all with `wait_all_ranks`), within `timeout`.

    gloo and dsx have it; on other backends make a gloo group for it. On gloo, rank 0 of the group does the naming; on
    dsx every rank does, and names all that are missing.

    Raises:
        CommError: the group's backend has it not.
        CollectiveTimeoutError, RuntimeError: ranks did not come (the second is torch's, on gloo).
    """
    to = member(group)
    if to.shared:
        call = Call("monitored_barrier", to.group, to.size, 0, 0, torch.device("cpu"), check_labels(labels))
        run(call, lambda: dist.barrier(to.group, timeout=timeout))
        return
    if to.backends.get("cpu") != "gloo":
        raise CommError(
            f"monitored_barrier works on gloo groups, this one is {to.backends}: pass new_group(backend='gloo')"
        )
    call = Call("monitored_barrier", to.group, to.size, 0, 0, torch.device("cpu"), check_labels(labels))
    if to.size > 1:
        run(call, lambda: dist.monitored_barrier(to.group, timeout, wait_all_ranks))
