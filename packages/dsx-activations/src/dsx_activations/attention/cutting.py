"""The assignment of a sequence's tokens to ranks.

Two orders. `plain`: the sequence is cut into one piece for each rank. `zigzag`: it is cut into twice as many pieces,
and rank r has piece r and piece 2 * size - 1 - r, so that under a causal mask all ranks have the same work. Pieces are
as even as possible, the first ones one token larger.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch

from ..errors import ActivationArgumentError

__all__ = ["ORDERS", "Segments", "even_parts", "place_in", "sequence_segments", "shard_sequence"]

ORDERS = ("plain", "zigzag")
Segments = tuple[tuple[int, int], ...]
"""Ranges of tokens (first, behind the last), as they follow each other on a rank."""


def even_parts(total: int, count: int) -> Segments:
    """`total` things in `count` ranges, the first ones one larger."""
    small, larger = divmod(total, count)
    ends = [small * (n + 1) + min(n + 1, larger) for n in range(count)]
    return tuple(zip((0, *ends[:-1]), ends))


def sequence_segments(length: int, size: int, rank: int, order: str = "plain") -> Segments:
    """The tokens of a rank.

    Args:
        length: tokens of the whole sequence.
        size: number of ranks.
        rank: one of them.
        order: "plain" or "zigzag".

    Returns:
        One range of tokens, or two for "zigzag", which may be empty.

    Raises:
        ActivationArgumentError: an unknown order, or a sequence with fewer tokens than ranks.
    """
    if order not in ORDERS:
        raise ActivationArgumentError(f"order: got {order!r}, expected {' or '.join(ORDERS)}")
    if length < size:
        raise ActivationArgumentError(
            f"a sequence of {length} tokens is shorter than the group of {size} ranks; expected at least one token for"
            " each rank; use a smaller group"
        )
    if order == "plain":
        return (even_parts(length, size)[rank],)
    pieces = even_parts(length, 2 * size)
    return pieces[rank], pieces[2 * size - 1 - rank]


def shard_sequence(x: torch.Tensor, group: Any = None, *, dim: int = 1, order: str = "plain") -> torch.Tensor:
    """This rank's part of a tensor that all ranks of the group have whole (tokens, labels, positions).

    Args:
        x: the whole tensor.
        group: the ranks among which it is cut; None: all ranks, or this process alone.
        dim: the dimension of tokens.
        order: "plain" or "zigzag"; the attention is told the same.

    Returns:
        A copy.

    Raises:
        ActivationArgumentError: see `sequence_segments`.
    """
    rank, size = place_in(group)
    segments = sequence_segments(x.shape[dim], size, rank, order)
    return torch.cat([x.narrow(dim, first, behind - first) for first, behind in segments], dim)


def place_in(group: Any) -> tuple[int, int]:
    """This process' rank in the group, and the group's size. Without a process group it is alone."""
    if group is None and not dsx_comm.is_initialized():
        return 0, 1
    return dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
