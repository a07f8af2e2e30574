"""Ulysses: before attention every rank gives away tokens and gets heads, and the reverse behind it.

One all-to-all carries queries, keys and values, and one carries the results back. So attention itself runs over the
whole sequence, with any kernel, on this rank's heads. Heads are dealt out as evenly as possible; with fewer key heads
than ranks, a key head goes to every rank that has one of its queries. A rank without heads takes part in the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import ActivationArgumentError
from .cutting import Segments, even_parts
from .facts import Facts
from .swapping import Swap

__all__ = ["UlyssesAttention", "attend_by_heads", "dealt"]


class UlyssesAttention(nn.Module):
    """Attention over sequence shards by exchanging tokens for heads.

    Args:
        local_attention: called as `local_attention(q, k, v, *args, **kwargs)` with this rank's heads of the whole
            sequence, in its natural order: each (batch, heads, length, features), with one head of keys and values for
            each head of queries; returns (batch, heads, length, value features). None:
            `torch.nn.functional.scaled_dot_product_attention`. It is not called on a rank without heads.
        group: ranks that share the sequence; None: all ranks, or this process alone.
        order: how the tokens are cut: "plain" or "zigzag".
        overlap: heads travel in as many messages, each while the attention of the one before is computed. A rank with
            fewer heads sends fewer.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor] | None = None,
        group: Any = None,
        *,
        order: str = "plain",
        overlap: int = 1,
    ) -> None:
        super().__init__()
        self.local_attention = local_attention or F.scaled_dot_product_attention
        self.group, self.order, self.overlap = group, order, overlap

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
        each = q.shape[1] // k.shape[1]

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int], keys: int) -> torch.Tensor:
            index = torch.arange(*heads, device=q.device) // each - keys
            repeated = (k, v) if each == 1 else (k[:, index], v[:, index])
            return self.local_attention(q, *repeated, *args, **kwargs)

        return attend_by_heads(q, k, v, facts, local, self.overlap)

    def extra_repr(self) -> str:
        return f"order={self.order!r}" + (f", overlap={self.overlap}" if self.overlap > 1 else "")


def attend_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    facts: Facts,
    local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int], int], torch.Tensor],
    overlap: int = 1,
) -> torch.Tensor:
    """Give away tokens for heads, call `local(q, k, v, heads, key)`, and take the tokens back.

    Args:
        q, k, v: as for `UlyssesAttention`.
        facts: the peers.
        local: is given the range of heads of queries that it gets, and the number of the first head of keys.
        overlap: number of messages.
    """
    runs = _runs(q.shape[1], k.shape[1], facts.size, overlap)
    if facts.size == 1:
        return torch.cat([_checked(local, q[:, slice(*h[0])], k[:, slice(*n[0])], v[:, slice(*n[0])], h[0], n[0][0])
                          for h, n in runs], 1)  # fmt: skip
    numbers, leaving, coming = (q.shape[1], k.shape[1], k.shape[1]), [], []
    for queries, keys in runs:
        leaving.append(Swap(facts, (queries, keys, keys), numbers).to_heads(q, k, v))
    for there, (queries, keys) in zip(leaving, runs):
        whole_q, whole_k, whole_v = there()
        heads = queries[facts.rank]
        if whole_q.shape[1]:
            out = _checked(local, whole_q, whole_k, whole_v, heads, keys[facts.rank][0])
        else:
            out = whole_v  # no heads: empty, and joined to the messages of backward
        close, number = _renumbered(queries)
        coming.append(Swap(facts, (close,), (number,)).to_tokens(out))
    found = [back()[0] for back in coming]
    if len(found) == 1:
        return found[0]
    parts = [
        (first, part)
        for out, (queries, _) in zip(found, runs)
        for (first, _), part in zip(queries, out.split([behind - first for first, behind in queries], 1))
        if part.shape[1]
    ]
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])], 1)


def _renumbered(queries: Segments) -> tuple[Segments, int]:
    """The heads of one message, numbered without gaps, and their number."""
    ends = list(accumulate((behind - first for first, behind in queries), initial=0))
    return tuple(pairwise(ends)), ends[-1]


def _checked(
    local: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: tuple[int, int],
    key: int,
) -> torch.Tensor:
    out, expected = local(q, k, v, heads, key), (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != expected:
        raise ActivationArgumentError(
            f"UlyssesAttention: the local attention gave shape {tuple(out.shape)}, expected {expected}"
        )
    return out


def _runs(query_heads: int, key_heads: int, size: int, number: int) -> list[tuple[Segments, Segments]]:
    """For each message the heads of queries and of keys of every rank."""
    queries, keys = dealt(query_heads, key_heads, size)
    each = query_heads // key_heads
    number = max(1, min([number, *(b - f for f, b in keys if b > f)]))
    if number == 1:
        return [(queries, keys)]
    found = []
    of_ranks = [tuple((f + x, f + y) for x, y in even_parts(b - f, number)) for f, b in keys]
    for step in range(number):
        some = tuple(parts[step] for parts in of_ranks)
        limits = zip(some, queries)
        found.append((
            tuple((max(f * each, low), max(min(b * each, high), max(f * each, low))) for (f, b), (low, high) in limits),
            some,
        ))  # fmt: skip
    return found


def dealt(query_heads: int, key_heads: int, size: int) -> tuple[Segments, Segments]:
    """The heads of queries and of keys of every rank. Key heads stay whole where there are enough of them."""
    each = query_heads // key_heads
    if key_heads >= size:
        keys = even_parts(key_heads, size)
        return tuple((first * each, behind * each) for first, behind in keys), keys
    queries = even_parts(query_heads, size)
    return queries, tuple(
        (first // each, -(-behind // each) if behind > first else first // each) for first, behind in queries
    )
