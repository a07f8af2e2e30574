"""Failures of the host's thread on one rank, raised on all ranks: the others would wait for it in a collective."""

from __future__ import annotations

import errno
from typing import Any

import dsx_comm

from ..errors import ZeroStateError
from ..order.channel import Asks

__all__ = ["is_full", "raise_on_all_ranks"]


def raise_on_all_ranks(
    channel: Asks, ranks: dsx_comm.RankSet, problem: str | None, cause: BaseException | None = None
) -> None:
    """Raise the same error on all ranks if one of them has a problem. Collective over `ranks`.

    Args:
        channel: asks a yes-or-no question of all `ranks`.
        problem: what went wrong on this rank; None if nothing did.
        cause: the exception behind it, if there is one.

    Raises:
        ZeroStateError: on every rank, with the same text, if one of them has a problem; names the rank.
    """
    if channel.ask(problem is None).get():
        return
    by_rank: list[Any] = [problem]
    if ranks.size > 1:
        by_rank = [None] * ranks.size
        dsx_comm.all_gather_object(by_rank, problem, group=ranks.group)
    rank, text = next((rank, text) for rank, text in enumerate(by_rank) if text is not None)
    raise ZeroStateError(f"step(): rank {rank}: {text}") from cause


def is_full(failure: BaseException) -> bool:
    """Does the failure say that a disk has no space left?"""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)
