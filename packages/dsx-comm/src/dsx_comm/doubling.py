"""An all-gather in which what each rank has doubles in every round (J. Bruck et al., Efficient Algorithms for
All-to-All Communications, 1997): ceil(log2 N) messages of each rank instead of the N - 1 of a ring.

Left out: what sends the messages (`rounds`, `on_demand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

__all__ = ["Start", "Started", "fill_in_rounds", "rounds"]


def rounds(size: int) -> Iterator[tuple[int, int]]:
    """(distance, blocks) of each round among `size` ranks: a rank sends so many blocks to the rank so far before it,
    and hears as many from the rank so far behind it.
    """
    distance = 1
    while distance < size:
        yield distance, min(distance, size - distance)
        distance *= 2


class Started(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Wait until it is sent, or has arrived."""
        ...


Start = Callable[[torch.Tensor, int, bool], Started]
"""Starts to send a tensor to a rank (True), or to receive one from a rank."""


def fill_in_rounds(
    output: torch.Tensor, own: torch.Tensor, rank: int, size: int, start: Start, *, connected: bool = True
) -> None:
    """Fill output [N, s] with the ranks' `own` [s].

    Args:
        connected: these pairs of ranks have sent each other messages before. Elsewhere (`on_demand`) the start of a
            transfer may wait until the other side starts its own, so that each round is started behind the one before.
    """
    have = torch.empty_like(output)  # block i is that of rank + i
    have[0] = own

    def hear(distance: int, blocks: int) -> Started:
        return start(have[distance : distance + blocks], (rank + distance) % size, False)

    # gloo sends only when the receiver has said that it is ready; all receives are from different ranks
    heard = [hear(*each) for each in rounds(size)] if connected else None
    sent = []
    for number, (distance, blocks) in enumerate(rounds(size)):
        received = hear(distance, blocks) if heard is None else heard[number]
        sent.append(start(have[:blocks], (rank - distance) % size, True))
        received.wait()
    for work in sent:
        work.wait()
    output.copy_(have.roll(rank, 0))
