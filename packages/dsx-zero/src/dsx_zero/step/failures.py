"""Failures of one rank in a step, where the others would otherwise wait for it in a collective: raised on all ranks, or
raised when this rank has taken part in the collectives that follow.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import dsx_comm

from ..errors import ZeroStateError
from ..order.channel import Asks

__all__ = ["StepFailure", "is_full", "raise_on_all_ranks"]

T = TypeVar("T")


class StepFailure:
    """The first failure on this rank in the running step.

    With `deferred`, the parts of a step that follow a failure are left out, but not their collectives, and the failure
    is raised at the end of the step. That is for an owner whose ranks agree then whether all could step. Without, a
    failure is raised at once.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.first: Exception | None = None

    def begin(self) -> None:
        """Begin a step."""
        self.first = None

    def run(self, action: Callable[[], T], instead: T) -> T:
        """Do a part of the step that does not communicate. Gives `instead` where this part or one before it failed."""
        if self.first is not None:
            return instead
        try:
            return action()
        except Exception as error:
            if not self.deferred:
                raise
            self.first = error
            return instead

    def end(self) -> None:
        """End the step: raise what has failed."""
        failure, self.first = self.first, None
        if failure is not None:
            raise failure


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
