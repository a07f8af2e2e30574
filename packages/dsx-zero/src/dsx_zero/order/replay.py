"""One rank's position in frozen schedules (`Replay`), and the part of an `AgreedOrder` that follows them.

Forwards without gradients (evaluation, generation) have a schedule of their own (`EvaluationOrder`).
When all ranks have asked for the same gathers in two such forwards in a row, these become the schedule of the following
ones: the ranks no longer ask for each unit, and gathers are issued before their use. Each forward still has two rounds
of words. The round at its beginning (`Kind.FORWARD_BEGIN`) tells ranks that run fewer forwards to take part; the rank
that begins does not wait for it. The round at its end makes sure that no rank needs a gather that the schedule does not
have, before any rank returns to the user's code, whose own collectives would wait for that rank.

If a rank needs a gather that the schedule does not have, all ranks drop the schedule in the round in which they learn
of it; the schedule of the training step stays. They also drop it if every rank skips a gather, because that gather is
not needed any more.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from .ahead import GatherLimits, Need
from .executor import Executor
from .schedule import Kind, Operation, Pass, Post, Schedule

__all__ = ["EvaluationOrder", "FollowingOrder", "Replay"]

_log = logging.getLogger(__name__)


class Replay:
    """The place of a rank in a frozen schedule.

    ``position`` is the place after the last entry that this rank has used or passed by. All ranks issue the gathers and
    reduces in one order (`Schedule.issued`), in which some gathers come before their use. What is due at a place, a
    rank has issued when it has come there. A reduce may be issued earlier, when the rank has offered it (its gradients
    are complete) and it is the next one in that order. A rank that passes by a reduce issues it with the gradients that
    it has. So a rank that waits in one operation has issued everything before it, and no two ranks wait for each other.

    The usual case, in which a rank needs the next entry, takes few calls: each call is host time between two kernels.

    Args:
        schedule: what all ranks execute.
        executor: executes the operations.
        executed: operations are appended to this list when they are issued.
        alone: there is no other rank, so that gathers which this one passes by are not issued.
    """

    def __init__(
        self, schedule: Schedule, executor: Executor, executed: list[Operation], *, alone: bool = False
    ) -> None:
        self.schedule = schedule
        self.position = 0
        self._executor, self._executed, self._alone = executor, executed, alone
        self._order, self._due = schedule.issued
        self._issued = 0
        """The number of operations of the order that have been issued."""
        self._reduce_place = schedule.reduces[0]
        """Place of the next reduce to issue; the schedule's length if there is none."""
        self._offered: set[int] = set()
        self.skipped = False
        """Whether the rank has passed by a gather."""

    def gather(self, unit: int) -> bool:
        """This rank needs a unit now. On return its gather has been issued, and those that run ahead of their use.

        Returns:
            False if the rest of the schedule does not have the unit, or if the gathered unit was discarded.
        """
        entries, place = self.schedule.entries, self.schedule.needs[self.position]
        if place == len(entries) or entries[place].unit != unit:
            found = self.schedule.find(Operation(Kind.GATHER, unit), self.position)
            if found is None:
                return False
            place = found
        self._use(place)
        return self._executor.holds(unit)

    def use(self, unit: int) -> None:
        """This rank uses a unit that is gathered. If the schedule has a use for it, the rank goes on to that entry."""
        place = self.schedule.find_in_pass(Operation(Kind.GATHER, unit), self.position)
        if place is not None and self.schedule.entries[place].kind is Kind.USE:
            self._use(place)

    def keeps(self, unit: int) -> bool:
        """Whether the unit stays gathered until its next use in this pass."""
        place = self.schedule.find_in_pass(Operation(Kind.GATHER, unit), self.position)
        return place is not None and self.schedule.entries[place].kind is Kind.USE

    def offer(self, unit: int) -> None:
        """The rank has complete gradients for a unit. If this pass has reduced the unit already, nothing happens."""
        entries, place = self.schedule.entries, self._reduce_place
        if place < self.position or place == len(entries) or entries[place].unit != unit:
            found = self.schedule.find_in_pass(Operation(Kind.REDUCE, unit), max(self.position, place))
            if found is None:
                return
            place = found
        self._offered.add(place)
        self._issue_offered()

    def pass_by(self, stop: int) -> None:
        """Execute everything before ``stop``, and discard the units gathered there."""
        entries = self.schedule.entries
        for place in range(self.position, stop):
            if self._issued < self._due[place]:
                self._issue(self._due[place], unless_before=stop if self._alone else 0)
            if entries[place].kind in (Kind.GATHER, Kind.USE):
                self.skipped = True
                self._executor.discard(entries[place].unit)
        self.position = max(self.position, stop)

    def complete(self) -> None:
        """Execute the rest of the schedule, and discard the units gathered there."""
        self.pass_by(len(self.schedule))

    def _use(self, place: int) -> None:
        """The rank needs the unit of the entry at ``place`` now."""
        if self.schedule.needs[self.position] < place:
            self.pass_by(place)
        if self._issued < self._due[place]:
            self._issue(self._due[place])
        self.position = place + 1
        if self._reduce_place in self._offered:
            self._issue_offered()

    def _issue(self, stop: int, *, unless_before: int = 0) -> None:
        """Issue the operations up to number ``stop`` of the order, but no gathers of places ``unless_before``: no other
        rank needs this one's shard.
        """
        order, entries = self._order, self.schedule.entries
        while self._issued < stop:
            place = order[self._issued]
            self._issued += 1
            operation = entries[place]
            if operation.kind is Kind.REDUCE:
                self._reduce_place = self.schedule.reduces[place + 1]
                self._executed.append(operation)
                self._executor.run_reduce(operation.unit)
            elif place >= unless_before:
                self._executed.append(operation)
                self._executor.run_gather(operation.unit)

    def _issue_offered(self) -> None:
        """Issue the next operations of the order, as long as they are offered reduces."""
        order, offered = self._order, self._offered
        while self._issued < len(order) and order[self._issued] in offered:
            self._issue(self._issued + 1)


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


