"""`Transport` sends one flat buffer between the ranks that share it, for gathers and for reductions.

A transport gets the flat group of its buffer, so that it can keep data that belongs to the group: a prepared
collective, scales and errors of quantised values, a second copy inside a node. It runs as a job of a lane: `start`
encodes and issues the collective. The result is decoded when it is waited for, on a CUDA device on the lane's stream.

A new transport is one class in this folder. Left out: where shards come from (`homes`), and when buffers are sent
(`gather`, `grads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from ..lanes import Pending, is_done
from ..params.flat import FlatGroup

__all__ = ["ReduceTransport", "Stateless", "Then", "Transport", "Wrapper", "carrier_of"]


class Transport(Protocol):
    """Carries buffers."""

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """Start a collective over the ranks that share `group`. Every rank calls it in the same order.

        Args:
            out: 1-D, filled once the result has been waited for. A gather fills all `group.layout.numel` elements, a
                reduce-scatter this rank's `group.layout.shard_numel`, an all-reduce `source` itself.
            source: this rank's values: its shard for a gather, all its gradients for a reduction. They must be left
                alone until the result has been waited for.
            group: whose values they are.
            label: what the communication is for, where a hang is explained.

        Returns:
            What to wait for; None when it is done.
        """
        ...

    def tensors(self) -> list[torch.Tensor]:
        """What it keeps between two messages: secondary shards, errors."""
        ...


class ReduceTransport(Transport, Protocol):
    """Carries gradients."""

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """The dtype of `out` that loses nothing of what arrives, for gradients of dtype `source`."""
        ...


@runtime_checkable
class Wrapper(Protocol):
    """A transport around another one, which carries some buffers as that one does."""

    def passes(self, numel: int, dtype: torch.dtype, group: FlatGroup) -> Transport | None:
        """The transport inside, if nothing else is done to a source of `numel` elements of `dtype`; else None."""
        ...


def carrier_of(transport: Transport, numel: int, dtype: torch.dtype, group: FlatGroup) -> Transport:
    """The innermost transport that does all that `transport` does for such sources. Asked once per buffer."""
    while isinstance(transport, Wrapper):
        inner = transport.passes(numel, dtype, group)
        if inner is None:
            break
        transport = inner
    return transport


class Stateless:
    """Base of transports that keep nothing."""

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return []


class Then:
    """Pending messages, and a function that runs once when all of them have arrived. `keeps`: memory they need."""

    __slots__ = ("_finish", "_keeps", "_pending")

    def __init__(
        self, pending: Sequence[Pending | None], finish: Callable[[], object] | None = None, *, keeps: object = None
    ) -> None:
        self._pending: tuple[Pending, ...] = tuple(found for found in pending if found is not None)
        self._finish, self._keeps = finish, keeps

    def wait(self) -> None:
        """Wait, then finish."""
        pending, self._pending = self._pending, ()
        for found in pending:
            found.wait()
        self._keeps = None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Would `wait` return without waiting for a rank?"""
        return all(is_done(found) for found in self._pending)
