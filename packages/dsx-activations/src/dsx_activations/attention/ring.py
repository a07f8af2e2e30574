"""Ring attention: keys and values go around the ranks, and each rank adds the attention of its queries over the block
that has just come. The next block travels meanwhile.

Backward goes around once more; the gradients of a block travel with it and end at home. `fused` and `pieces` have the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dsx_comm
import torch
from torch.autograd.function import once_differentiable

from .facts import Facts
from .fused import backward_of, forward_of
from .pieces import Work, wide
from .visible import Visible

__all__ = ["attend_around", "ring_attention"]

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
    `sequence_attention` also has masks and dropout.

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
    factor: float = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend_around(q, k, v, facts, Work(Visible(bool(causal)), factor))


def attend_around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: Facts, work: Work) -> torch.Tensor:
    """The attention of this rank's queries, which are at `facts.segments`, over the keys of all `facts.peers`."""
    return _Ring.apply(q, k, v, facts, work)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: Facts, work: Work) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            sums = forward_of(q, k.shape[1], v.shape[3], facts.segments[facts.rank], work)
            for source, keys, values in _Blocks(facts, k, v).around():
                sums.add(keys, values, facts.segments[source])
            out, logs = sums.result()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.given = facts, work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, logs = ctx.saved_tensors
        facts, work = ctx.given
        with torch.autocast(q.device.type, enabled=False):
            sums = backward_of(q, k.shape[1], v.shape[3], (out, logs), grad, facts.segments[facts.rank], work)
            homeward = _Homeward(facts, k, v, wide(q.dtype))
            for source, keys, values in _Blocks(facts, k, v).around():
                homeward.add(source, *sums.add(keys, values, facts.segments[source]))
            grads = sums.grad_q(), *homeward.arrived()
        return *(g.to(q.dtype) for g in grads), None, None


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
    behind, before = (facts.peers[(facts.rank + step) % facts.size] for step in (1, -1))
    return dsx_comm.batch_isend_irecv([
        dsx_comm.P2POp(dsx_comm.isend, block, group=facts.group, group_peer=behind, tag=tag),
        dsx_comm.P2POp(dsx_comm.irecv, coming, group=facts.group, group_peer=before, tag=tag),
    ])  # fmt: skip