class FollowingOrder(ABC):
    """The part of an `AgreedOrder` that follows schedules: a rank's passes, with a round of words (`_rendezvous`)
    only where no schedule has what the rank needs.

    Args:
        executor: executes the operations.
        limits: decide which units stay gathered until their next use, and which gathers run ahead.
        alone: there is no other rank, so that gathers which this one does not need are not issued.
    """

    def __init__(self, executor: Executor, limits: GatherLimits, *, alone: bool) -> None:
        self._executor, self._limits, self._alone = executor, limits, alone
        self._schedule: Schedule | None = None
        self._replay: Replay | None = None
        self._deviation: Operation | None = None
        self._executed: list[Operation] = []  # since the checksums were last extended
        self._evaluation = EvaluationOrder(limits)
        self._has_evaluated = False
        """Whether this rank's last pass was a forward without gradients."""

    @abstractmethod
    def _rendezvous(self, wanted: Operation, during: Pass) -> object:
        """Agree with the other ranks until `wanted` is fulfilled."""

    @abstractmethod
    def _post_begin(self) -> None:
        """Tell the ranks that this one begins a forward by the frozen schedule, without waiting for them."""

    @abstractmethod
    def _read_begun(self) -> None:
        """Read the words of the round in which this rank began a forward with the frozen schedule."""

    def _begin(self, schedule: Schedule) -> Replay:
        return Replay(schedule, self._executor, self._executed, alone=self._alone)

    @property
    def schedule(self) -> Schedule | None:
        """The frozen schedule of a training step; None while the ranks agree."""
        return self._schedule

    @property
    def evaluation_schedule(self) -> Schedule | None:
        """The frozen schedule of a forward without gradients; None while the ranks agree."""
        return self._evaluation.schedule

    def gather(self, unit: int, *, during: Pass = Pass.TRAINING) -> None:
        if during is Pass.TRAINING:
            replay = self._train() if self._has_evaluated else self._replay
        else:
            replay = self._follow_evaluation() if during is Pass.EVALUATION else None
        if replay is not None and replay.gather(unit):
            return
        wanted = Operation(Kind.GATHER, unit)
        if replay is not None and during is Pass.TRAINING:
            self._deviate(wanted)
        self._rendezvous(wanted, during)

    def _follow_evaluation(self) -> Replay | None:
        """This rank's position in the schedule of forwards without gradients. Begins such a forward if none runs."""
        evaluation, self._has_evaluated = self._evaluation, True
        if evaluation.replay is None:
            self._read_begun()  # the round of the forward before may have dropped the schedule
            if evaluation.schedule is not None:
                self._post_begin()
                evaluation.replay = self._begin(evaluation.schedule)
        return evaluation.replay

    def _train(self) -> Replay | None:
        """This rank's position in the schedule of the training step.

        After forwards without gradients the rank first asks whether other ranks still run some: if it followed the
        frozen schedule at once, they would not get its shards.
        """
        if self._has_evaluated:
            self._has_evaluated = False
            if self._replay is not None:
                self._rendezvous(Operation(Kind.TRAINING_BEGIN), Pass.TRAINING)
        return self._replay

    def _running(self) -> Replay | None:
        """This rank's position in the schedule of the pass that it is in."""
        return self._evaluation.replay if self._has_evaluated else self._replay

    def use(self, unit: int) -> None:
        replay = self._running()
        if replay is not None:
            replay.use(unit)

    def keeps(self, unit: int) -> bool:
        replay = self._evaluation.replay if self._has_evaluated else self._replay
        return replay is not None and replay.schedule.reuses and replay.keeps(unit)

    def reduce(self, unit: int) -> None:
        replay = self._train() if self._has_evaluated else self._replay
        if replay is None:
            self._rendezvous(Operation(Kind.REDUCE, unit), Pass.TRAINING)
        else:
            # If the pass has reduced the unit already, late gradients are sent with its next reduction, or at the
            # boundary.
            replay.offer(unit)

    def end_forward(self, *, during: Pass = Pass.TRAINING) -> None:
        if during is Pass.TRAINING:
            self._end_pass(Operation(Kind.FORWARD_END))
            return
        self._follow_evaluation()  # where this rank gathered nothing, others may have
        self._rendezvous(Operation(Kind.FORWARD_END), during)
        self._evaluation.replay = None

    def end_backward(self) -> None:
        self._end_pass(Operation(Kind.BACKWARD_END))

    def _end_pass(self, mark: Operation) -> None:
        replay = self._train()
        if replay is None:
            self._rendezvous(mark, Pass.TRAINING)
            return
        place = replay.schedule.find(mark, replay.position)
        if place is not None:
            replay.pass_by(place + 1)

    def _deviate(self, wanted: Operation) -> None:
        if self._replay is not None:
            self._replay.complete()
        if self._deviation is None:
            self._deviation = wanted
