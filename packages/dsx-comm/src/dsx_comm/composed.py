"""Collectives on host tensors composed of gloo sends and receives.

gloo's own reduce-scatter and all-gather of large tensors are two to three times slower than a plain exchange of the
same bytes. Here every rank sends each peer what it needs, directly: N-1 messages, the volume of the ring algorithms.
Sums are taken in rank order, so all ranks get identical bits, whatever arrived first; 16-bit floats are added up in
float32 and rounded once. Data travels as bytes, so every dtype of torch can be moved, also those gloo does not know.

Many operations may be outstanding: gloo matches messages of one pair of ranks and one tag in the order of issue, and
each kind of operation has a tag of its own, far from what users take. Small messages take one call of gloo instead of
many (an all-to-all of the parts, gloo's all-gather): its latency is lower, the result bitwise identical.

Not here: algorithms for many ranks (beyond `DIRECT_RANKS` small messages are left to gloo), CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from .groups import Membership
from .ordered import BLOCK, reduce_in_order
from .works import Done, Handle, TwoPhase

SCATTER_TAG, GATHER_TAG, EXCHANGE_TAG = 0x40000001, 0x40000002, 0x40000003
DIRECT_RANKS = 16  # up to here direct exchange for any size
DIRECT_BYTES = 16 * 1024  # beyond: only for messages of at least this size per pair
CONNECTED_RANKS = 64  # up to here a gather may connect all pairs of ranks
SMALL_BYTES = 64 * 1024  # per pair: up to here one call of gloo that moves the same bytes is quicker


def direct(size: int, nbytes_per_pair: int) -> bool:
    """True if sending to each peer directly is the better algorithm."""
    return size <= DIRECT_RANKS or nbytes_per_pair >= DIRECT_BYTES


def direct_gather(size: int, nbytes_per_pair: int) -> bool:
    """Like `direct`, for gathers, which need no arithmetic: small ones are always gloo's, and so are those of very many
    ranks, because the ring needs no connections but those to two neighbours.
    """
    return nbytes_per_pair > SMALL_BYTES and size <= CONNECTED_RANKS and direct(size, nbytes_per_pair)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor's memory as 1-D uint8, sharing it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().reshape(-1).view(torch.uint8)


def staging(op: str, received: float, element: int, size: int) -> tuple[int, int]:
    """Bytes that a composed operation takes beside its tensors: until it is waited for, and for a moment when it is.

    For who counts memory without carrying out the operation; the rules are those of the functions below.

    Args:
        op: "reduce_scatter" or "all_reduce"; others take nothing.
        received: bytes that come to this rank.
        element: bytes of an element; an all-reduce is composed where they are at most 2.
        size: number of ranks.
    """
    if size == 1 or op not in ("reduce_scatter", "all_reduce") or (op == "all_reduce" and element > 2):
        return 0, 0
    arriving = int(received) if op == "reduce_scatter" else int(received) // 2
    part = arriving // (size - 1)
    if not direct(size, part):
        return 0, 0
    # in float32: the sum, and what torch makes of the part that it adds
    wide = 2 * 4 * min(BLOCK, part // element) if element <= 2 else 0
    if op == "reduce_scatter" and part <= SMALL_BYTES:
        arriving += part
    return arriving, wide


def exchange(
    sends: Sequence[torch.Tensor | None],
    receives: Sequence[torch.Tensor | None],
    to: Membership,
    tag: int,
    finish: Callable[[], Any] | None = None,
) -> Handle:
    """Send `sends[p]` to group rank p and receive `receives[p]` from it; None and empty tensors are skipped.

    Own entries are ignored. Tensors must be contiguous; a skipped send must be a skipped receive on the other side.
    """
    transfers: list[Any] = []
    kept: list[torch.Tensor] = []
    # begin with the neighbour, so that not all ranks send to rank 0 first
    for step in range(1, to.size):
        target, source = (to.rank + step) % to.size, (to.rank - step) % to.size
        incoming, outgoing = receives[source], sends[target]
        if incoming is not None and incoming.numel():
            kept.append(as_bytes(incoming))
            transfers.append(dist.irecv(kept[-1], group=to.group, tag=tag, group_src=source))
        if outgoing is not None and outgoing.numel():
            kept.append(as_bytes(outgoing))
            transfers.append(dist.isend(kept[-1], group=to.group, tag=tag, group_dst=target))
    if not transfers and finish is None:
        return Done()
    return _Transfers(transfers, finish, kept)


class _Transfers(Handle):
    """Sends and receives with the buffers they need."""

    def __init__(self, transfers: list[Any], finish: Callable[[], Any] | None, kept: list[torch.Tensor]) -> None:
        super().__init__(transfers, finish, pollable=False)
        self._kept = kept


def all_gather(output: torch.Tensor, source: torch.Tensor, to: Membership) -> Handle:
    """output (N s elements, 1-D, contiguous) from source (s elements); source may be this rank's part of output."""
    parts = list(output.view(to.size, -1).unbind(0))
    own = parts[to.rank]
    if source.data_ptr() != own.data_ptr():
        own.copy_(source)
    return exchange([own] * to.size, parts, to, GATHER_TAG)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, op: Any, to: Membership) -> Handle:
    """output (s elements) = op over ranks of their source (N s elements), part `rank`.

    `output` may be a part of `source`.
    """
    if output.numel() * output.element_size() <= SMALL_BYTES:
        return small_reduce_scatter(output, source, op, to.group, to.size)
    parts = list(source.view(to.size, -1).unbind(0))
    return reduce_scatter_parts(output, parts, op, to)


def small_reduce_scatter(output: torch.Tensor, source: torch.Tensor, op: Any, group: Any, size: int) -> Handle:
    """`reduce_scatter` in one call of gloo, for parts of at most `SMALL_BYTES`."""
    sent = source.view(-1).view(torch.uint8)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    parts = received.view(source.dtype).view(size, -1).unbind(0)
    return Handle([work], partial(reduce_in_order, parts, op, output.view(-1)))


def reduce_scatter_parts(output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any, to: Membership) -> Handle:
    """Like `reduce_scatter`; part p (contiguous, on all ranks as long as rank p's output) is a tensor of its own."""
    own = parts[to.rank].reshape(-1)
    staging = [own if p == to.rank else torch.empty_like(own) for p in range(to.size)]
    flat = output.view(-1)
    return exchange(parts, staging, to, SCATTER_TAG, lambda: reduce_in_order(staging, op, flat))


def all_reduce(tensor: torch.Tensor, op: Any, to: Membership) -> Handle:
    """tensor (contiguous) = op over ranks, in place: a reduce-scatter, then an all-gather of the parts.

    The parts differ by at most one element in length, so nothing is padded.
    """
    flat = tensor.view(-1)
    bounds = [flat.numel() * p // to.size for p in range(to.size + 1)]
    parts = [flat[a:b] for a, b in pairwise(bounds)]
    own = parts[to.rank]
    scatter = reduce_scatter_parts(own, parts, op, to)
    return TwoPhase(scatter, lambda: exchange([own] * to.size, parts, to, GATHER_TAG))
