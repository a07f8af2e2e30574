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
from dsx_comm.lanes import Pending, is_done

from ..params.flat import FlatGroup

__all__ = ["ReduceTransport", "Stateless", "Then", "Transport", "Wrapper", "carrier_of"]


class Transport(Protocol):
    """Sends flat buffers between ranks."""

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """Start a collective over the ranks that share `group`. Every rank calls it in the same order.

        Args:
            out: 1-D, filled when the result has been waited for. A gather fills all `group.layout.numel` elements, a
                reduce-scatter this rank's `group.layout.shard_numel`. For an all-reduce it is `source` itself.
            source: this rank's values: its shard for a gather, all its gradients for a reduction. They must not change
                until the result has been waited for.
            group: the flat group of the values.
            label: name of the communication in the explanation of a hang.

        Returns:
            What to wait for; None if the result is complete.
        """
        ...

    def tensors(self) -> list[torch.Tensor]:
        """The tensors it keeps between two messages, such as secondary shards and errors."""
        ...


class ReduceTransport(Transport, Protocol):
    """Sends gradients."""

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """The dtype in which the result of gradients of dtype `source` arrives: an `out` of it loses nothing."""
        ...


@runtime_checkable
class Wrapper(Protocol):
    """A transport around another one. It may send some buffers exactly as that one does."""

    def passes(self, numel: int, dtype: torch.dtype, group: FlatGroup) -> Transport | None:
        """The transport inside, if it alone handles sources of `numel` elements of `dtype`; else None."""
        ...


def carrier_of(transport: Transport, numel: int, dtype: torch.dtype, group: FlatGroup) -> Transport:
    """The innermost transport that does everything that `transport` does for such sources. Call it once per buffer."""
    while isinstance(transport, Wrapper):
        inner = transport.passes(numel, dtype, group)
        if inner is None:
            break
        transport = inner
    return transport


class Stateless:
    """Base of transports that keep no tensors."""

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return []


class Then:
    """Pending messages, and a function that is called once after all of them have arrived.

    Args:
        pending: the messages; None for one that has arrived.
        finish: the function; None: there is nothing to do.
        keeps: objects whose memory the messages need.
    """

    __slots__ = ("_finish", "_keeps", "_pending")

    def __init__(
        self, pending: Sequence[Pending | None], finish: Callable[[], object] | None = None, *, keeps: object = None
    ) -> None:
        self._pending: tuple[Pending, ...] = tuple(found for found in pending if found is not None)
        self._finish, self._keeps = finish, keeps

    def wait(self) -> None:
        """Wait for the messages, then call the function."""
        pending, self._pending = self._pending, ()
        for found in pending:
            found.wait()
        self._keeps = None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Whether all messages have arrived, so that `wait` does not wait."""
        return all(is_done(found) for found in self._pending)
