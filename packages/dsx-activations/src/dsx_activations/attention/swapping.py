"""Tokens for heads and back: the all-to-alls of Ulysses, as two steps each, so that they travel beside computation.

    there = swap.to_heads(q, k, v)        # sends; every tensor has this rank's tokens and all heads
    q, k, v = there()                     # waits: all tokens, this rank's heads
    (out,) = swap.to_tokens(out)()        # the reverse; a head that several ranks have is the sum of theirs

In backward the second step sends the gradients and the first one waits for them. Autograd runs what was made last
first, so messages that overlap in forward overlap in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dsx_comm
import torch
from torch.autograd.function import once_differentiable

from .cutting import Segments
from .facts import Facts

__all__ = ["Swap"]

Tensors = tuple[torch.Tensor, ...]
_HEADS, _TOKENS = "heads", "tokens"


class Swap:
    """Exchanges tensors among the peers of a call.

    Args:
        facts: the peers and their tokens.
        heads: for each tensor of a message the range of heads of every peer.
        numbers: for each tensor the number of all heads.
    """

    def __init__(self, facts: Facts, heads: Sequence[Segments], numbers: Sequence[int]) -> None:
        self.facts, self.heads, self.numbers = facts, tuple(heads), tuple(numbers)

    def to_heads(self, *tensors: torch.Tensor) -> Callable[[], Tensors]:
        """Send (batch, heads, own tokens, features) of each; the result gives (batch, own heads, all tokens, ...)."""
        return self._begun(_HEADS, tensors)

    def to_tokens(self, *tensors: torch.Tensor) -> Callable[[], Tensors]:
        """The reverse."""
        return self._begun(_TOKENS, tensors)

    def exchange(self, toward: str, tensors: Tensors) -> Tensors:
        """Send and wait at once, outside of autograd: toward "heads" or "tokens", each the adjoint of the other."""
        return self.joined(toward, self.send(toward, tensors))

    def _begun(self, toward: str, tensors: Tensors) -> Callable[[], Tensors]:
        flight = _Flight(self, toward)
        token = _Start.apply(flight, *tensors)
        return lambda: _Finish.apply(flight, token)  # type: ignore[return-value]

    def send(self, toward: str, tensors: Tensors) -> _Message:
        """Send each peer its part of tensors."""
        facts = self.facts
        ranks, own = range(facts.size), facts.tokens_of(facts.rank)
        if toward == _HEADS:
            sent = [[t[:, slice(*h[rank])] for t, h in zip(tensors, self.heads)] for rank in ranks]
            shapes = [
                [
                    (t.shape[0], h[facts.rank][1] - h[facts.rank][0], facts.tokens_of(rank), t.shape[3])
                    for t, h in zip(tensors, self.heads)
                ]
                for rank in ranks
            ]
        else:
            sent = [
                [torch.cat([t[:, :, slice(*one)] for one in facts.segments[rank]], 2) for t in tensors]
                for rank in ranks
            ]
            shapes = [
                [(t.shape[0], h[rank][1] - h[rank][0], own, t.shape[3]) for t, h in zip(tensors, self.heads)]
                for rank in ranks
            ]
        return _Message(facts, sent, shapes)

    def joined(self, toward: str, message: _Message) -> Tensors:
        """Wait for a message, and join the parts of all peers."""
        facts, parts = self.facts, message.parts()
        batch, (first, *_) = parts[0][0].shape[0], parts
        features = [part.shape[3] for part in first]
        if toward == _HEADS:
            wholes = tuple(
                part.new_empty(batch, part.shape[1], facts.length, size) for part, size in zip(first, features)
            )
            for rank, of_rank in enumerate(parts):
                sizes = [behind - first for first, behind in facts.segments[rank]]
                for whole, part in zip(wholes, of_rank):
                    for one, piece in zip(facts.segments[rank], part.split(sizes, 2)):
                        whole[:, :, slice(*one)] = piece
            return wholes
        wholes = tuple(
            part.new_zeros(batch, number, part.shape[2], size)
            for part, number, size in zip(first, self.numbers, features)
        )
        for rank, of_rank in enumerate(parts):
            for whole, part, ranges in zip(wholes, of_rank, self.heads):
                whole[:, slice(*ranges[rank])] += part
        return wholes


class _Message:
    """A message in flight between the peers: one all-to-all, in which other ranks of the group have no part."""

    def __init__(
        self, facts: Facts, sent: list[list[torch.Tensor]], shapes: list[list[tuple[int, int, int, int]]]
    ) -> None:
        messages = [torch.cat([t.reshape(-1) for t in tensors]) for tensors in sent]
        self._shapes = shapes
        self._sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
        self._leaving, self._handle = torch.cat(messages), None
        self._arrived = self._leaving
        if facts.size > 1:
            coming, going = [0] * facts.group_size, [0] * facts.group_size
            for peer, message, sizes in zip(facts.peers, messages, self._sizes):
                coming[peer], going[peer] = sum(sizes), message.numel()
            self._arrived = self._leaving.new_empty(sum(coming))
            self._handle = dsx_comm.all_to_all_single(
                self._arrived, self._leaving, coming, going, group=facts.group, async_op=True
            )

    def parts(self) -> list[list[torch.Tensor]]:
        """The part that has come from each peer."""
        self._wait()
        return [
            [part.view(shape) for part, shape in zip(block.split(sizes), shapes)]
            for block, sizes, shapes in zip(
                self._arrived.split([sum(sizes) for sizes in self._sizes]), self._sizes, self._shapes
            )
        ]

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def __del__(self) -> None:
        self._wait()  # a recomputation may stop before the result is taken; the memory is about to be freed


class _Flight:
    """One exchange and its reverse in backward."""

    def __init__(self, swap: Swap, toward: str) -> None:
        self._swap, self.toward = swap, toward
        self.back = _TOKENS if toward == _HEADS else _HEADS
        self._messages: dict[str, _Message] = {}

    def send(self, toward: str, tensors: Tensors) -> None:
        """Begin."""
        self._messages[toward] = self._swap.send(toward, tensors)

    def take(self, toward: str) -> Tensors:
        """Wait."""
        return self._swap.joined(toward, self._messages.pop(toward))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        flight.send(flight.toward, tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.flight.take(ctx.flight.back)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, token: torch.Tensor) -> Tensors:
        ctx.flight = flight
        return flight.take(flight.toward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.flight.send(ctx.flight.back, grads)
        return None, grads[0].new_empty(0)
