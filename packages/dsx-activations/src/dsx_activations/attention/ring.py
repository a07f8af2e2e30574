"""Ring attention: keys and values go around the ranks, and each rank adds the attention of its queries over the block
that has just come. The next block travels meanwhile.

Softmax is put together exactly: for each query the sum of exponentials is kept as a logarithm, and results of blocks
are weighted with it. Backward goes around once more; the gradients of a block travel with it and end at home.

Blocks are computed by matrix products, in fp32 for 16-bit inputs, for at most `ROWS` queries at a time. Under a causal
mask, keys behind the last of these queries are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dsx_comm
import torch
from torch.autograd.function import once_differentiable

from .facts import Facts

__all__ = ["ring_attention"]

ROWS = 512
"""Queries whose scores are held at a time."""

_KEYS, _GRADIENTS = 11, 12
"""Tags of messages."""


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    order: str = "plain",
    length: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys and values of all ranks. Collective, as is its backward.

    Args:
        q: (batch, heads, tokens, features): this rank's tokens, as `shard_sequence` cuts them.
        k: (batch, key heads, tokens, features); the heads of queries are a multiple (GQA, MQA).
        v: (batch, key heads, tokens, value features).
        group: ranks that share the sequence; None: all ranks, or this process alone.
        causal: a token sees itself and the tokens before it.
        scale: factor of the scores; None: 1 / sqrt(features).
        order: "plain" or "zigzag"; "zigzag" balances the work of a causal mask.
        length: tokens of the whole sequence; None: as many on every rank, which every call compares by a small
            message. Give it in a training loop: on a device the host waits for that message.

    Returns:
        (batch, heads, tokens, value features), in q's dtype.

    Raises:
        ActivationArgumentError: shapes, dtypes or tokens do not fit, or the ranks differ in them.
    """
    facts = Facts.of("ring_attention", q, k, v, group, order, length)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _Ring.apply(q, k, v, facts, bool(causal), scale)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: Facts, causal: bool, scale: float
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, logs = _forward(q, k, v, facts, causal, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.given = facts, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, logs = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = _backward(q, k, v, out, logs, grad, *ctx.given)
        return *(g.to(q.dtype) for g in grads), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def _grouped(q: torch.Tensor, key_heads: int) -> torch.Tensor:
    """(batch, key heads, queries of one key head, tokens, features)."""
    return q.unflatten(1, (key_heads, -1))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: Facts, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = _grouped(q, k.shape[1])
    wide = _wide(q.dtype)
    out = grouped.new_zeros((*grouped.shape[:-1], v.shape[-1]), dtype=wide)
    logs = grouped.new_full(grouped.shape[:-1], float("-inf"), dtype=wide)
    blocks = _Blocks(facts, k, v)
    for source, keys, values in blocks.around():
        for rows, columns, hidden in _parts(facts, source, causal, q.device):
            scores = _scores(grouped[:, :, :, rows], keys[:, :, columns], hidden, scale)
            before = logs[:, :, :, rows]
            now = torch.logaddexp(before, scores.logsumexp(-1).view_as(before))
            safe = now.masked_fill(now == float("-inf"), 0.0)  # a query that has seen no key yet
            weights = (scores - safe.flatten(2, 3)[..., None]).exp()
            added = (weights @ values[:, :, columns].to(wide)).view(*before.shape, -1)
            out[:, :, :, rows] = out[:, :, :, rows] * (before - safe).exp()[..., None] + added
            logs[:, :, :, rows] = now
    return out.flatten(1, 2), logs


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    grad: torch.Tensor,
    facts: Facts,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, heads = _wide(q.dtype), k.shape[1]
    grouped, given = _grouped(q, heads), _grouped(grad.to(wide), heads)
    delta = (given * _grouped(out.to(wide), heads)).sum(-1)
    grad_q = torch.zeros_like(grouped, dtype=wide, memory_format=torch.contiguous_format)
    blocks, homeward = _Blocks(facts, k, v), _Homeward(facts, k, v, wide)
    for source, keys, values in blocks.around():
        grad_k, grad_v = (torch.zeros_like(t, dtype=wide) for t in (keys, values))
        for rows, columns, hidden in _parts(facts, source, causal, q.device):
            some, its_grad = grouped[:, :, :, rows], given[:, :, :, rows].flatten(2, 3)
            weights = (_scores(some, keys[:, :, columns], hidden, scale) - _flat(logs, rows)).exp()
            grad_v[:, :, columns] += weights.mT @ its_grad
            grad_scores = weights * (its_grad @ values[:, :, columns].to(wide).mT - _flat(delta, rows)) * scale
            grad_q[:, :, :, rows] += (grad_scores @ keys[:, :, columns].to(wide)).view_as(some)
            grad_k[:, :, columns] += grad_scores.mT @ some.flatten(2, 3).to(wide)
        homeward.add(source, grad_k, grad_v)
    return grad_q.flatten(1, 2), *homeward.arrived()


def _flat(of_queries: torch.Tensor, rows: slice) -> torch.Tensor:
    """(batch, key heads, rows of all queries of a key head, 1)."""
    return of_queries[:, :, :, rows].flatten(2, 3)[..., None]


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    """(batch, key heads, rows of all queries of a key head, keys)."""
    wide = _wide(q.dtype)
    scores = q.flatten(2, 3).to(wide) @ k.to(wide).mT * scale
    return scores if hidden is None else scores.masked_fill(hidden.repeat(q.shape[2], 1), float("-inf"))


def _parts(
    facts: Facts, source: int, causal: bool, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """The pieces of work of this rank's queries with the keys of `source`: rows, columns, and what is hidden."""
    begin = 0
    for first, behind in facts.segments[facts.rank]:
        for start in range(first, behind, ROWS):
            end, column = min(start + ROWS, behind), 0
            rows = slice(begin + start - first, begin + end - first)
            for key, last in facts.segments[source]:
                seen = min(last, end) if causal else last
                if seen > key:
                    hidden = None
                    if causal and seen > start + 1:
                        hidden = (
                            torch.arange(key, seen, device=device) > torch.arange(start, end, device=device)[:, None]
                        )
                    yield rows, slice(column, column + seen - key), hidden
                column += last - key
        begin += behind - first


class _Blocks:
    """Keys and values on their way: each goes from a rank to the next one."""

    def __init__(self, facts: Facts, k: torch.Tensor, v: torch.Tensor) -> None:
        self._facts = facts
        self._block = torch.cat([k.reshape(-1), v.reshape(-1)])
        self._batch, self._heads = k.shape[:2]
        self._features = k.shape[3], v.shape[3]

    def around(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Every rank's keys and values, this rank's own first. The next block travels while the caller works."""
        facts, block = self._facts, self._block
        for step in range(facts.size):
            source = (facts.rank - step) % facts.size
            coming, handles = None, []
            if step + 1 < facts.size:
                coming = block.new_empty(self._numel((source - 1) % facts.size))
                handles = _hop(facts, block, coming, _KEYS)
            yield source, *self._unpacked(block, source)
            for handle in handles:
                handle.wait()
            if coming is not None:
                block = coming

    def _numel(self, source: int) -> int:
        return self._batch * self._heads * self._facts.tokens_of(source) * sum(self._features)

    def _unpacked(self, block: torch.Tensor, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self._batch, self._heads, self._facts.tokens_of(source))
        of_keys, of_values = ((*shape, features) for features in self._features)
        keys, values = block.split([torch.Size(of_keys).numel(), torch.Size(of_values).numel()])
        return keys.view(of_keys), values.view(of_values)


class _Homeward:
    """Gradients of keys and values, which follow their blocks and end on the rank that the block came from."""

    def __init__(self, facts: Facts, k: torch.Tensor, v: torch.Tensor, wide: torch.dtype) -> None:
        self._facts, self._shapes, self._wide = facts, (k.shape, v.shape), wide
        self._coming: torch.Tensor | None = None
        self._handles: list[Any] = []
        self._leaving: torch.Tensor | None = None

    def add(self, source: int, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Add this rank's gradients of a block to what has come with it, and send the sum on."""
        block = torch.cat([grad_k.reshape(-1), grad_v.reshape(-1)])
        arrived = self._received()
        if arrived is not None:
            block += arrived
        facts = self._facts
        if facts.size == 1:
            self._coming = block
            return
        before = (source - 1) % facts.size  # whose block the rank before this one has now
        self._coming = block.new_empty(block.numel() // facts.tokens_of(source) * facts.tokens_of(before))
        self._leaving = block
        self._handles = _hop(facts, block, self._coming, _GRADIENTS)

    def _received(self) -> torch.Tensor | None:
        for handle in self._handles:
            handle.wait()
        self._handles, self._leaving = [], None
        return self._coming

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of this rank's own keys and values."""
        block = self._received()
        if block is None:
            raise RuntimeError("gradients were taken before a block was worked on")
        of_keys, of_values = self._shapes
        grad_k, grad_v = block.split([of_keys.numel(), of_values.numel()])
        return grad_k.view(of_keys), grad_v.view(of_values)


def _hop(facts: Facts, block: torch.Tensor, coming: torch.Tensor, tag: int) -> list[Any]:
    """Send a block to the next rank, and receive one from the rank before. Returns the handles."""
    behind, before = (facts.rank + 1) % facts.size, (facts.rank - 1) % facts.size
    return dsx_comm.batch_isend_irecv([
        dsx_comm.P2POp(dsx_comm.isend, block, group=facts.group, group_peer=behind, tag=tag),
        dsx_comm.P2POp(dsx_comm.irecv, coming, group=facts.group, group_peer=before, tag=tag),
    ])  # fmt: skip
