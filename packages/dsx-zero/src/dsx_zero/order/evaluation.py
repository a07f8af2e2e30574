"""The order of gathers in forwards without gradients: evaluation, generation.

When all ranks have asked for the same gathers in two such forwards in a row, these become the schedule of the following
ones: the ranks no longer ask for each unit, and gathers are issued before their use. Each forward still has two rounds
of words. The round at its beginning (`Kind.FORWARD_BEGIN`) tells ranks that run fewer forwards to take part; the rank
that begins does not wait for it. The round at its end makes sure that no rank needs a gather that the schedule does not
have, before any rank returns to the user's code, whose own collectives would wait for that rank.

If a rank needs a gather that the schedule does not have, all ranks drop the schedule in the round in which they learn
of it; the schedule of the training step stays. They also drop it if every rank skips a gather, because that gather is
not needed any more.

This file has the state and how each round changes it; `agreed` runs the rounds and executes operations.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .ahead import GatherLimits, Need
from .replay import Replay
from .schedule import Kind, Operation, Pass, Post, Schedule

__all__ = ["EvaluationOrder"]

_log = logging.getLogger(__name__)


class EvaluationOrder:
    """The schedule of forwards without gradients, and this rank's position in the running one.

    The state depends only on rounds, which are the same for all ranks. So all ranks have the same schedule.

    Args:
        limits: decide which units stay gathered, and which gathers run ahead of their use.
    """

    def __init__(self, limits: GatherLimits) -> None:
        self.schedule: Schedule | None = None
        """None while the ranks agree on each gather."""
        self.replay: Replay | None = None
        """This rank's position in the running forward; None if it does not follow the schedule."""
        self._limits = limits
        self._record: list[Operation] = []
        self._needs: list[Need | None] = []
        """For every operation of the record what all ranks said alike with it."""
        self._last: list[Operation] | None = None  # what all ranks asked for in the forward before
        self._uniform = True

    def note(self, posts: Sequence[Post], need: Need | None) -> None:
        """Update the state after a round with the posts of all ranks; `need` is what they all said alike."""
        evaluating = [post for post in posts if post.during is Pass.EVALUATION]
        if not evaluating:
            return
        operation = posts[0].operation
        alike = len(evaluating) == len(posts) and all(post.operation == operation for post in posts)
        if self.schedule is None:
            self._learn(operation, alike, need)
        elif any(post.operation.kind is Kind.GATHER for post in evaluating):
            needs = [f"rank {r} needed {p.operation}" for r, p in enumerate(posts) if p.operation.kind is Kind.GATHER]
            _log.debug("the order of forwards without gradients is agreed on again: %s", "; ".join(needs))
            self._drop()
            self._learn(operation, alike, need)
            self._uniform = False  # the record lacks the beginning of this forward
        elif alike and operation.kind is Kind.FORWARD_END and all(post.skipped for post in posts):
            self._drop()

    def _drop(self) -> None:
        self.schedule = self.replay = self._last = None
        self._record, self._needs, self._uniform = [], [], True

    def _learn(self, operation: Operation, alike: bool, need: Need | None) -> None:
        if not alike:
            self._uniform = False
        elif operation.kind is Kind.GATHER:
            self._record.append(operation)
            self._needs.append(need)
        elif operation.kind is Kind.FORWARD_END:
            record = [*self._record, operation] if self._uniform and self._record else None
            if record is not None and record == self._last:
                self.schedule = self._limits.apply(record, [*self._needs, None])
                _log.debug("the order of forwards without gradients is frozen:\n%s", self.schedule)
            self._last = record
            self._record, self._needs, self._uniform = [], [], True
