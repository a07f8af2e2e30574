"""Sends and receives between two ranks.

`isend` and `irecv` return a handle at once (those of DeepSpeed block). Ranks are global. On gloo tags match sends with
receives; nccl ignores tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import composed
from .calls import Call, Labels, check_labels, run
from .checks import contiguous, nbytes, root, tensor_of
from .errors import CommArgumentError
from .groups import Membership, member
from .works import Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> None:
    """Send `tensor` to global rank `dst`; returns when the memory may be reused.

    Args:
        tensor: contiguous, of any shape and dtype that the backend carries; the receiver's has as many elements and the
            same dtype.
        dst: global rank; or `group_dst`, the rank within `group`.
        group: default: all ranks.
        tag: messages between two ranks with different tags may be received in any order.

    Raises:
        CommArgumentError: no tensor, not contiguous, this rank itself, or a rank that is not in the group.
    """
    call, to, dst = _describe("send", tensor, dst, group, tag, labels, group_dst)
    run(call, lambda: start_p2p(tensor, dst, to, tag, sending=True).wait())


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> int:
    """Receive into `tensor` from global rank `src` and return the sender's global rank.

    Args:
        tensor: contiguous; is filled whole.
        src: global rank, or `group_src`, the rank within `group`; neither: any rank, on backends that can.
        group: default: all ranks.
        tag: as the sender has it.

    Raises:
        CommArgumentError: no tensor, not contiguous, this rank itself, or a rank that is not in the group.
        MismatchError: what was sent has another size or dtype (backend "dsx").
    """
    if src is None and group_src is None:
        to = member(group)
        contiguous(tensor_of(tensor, "recv"), "recv", "tensor")
        call = Call("recv", to.group, to.size, nbytes(tensor), 0, tensor.device, check_labels(labels))
        return run(call, lambda: dist.recv(tensor, None, to.group, tag))  # torch waits in it
    call, to, src = _describe("recv", tensor, src, group, tag, labels, group_src)
    run(call, lambda: start_p2p(tensor, src, to, tag, sending=False).wait())
    return src


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """Begin to send `tensor` to global rank `dst` and return a handle. Leave the tensor alone until its `wait()` has
    returned. Arguments and errors as in `send`.
    """
    call, to, dst = _describe("isend", tensor, dst, group, tag, labels, group_dst)
    return run(call, lambda: start_p2p(tensor, dst, to, tag, sending=True), True)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """Begin to receive into `tensor` from global rank `src` and return a handle. The values are there when its `wait()`
    has returned. Arguments and errors as in `recv`.
    """
    call, to, src = _describe("irecv", tensor, src, group, tag, labels, group_src)
    return run(call, lambda: start_p2p(tensor, src, to, tag, sending=False), True)


def _describe(
    name: str, tensor: Any, peer: int | None, group: Any, tag: int, labels: Any, group_peer: int | None = None
) -> tuple[Call, Membership, int]:
    """The call, its group, and the peer's global rank."""
    to = member(group)
    sending = "send" in name
    contiguous(tensor_of(tensor, name), name, "tensor")
    peer, place = root(peer, group_peer, to, name, "dst" if sending else "src")
    if place == to.rank:
        raise CommArgumentError(f"{name}: rank {peer} would talk to itself; copy the tensor instead")
    if not 0 <= tag < composed.SCATTER_TAG:
        raise CommArgumentError(
            f"{name}: tag: got {tag}, expected 0 <= tag < {composed.SCATTER_TAG} (the rest is ours)"
        )
    size = nbytes(tensor)
    call = Call(name, to.group, to.size, size, size if sending else 0, tensor.device, check_labels(labels))
    return call, to, peer


def start_p2p(tensor: torch.Tensor, peer: int, to: Membership, tag: int, *, sending: bool) -> Any:
    """Begin a send or receive with global rank `peer` and return its handle."""
    composes = to.composes(tensor)
    data = composed.as_bytes(tensor) if composes else tensor  # as bytes: gloo knows only some dtypes
    start = dist.isend if sending else dist.irecv
    return Handle([start(data, peer, to.group, tag)], pollable=not composes)


class P2POp:
    """One operation for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`, ours or torch's.
        tensor: what is sent, or filled.
        peer: the other side's global rank; or `group_peer`, its rank within `group`.
        group: default: all ranks. One batch has one group.
        tag: as in `send`.

    Raises:
        CommArgumentError: another operation, or a rank that is not in the group.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise CommArgumentError(f"P2POp: op: got {op!r}, expected dsx_comm.isend or dsx_comm.irecv")
        self.op = isend if op in (isend, dist.isend) else irecv
        self.tensor, self.group, self.tag = tensor, group, tag
        self.peer, _ = root(peer, group_peer, member(group), "P2POp", "peer")


def batch_isend_irecv(p2p_op_list: Sequence[P2POp], **labels: Unpack[Labels]) -> list[Any]:
    """Begin all operations as one batch (nccl fuses it) and return a list of handles to wait for, all of them.

    Raises:
        CommArgumentError: the list is empty, or its operations are of several groups.
    """
    if not p2p_op_list:
        raise CommArgumentError("batch_isend_irecv: got an empty list, expected at least one P2POp")
    described = [_describe(p.op.__name__, p.tensor, p.peer, p.group, p.tag, labels) for p in p2p_op_list]
    to = described[0][1]
    if any(other.group != to.group for _, other, _ in described):
        raise CommArgumentError("batch_isend_irecv: all operations of a batch must be of one group")
    message = sum(c.message for c, *_ in described)
    sent = sum(c.sent for c, *_ in described)
    device = p2p_op_list[0].tensor.device
    call = Call("batch_isend_irecv", to.group, to.size, message, sent, device, check_labels(labels))

    def issue() -> list[Any]:
        if to.composes(p2p_op_list[0].tensor):
            return [start_p2p(p.tensor, p.peer, to, p.tag, sending=p.op is isend) for p in p2p_op_list]
        native = [
            dist.P2POp(dist.isend if p.op is isend else dist.irecv, p.tensor, p.peer, to.group, p.tag)
            for p in p2p_op_list
        ]
        return [Handle([work]) for work in dist.batch_isend_irecv(native)]

    return run(call, issue, True)
