"""The order in which the ranks execute gathers and reduces: the same on all ranks, whatever each of them computes.

A rank never issues a collective on its own. It tells its ``Order`` what it needs (``gather``), what it has (``reduce``)
and where it is (``end_forward``, ``end_backward``, ``boundary``). The order then calls the ``Executor`` for that
operation and for any others that are due before it. There are two modes:

* **agreeing**: each need is posted to all ranks in a round of a few bytes, and ``schedule.decide`` says what all
  execute. A rank without a request keeps answering. At the end of a forward or backward it waits until every rank has
  ended that pass; at the optimizer step (or after ``join``) until every rank is there.
* **frozen**: when all ranks posted the same in two whole steps, the second step is the schedule of the following ones,
  and the ranks post nothing more inside a step. A rank that does not need an entry executes it when it passes it. A
  need that the rest of the schedule does not have is a deviation: the rank completes the schedule and posts; the other
  ranks take part when they come to their boundary.

``replay`` follows schedules. Forwards without gradients have their own. A rank that trains after them says so in one
round, in which it takes part in the gathers of ranks that still evaluate.

At the boundary the ranks compare a checksum of what they executed, and learn which ranks deviated and where. After two
steps with deviations in a row the schedule is dropped, and the ranks agree until a step is uniform again.

With a `RowSum` the ranks first ask in a frozen step whether all are at their boundary and executed the same, by sums
that travel with another all-reduce. Every rank takes part once per step: at its boundary, or by declining before it
posts anything. Where a rank declined or differs, the round at the boundary is held as without.

Left out: what the operations do (``Executor``) and how words are sent (``Channel``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import dsx_comm
from dsx_core import with_code
from dsx_core.together import some_ranks

from ..errors import ZeroStateError
from .ahead import GatherLimits, Need
from .executor import Executor
from .protocol import Channel, EditWatch, NoRowSum, RowSum
from .replay import FollowingOrder
from .schedule import Decision, Kind, Operation, Pass, Post, checksum, decide, posts_of
from .sums import all_say_the_same, declining_row, row_of

__all__ = ["AgreedOrder", "ScheduleDivergence"]

_log = logging.getLogger(__name__)

_NAMED = 8
"""Ranks, or kinds of ranks, that a text tells apart."""
_UNFREEZE_AFTER = 2
"""Steps with deviations in a row after which the ranks agree again."""
_FREEZE_AFTER = 2
"""Uniform steps in a row after which the last one becomes the schedule. (The first step shows how many gradients a unit
gets.)
"""


class ScheduleDivergence(ZeroStateError):
    """The ranks executed different collectives in one step, or wait for each other at different places."""

    code = "DSX302"


class AgreedOrder(FollowingOrder):
    """The `Order` of several ranks: they agree in rounds of messages, and repeat a schedule once two steps were alike.

    Args:
        executor: executes the operations.
        channel: sends words between the ranks.
        limits: decide which units stay gathered until their next use, and which gathers run ahead; None: none do.
        names: names of the units, by which a hang is explained.
        alone: there is no other rank, so that gathers which this one does not need are not issued.
    """

    def __init__(
        self,
        executor: Executor,
        channel: Channel,
        *,
        limits: GatherLimits | None = None,
        names: Mapping[int, str] | None = None,
        alone: bool = False,
    ) -> None:
        super().__init__(executor, limits or GatherLimits(), alone=alone)
        self._channel, self._names = channel, names or {}
        self._deviating_steps = self._uniform_steps = 0
        self._edits: EditWatch | None = None
        self._row_sum: RowSum = NoRowSum()
        self._begun: Callable[[], list[tuple[int, ...]]] | None = None
        """Reads the words of the round in which this rank began a forward by a frozen schedule; None: they are read."""
        self._new_step()

    def _new_step(self) -> None:
        self._sum = 0  # of this step's operations, as far as they were taken from `_executed`
        self._deviation = None
        self._uniform = True
        self._record: list[Operation] = []
        self._needs: list[Need | None] = []
        """For every operation of the record what all ranks said alike with it."""
        self._executed = []
        self._replay = None if self._schedule is None else self._begin(self._schedule)
        self._takes_part = self._schedule is not None and self._row_sum.ranks > 0
        """Whether this rank has still to take part in the sums of this step."""

    def _post_begin(self) -> None:
        begins = Operation(Kind.FORWARD_BEGIN)
        self._decline()
        with dsx_comm.unit(str(begins)):
            self._begun = self._channel.post(self._post(begins, Pass.EVALUATION).to_words())

    def _read_begun(self) -> None:
        """Read the words of the round in which this rank began a forward with the frozen schedule.

        The rank did not wait for them: whatever the others asked for, all execute that schedule first (`decide`).
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._note(posts_of(begun()))

    def boundary(
        self,
        pending: Callable[[], Sequence[int]],
        squares: Callable[[], float] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> float | None:
        replay = self._train()
        if replay is not None:
            replay.complete()
        while units := list(pending()):
            wanted = Operation(Kind.REDUCE, max(units))
            if self._replay is not None and self._deviation is None:
                self._deviation = wanted
            self._rendezvous(wanted, Pass.TRAINING)
        edits = 0 if self._edits is None else self._edits.word()
        if self._agreed_by_sums(edits):
            self._finish([self._post(Operation(Kind.BOUNDARY), Pass.TRAINING, edits)] * self._row_sum.ranks)
            return None
        posts = self._rendezvous(Operation(Kind.BOUNDARY), Pass.TRAINING, edits, squares, meanwhile)
        self._finish(posts)
        return None if squares is None else sum(post.squares for post in posts)  # in rank order, so equal on all

    def watch_edits(self, watch: EditWatch) -> None:
        self._edits = watch

    def agree_by(self, row_sum: RowSum) -> None:
        self._row_sum = row_sum

    def _agreed_by_sums(self, edits: int) -> bool:
        """Whether all ranks are at their boundary and executed the same, as far as sums can tell."""
        if not self._takes_part:
            return False
        self._takes_part = False
        with dsx_comm.unit("norm and agreement"):
            sums = self._row_sum.add_up(row_of([self._checksum(), edits]))
        return all_say_the_same(sums, self._row_sum.ranks)

    def _decline(self) -> None:
        """Before this rank posts: the others wait for it in the sums if they are at their boundary already."""
        if self._takes_part:
            self._takes_part = False
            self._row_sum.take_part(declining_row(2))

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        while units := list(pending()):
            wanted, replay = Operation(Kind.REDUCE, max(units)), self._replay
            place = None if replay is None else replay.schedule.find_in_pass(wanted, replay.position)
            if replay is not None and place is not None:
                replay.pass_by(place + 1)
                continue
            if replay is not None and self._deviation is None:
                self._deviation = wanted
            self._rendezvous(wanted, Pass.TRAINING)
        self._join()

    def join(self) -> None:
        self._join()
        self._has_evaluated = False  # no rank evaluates any more

    def _join(self) -> None:
        self._rendezvous(Operation(Kind.JOIN), Pass.OUTSIDE)

    def _run(self, operation: Operation) -> None:
        self._executed.append(operation)
        if operation.kind is Kind.GATHER:
            self._executor.run_gather(operation.unit)
        else:
            self._executor.run_reduce(operation.unit)

    def _checksum(self) -> int:
        """The checksum of this step's operations, in the one order in which they were issued."""
        self._sum = checksum(self._executed, self._sum)
        self._executed.clear()
        return self._sum

    def _rendezvous(
        self,
        wanted: Operation,
        during: Pass,
        edits: int = 0,
        squares: Callable[[], float] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Post]:
        """Post ``wanted`` round by round, serving the others, until it is fulfilled. ``meanwhile`` is called while the
        first words are under way, and again whenever a round has reduced gradients.
        """
        self._decline()
        skipped = False
        if self._evaluation.replay is not None:  # in a round all ranks have executed the same of it: all or nothing
            self._evaluation.replay.complete()
            skipped = self._evaluation.replay.skipped
        self._read_begun()
        name = self._names.get(wanted.unit, str(wanted))  # where a hang is explained
        found, work = 0.0 if squares is None else squares(), meanwhile
        while True:
            need = self._need_of(wanted)
            mine = self._post(wanted, during, edits, skipped, found, 0 if need is None else need.checksum())
            with dsx_comm.unit(name):
                answers = self._channel.post(mine.to_words())
                try:
                    if work is not None:
                        work()
                finally:
                    words_by_rank = answers()  # the channel is in step with the others even after an error
            posts, work = posts_of(words_by_rank), None
            try:
                decision = decide(posts)
            except ValueError as error:
                raise ScheduleDivergence(
                    f"{error}. Before the next optimizer step every rank has to leave `uneven_forwards`, and to make"
                    " the same calls on gradients (`clip_grad_norm_`, changes of `.grad`)"
                ) from error
            self._carry_out(decision, wanted)
            if any(operation.kind is Kind.REDUCE for operation in decision.operations):
                found, work = 0.0 if squares is None else squares(), meanwhile  # late gradients have been reduced
            self._note(posts, need)
            if self._channel.rank in decision.resume:
                return posts

    def _need_of(self, wanted: Operation) -> Need | None:
        """This rank's words about itself, with its wish for a gather."""
        if wanted.kind is not Kind.GATHER:
            return None
        return Need(frozenset(self._executor.held()), self._executor.waits_for(wanted.unit))

    def _post(
        self,
        wanted: Operation,
        during: Pass,
        edits: int = 0,
        skipped: bool = False,
        squares: float = 0.0,
        need: int = 0,
    ) -> Post:
        """The post of this rank for the next round."""
        position = 0 if self._replay is None else self._replay.position
        return Post(wanted, during, position, self._checksum(), self._deviation, edits, skipped, squares, need)

    def _carry_out(self, decision: Decision, wanted: Operation) -> None:
        if self._replay is not None:
            self._replay.pass_by(decision.align)
        for operation in decision.operations:
            if operation.kind is Kind.FORWARD_BEGIN:  # of other ranks: take part in its gathers
                if self._evaluation.schedule is not None:
                    self._begin(self._evaluation.schedule).complete()
                continue
            self._run(operation)
            if operation.kind is Kind.GATHER and operation != wanted:
                self._executor.discard(operation.unit)

    def _note(self, posts: list[Post], need: Need | None = None) -> None:
        """Record the round for the schedules: that of the training step, if it is still uniform, and of evaluation.
        ``need`` is what this rank said with its wish.
        """
        operation = posts[0].operation
        different = list({id(post): post for post in posts}.values())  # of many ranks most share one (`posts_of`)
        if any(post.need != posts[0].need for post in different):
            need = None  # the ranks hold different units
        if any(post.during is Pass.TRAINING for post in different):
            if any(post.operation != operation or post.during is not Pass.TRAINING for post in different):
                self._uniform = False
            elif operation.kind < Kind.BOUNDARY:
                self._record.append(operation)
                self._needs.append(need)
        self._evaluation.note(posts, need)

    def _finish(self, posts: list[Post]) -> None:
        """All ranks are at the boundary: compare, and choose the mode of the next step.

        The outcome is the same on every rank.
        """
        executed: dict[int, list[int]] = {}
        for rank, post in enumerate(posts):
            executed.setdefault(post.checksum, []).append(rank)
        if len(executed) > 1:
            sums = ", ".join(f"rank {some_ranks(ranks)}: {found:016x}" for found, ranks in [*executed.items()][:_NAMED])
            raise ScheduleDivergence(
                f"the ranks executed different collectives in this step ({sums}); results are not to be trusted. Every"
                " rank has to build the same model and shard it with the same arguments"
            )
        deviations = [(rank, post.deviation) for rank, post in enumerate(posts) if post.deviation is not None]
        frozen, uniform = self._schedule is not None, self._uniform
        if deviations:
            self._report(deviations)
        self._deviating_steps = self._deviating_steps + 1 if deviations else 0
        if frozen and self._deviating_steps >= _UNFREEZE_AFTER:
            self._schedule = None
        self._uniform_steps = self._uniform_steps + 1 if uniform else 0
        if not frozen and self._uniform_steps >= _FREEZE_AFTER:
            self._schedule = self._limits.apply(self._record, self._needs)
            _log.debug("the order of collectives is frozen:\n%s", self._schedule)
        self._new_step()
        if self._edits is not None and self._edits.differ([post.edits for post in posts]):
            self._edits.refuse()

    def _report(self, deviations: Sequence[tuple[int, Operation | None]]) -> None:
        if self._channel.rank == 0 and self._deviating_steps == 0 and not self._alone:
            more = f"; and {len(deviations) - _NAMED} more ranks" if len(deviations) > _NAMED else ""
            needs = "; ".join(f"rank {rank} needed {operation}" for rank, operation in deviations[:_NAMED]) + more
            text = "beyond the agreed schedule of collectives: %s (correct, but slower than an unchanging order)"
            _log.warning(with_code(text, "DSX352"), needs)
