"""Ulysses: before attention every rank gives away tokens and gets heads, and the reverse behind it.

One all-to-all carries queries, keys and values, and one carries the results back. So attention itself runs over the
whole sequence, with any kernel, on this rank's heads. Heads are dealt out as evenly as possible; with fewer key heads
than ranks, a key head goes to every rank that has one of its queries. A rank without heads takes part in the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dsx_comm
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..errors import ActivationArgumentError
from .cutting import Segments, even_parts
from .facts import Facts

__all__ = ["UlyssesAttention"]

Heads = tuple[Segments, ...]
"""For each tensor of a message: the range of heads of every rank."""


class UlyssesAttention(nn.Module):
    """Attention over sequence shards by exchanging tokens for heads.

    Args:
        local_attention: called as `local_attention(q, k, v, *args, **kwargs)` with this rank's heads of the whole
            sequence, in its natural order: each (batch, heads, length, features), with one head of keys and values for
            each head of queries; returns (batch, heads, length, value features). None:
            `torch.nn.functional.scaled_dot_product_attention`. It is not called on a rank without heads.
        group: ranks that share the sequence; None: all ranks, or this process alone.
        order: how the tokens are cut: "plain" or "zigzag".
    """

    def __init__(
        self, local_attention: Callable[..., torch.Tensor] | None = None, group: Any = None, *, order: str = "plain"
    ) -> None:
        super().__init__()
        self.local_attention = local_attention or F.scaled_dot_product_attention
        self.group, self.order = group, order

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        length: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The attention of this rank's tokens over the whole sequence. Collective, as is its backward.

        Args:
            q: (batch, heads, tokens, features): this rank's tokens, as `shard_sequence` cuts them.
            k: (batch, key heads, tokens, features); the heads of queries are a multiple (GQA, MQA).
            v: (batch, key heads, tokens, value features).
            args, kwargs: for `local_attention` (`is_causal=True`, a mask over the whole sequence, ...).
            length: tokens of the whole sequence; None: as many on every rank, which every call compares by a small
                message. Give it in a training loop: on a device the host waits for that message.

        Returns:
            (batch, heads, tokens, value features).

        Raises:
            ActivationArgumentError: shapes, dtypes or tokens do not fit, or the ranks differ in them, or the local
                attention gave another shape.
        """
        facts = Facts.of("UlyssesAttention", q, k, v, self.group, self.order, length)
        queries, keys = _dealt(q.shape[1], k.shape[1], facts.size)
        whole_q, whole_k, whole_v = _ToHeads.apply(facts, (queries, keys, keys), q, k, v)  # type: ignore[misc]
        index = _key_of_each_query(queries[facts.rank], keys[facts.rank], q.shape[1] // k.shape[1], q.device)
        if index is not None:
            whole_k, whole_v = whole_k[:, index], whole_v[:, index]
        if whole_q.shape[1]:
            out = self.local_attention(whole_q, whole_k, whole_v, *args, **kwargs)
            expected = (*whole_q.shape[:3], v.shape[3])
            if tuple(out.shape) != expected:
                raise ActivationArgumentError(
                    f"UlyssesAttention: the local attention gave shape {tuple(out.shape)}, expected {expected}"
                )
        else:
            out = whole_v  # no heads: empty, and joined to the messages of backward
        (out,) = _ToTokens.apply(facts, (queries,), (q.shape[1],), out)  # type: ignore[misc]
        return out

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _dealt(query_heads: int, key_heads: int, size: int) -> tuple[Segments, Segments]:
    """The heads of queries and of keys of every rank. Key heads stay whole where there are enough of them."""
    each = query_heads // key_heads
    if key_heads >= size:
        keys = even_parts(key_heads, size)
        return tuple((first * each, behind * each) for first, behind in keys), keys
    queries = even_parts(query_heads, size)
    return queries, tuple(
        (first // each, -(-behind // each) if behind > first else first // each) for first, behind in queries
    )


def _key_of_each_query(
    queries: tuple[int, int], keys: tuple[int, int], each: int, device: torch.device
) -> torch.Tensor | None:
    """For each of this rank's heads of queries its head of keys, counted from the rank's first one; None: they are
    one to one.
    """
    if each == 1:
        return None
    return torch.arange(*queries, device=device) // each - keys[0]


class _ToHeads(torch.autograd.Function):
    """Tensors of this rank's tokens and all heads become tensors of all tokens and this rank's heads."""

    @staticmethod
    def forward(ctx: Any, facts: Facts, heads: Heads, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.given = facts, heads, tuple(t.shape[1] for t in tensors)
        return _to_heads(facts, heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        facts, heads, numbers = ctx.given
        return None, None, *_to_tokens(facts, heads, numbers, grads)


class _ToTokens(torch.autograd.Function):
    """The reverse. A head that several ranks have is the sum of theirs."""

    @staticmethod
    def forward(
        ctx: Any, facts: Facts, heads: Heads, numbers: tuple[int, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.given = facts, heads
        return _to_tokens(facts, heads, numbers, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        facts, heads = ctx.given
        return None, None, None, *_to_heads(facts, heads, grads)


def _to_heads(facts: Facts, heads: Heads, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    sent = [
        [t[:, slice(*ranges[rank])] for t, ranges in zip(tensors, heads, strict=True)] for rank in range(facts.size)
    ]
    own = [slice(*ranges[facts.rank]) for ranges in heads]
    shapes = [
        [(t.shape[0], h.stop - h.start, facts.tokens_of(rank), t.shape[3]) for t, h in zip(tensors, own)]
        for rank in range(facts.size)
    ]
    wholes = tuple(t.new_empty(t.shape[0], h.stop - h.start, facts.length, t.shape[3]) for t, h in zip(tensors, own))
    for rank, parts in enumerate(_exchanged(facts, sent, shapes)):
        for whole, part in zip(wholes, parts):
            for (first, behind), piece in zip(facts.segments[rank], part.split(_sizes(facts, rank), 2)):
                whole[:, :, first:behind] = piece
    return wholes


def _to_tokens(
    facts: Facts, heads: Heads, numbers: tuple[int, ...], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    sent = [
        [torch.cat([t[:, :, first:behind] for first, behind in facts.segments[rank]], 2) for t in tensors]
        for rank in range(facts.size)
    ]
    tokens = facts.tokens_of(facts.rank)
    shapes = [
        [(t.shape[0], ranges[rank][1] - ranges[rank][0], tokens, t.shape[3]) for t, ranges in zip(tensors, heads)]
        for rank in range(facts.size)
    ]
    found = tuple(
        t.new_zeros(t.shape[0], number, tokens, t.shape[3]) for t, number in zip(tensors, numbers, strict=True)
    )
    for rank, parts in enumerate(_exchanged(facts, sent, shapes)):
        for whole, part, ranges in zip(found, parts, heads):
            whole[:, slice(*ranges[rank])] += part
    return found


def _sizes(facts: Facts, rank: int) -> list[int]:
    return [behind - first for first, behind in facts.segments[rank]]


def _exchanged(
    facts: Facts, sent: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Send each rank its tensors as one message. Returns what has come from each, in the given shapes."""
    messages = [torch.cat([t.reshape(-1) for t in tensors]) for tensors in sent]
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    coming = [sum(of_rank) for of_rank in sizes]
    if facts.size == 1:
        arrived = messages[0]
    else:
        arrived = messages[0].new_empty(sum(coming))
        going = [message.numel() for message in messages]
        dsx_comm.all_to_all_single(arrived, torch.cat(messages), coming, going, group=facts.group)
    return [
        [part.view(shape) for part, shape in zip(block.split(of_rank), shapes_of_rank)]
        for block, of_rank, shapes_of_rank in zip(arrived.split(coming), sizes, shapes)
    ]
