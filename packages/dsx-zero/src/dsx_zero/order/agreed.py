"""In which order the ranks execute gathers and reduces: the same on all, whatever each of them happens to compute.

A rank never issues a collective on its own. It tells its ``Order`` what it needs (``gather``), what it has (``reduce``)
and where it is (``end_forward``, ``end_backward``, ``boundary``); the order calls the ``Executor`` back, for that
operation and for any others that are due before it. Which ones is a matter of the mode:

* **agreeing**: each need is posted to all ranks in a round of a few bytes, and ``schedule.decide`` says what all
  execute. Who has nothing to ask for serves the others: at the end of a pass until all have ended theirs, at the
  boundary (or where it has joined) until all are there.
* **frozen**: when all ranks posted the same in two whole steps, the second is the schedule of the following ones, and
  nothing is asked any more. A rank that passes over an entry executes it on its way. A need that the rest of the
  schedule does not have is a deviation: the rank completes the schedule and posts; the others serve it at their
  boundary.

At the boundary the ranks compare a checksum of what they executed and learn who deviated where. After two steps with
deviations in a row the schedule is dropped and the ranks agree until a step is uniform again.

It leaves out what the operations do (``Executor``) and how words travel (``Channel``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import dsx_comm

from ..errors import ZeroStateError
from .schedule import Decision, Kind, Operation, Post, Schedule, checksum, decide, elide_gathers

__all__ = ["AgreedOrder", "Channel", "Executor", "NullOrder", "Order", "ReuseLimits", "ScheduleDivergence"]

_log = logging.getLogger(__name__)

_THAW_AFTER = 2
"""Steps with deviations in a row after which the ranks agree again."""
_FREEZE_AFTER = 2
"""Uniform steps in a row after which the last one becomes the schedule (the first teaches which gradients to
expect).
"""


class ScheduleDivergence(ZeroStateError):
    """The ranks executed, or under ``strict`` needed, different collectives in one step."""


class Executor(Protocol):
    """Does the operations. Calls come in the same order on every rank; none of them may ask the order for something."""

    def run_gather(self, unit: int) -> None:
        """Issue the gather of a unit and keep its result until it is used or discarded."""
        ...

    def discard(self, unit: int) -> None:
        """This rank passes by: the gathered unit is not needed here."""
        ...

    def holds(self, unit: int) -> bool:
        """Whether the unit is gathered here (or its gather is under way)."""
        ...

    def run_reduce(self, unit: int) -> None:
        """Issue the reduction of a unit with the gradients this rank has for it now (zeros where there are none)."""
        ...


class Order(Protocol):
    """What a rank tells while it computes."""

    def gather(self, unit: int, *, training: bool = True) -> None:
        """This rank needs the unit now. On return its gather has been issued (or it is a use of a kept unit)."""
        ...

    def use(self, unit: int) -> None:
        """This rank uses the unit, which it holds already."""
        ...

    def reduce(self, unit: int) -> None:
        """This rank has complete gradients for the unit. They may be left pending, for ``boundary`` to ask for."""
        ...

    def end_forward(self, *, training: bool = True) -> None:
        """The outermost forward ended."""
        ...

    def end_backward(self) -> None:
        """A backward ended."""
        ...

    def boundary(self, pending: Callable[[], Sequence[int]]) -> None:
        """The rank comes to its optimizer step. ``pending()`` gives the units whose gradients have not been reduced
        yet.
        """
        ...

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        """Between a backward and the step: all ranks reduce what is pending on any of them (``pending()`` as for
        ``boundary``).
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """At every boundary compare over the ranks what users wrote into parameters."""
        ...

    def join(self) -> None:
        """The rank has run its last forward outside training; serve the others until all have."""
        ...

    def keeps(self, unit: int) -> bool:
        """Whether the unit's next use in this pass is meant to find it still gathered."""
        ...

    def run_ahead(self, accept: Callable[[int], bool]) -> None:
        """Issue the next gathers of the schedule early, as long as ``accept(unit)`` says yes."""
        ...


class Channel(Protocol):
    """Carries words between the ranks."""

    rank: int

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Everybody's words, by rank; returns when all have called it."""
        ...


class EditWatch(Protocol):
    """What users wrote into parameters between two steps (``edits.EditAgreement``)."""

    def word(self) -> int:
        """A number below 2^31 that is the same on ranks that wrote the same."""
        ...

    def differ(self, words: Sequence[int]) -> bool:
        """Whether these words, by rank, say that ranks wrote differently what they hold alike. The same on all
        ranks.
        """
        ...

    def refuse(self) -> None:
        """The words differ. Collective; raises on every rank."""
        ...


class ReuseLimits:
    """What decides whether a unit stays gathered until its next use (elements)."""

    def __init__(self, numel: Sequence[int] = (), *, max_reuse_distance: int = 0, max_live: int = 0) -> None:
        self.numel, self.max_reuse_distance, self.max_live = tuple(numel), max_reuse_distance, max_live

    def apply(self, schedule: Schedule) -> Schedule:
        """The schedule with the gathers left out that these limits make unnecessary."""
        if not self.numel or self.max_reuse_distance <= 0:
            return schedule
        return elide_gathers(schedule, self.numel, max_reuse_distance=self.max_reuse_distance, max_live=self.max_live)


class NullOrder:
    """One rank: every need is executed as it comes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def gather(self, unit: int, *, training: bool = True) -> None:
        self._executor.run_gather(unit)

    def use(self, unit: int) -> None:
        """Nothing to keep count of."""

    def reduce(self, unit: int) -> None:
        self._executor.run_reduce(unit)

    def end_forward(self, *, training: bool = True) -> None:
        """Nobody to wait for."""

    def end_backward(self) -> None:
        """Nobody to wait for."""

    def boundary(self, pending: Callable[[], Sequence[int]]) -> None:
        for unit in pending():
            self._executor.run_reduce(unit)

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        self.boundary(pending)

    def watch_edits(self, watch: EditWatch) -> None:
        """Nobody to compare with."""

    def join(self) -> None:
        """Nobody to serve."""

    def keeps(self, unit: int) -> bool:
        return False

    def run_ahead(self, accept: Callable[[int], bool]) -> None:
        """Nothing is known in advance."""


class _Replay:
    """How far a rank has come in a frozen schedule.

    ``position`` is the place after the last entry that this rank has used or passed by. Gathers may have been issued
    ahead of it. A reduce is issued when the rank has offered it (its gradients are complete), every reduce before it is
    issued and every gather that stands before it too; a rank that goes past it issues it with what it has. So whoever
    waits in one operation has issued everything that stands before it, and no two ranks wait for each other.
    """

    def __init__(self, schedule: Schedule, run: Callable[[Operation], None], discard: Callable[[int], None]) -> None:
        self.schedule = schedule
        self.position = 0
        self._run, self._discard = run, discard
        entries, self._end = schedule.entries, len(schedule)
        self._gathers = [i for i, entry in enumerate(entries) if entry.kind is Kind.GATHER]
        self._reduces = [i for i, entry in enumerate(entries) if entry.kind is Kind.REDUCE]
        self._issued_gathers = self._issued_reduces = 0
        self._gather_place = self._gathers[0] if self._gathers else self._end
        """Place of the next gather to issue; the schedule's length if there is none. (Looked at in every hook.)"""
        self._reduce_place = self._reduces[0] if self._reduces else self._end
        self._offered: set[int] = set()

    def _issue_gather(self) -> None:
        place, places = self._gather_place, self._gathers
        self._issued_gathers = issued = self._issued_gathers + 1
        self._gather_place = places[issued] if issued < len(places) else self._end
        self._run(self.schedule.entries[place])

    def _issue_reduce(self) -> None:
        place, places = self._reduce_place, self._reduces
        self._issued_reduces = issued = self._issued_reduces + 1
        self._reduce_place = places[issued] if issued < len(places) else self._end
        self._run(self.schedule.entries[place])

    def issue(self, stop: int) -> None:
        """Issue all operations before place ``stop`` that are still due."""
        while self._gather_place < stop or self._reduce_place < stop:
            if self._gather_place < self._reduce_place:
                self._issue_gather()
            else:
                self._issue_reduce()

    def offer(self, operation: Operation) -> None:
        """The rank has complete gradients for a unit. Nothing if this pass has reduced the unit already."""
        start = max(self.position, self._reduce_place)
        place = self.schedule.find_in_pass(operation, min(start, self._end))
        if place is not None:
            self._offered.add(place)
            self.issue_offered()

    def issue_offered(self) -> None:
        """Issue the reduces that are offered and have their turn."""
        while self._reduce_place in self._offered and self._reduce_place < self._gather_place:
            self._issue_reduce()

    def pass_by(self, stop: int) -> None:
        """Execute everything before ``stop``, giving up the gathers on the way."""
        entries = self.schedule.entries
        for place in range(self.position, stop):
            self.issue(place + 1)
            if entries[place].kind in (Kind.GATHER, Kind.USE):
                self._discard(entries[place].unit)
        self.position = max(self.position, stop)

    def use(self, place: int) -> None:
        """The rank needs the unit of the entry at ``place`` now."""
        if self.position < place:
            self.pass_by(place)
        if self._gather_place <= place or self._reduce_place <= place:
            self.issue(place + 1)
        self.position = place + 1
        if self._reduce_place in self._offered:
            self.issue_offered()

    def run_ahead(self, accept: Callable[[int], bool]) -> None:
        """Issue gathers early; not beyond the end of a backward, where parameters may change."""
        entries, stop = self.schedule.entries, self.schedule.backward_ends[self.position]
        while self._gather_place < stop and accept(entries[self._gather_place].unit):
            self._issue_gather()
            if self._reduce_place in self._offered:
                self.issue_offered()


class AgreedOrder:
    """Several ranks: see the module's text. ``strict`` turns a deviation from the schedule into an error on all
    ranks. ``names``: of the units.
    """

    def __init__(
        self,
        executor: Executor,
        channel: Channel,
        *,
        limits: ReuseLimits | None = None,
        strict: bool = False,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._executor, self._channel, self._names = executor, channel, names or {}
        self._limits = limits or ReuseLimits()
        self._strict = strict
        self._replay: _Replay | None = None
        self._schedule: Schedule | None = None
        self._strayed_steps = self._uniform_steps = 0
        self._edits: EditWatch | None = None
        self._new_step()

    def _new_step(self) -> None:
        self._sums = {Kind.GATHER: 0, Kind.REDUCE: 0}  # apart, as the two groups run beside each other
        self._deviation: Operation | None = None
        self._uniform = True
        self._record: list[Operation] = []
        self._replay = None if self._schedule is None else _Replay(self._schedule, self._run, self._executor.discard)

    @property
    def schedule(self) -> Schedule | None:
        """The frozen schedule; None while the ranks agree."""
        return self._schedule

    def gather(self, unit: int, *, training: bool = True) -> None:
        wanted = Operation(Kind.GATHER, unit)
        replay = self._replay
        if replay is not None and training:
            place = replay.schedule.find(wanted, replay.position)
            if place is not None:
                replay.use(place)
                if self._executor.holds(unit):
                    return
            self._stray(wanted)
        self._rendezvous(wanted, training)

    def use(self, unit: int) -> None:
        replay = self._replay
        if replay is None:
            return
        place = replay.schedule.find_in_pass(Operation(Kind.GATHER, unit), replay.position)
        if place is not None and replay.schedule.entries[place].kind is Kind.USE:
            replay.use(place)

    def reduce(self, unit: int) -> None:
        wanted = Operation(Kind.REDUCE, unit)
        replay = self._replay
        if replay is None:
            self._rendezvous(wanted, True)
        else:
            # If the pass has reduced the unit already, what came late travels with its next reduction, or at the
            # boundary.
            replay.offer(wanted)

    def end_forward(self, *, training: bool = True) -> None:
        self._end_pass(Operation(Kind.FORWARD_END), training)

    def end_backward(self) -> None:
        self._end_pass(Operation(Kind.BACKWARD_END), True)

    def _end_pass(self, mark: Operation, training: bool) -> None:
        replay = self._replay
        if replay is None or not training:
            self._rendezvous(mark, training)
            return
        place = replay.schedule.find(mark, replay.position)
        if place is not None:
            replay.pass_by(place + 1)

    def boundary(self, pending: Callable[[], Sequence[int]]) -> None:
        if self._replay is not None:
            self._replay.pass_by(len(self._replay.schedule))
        while units := list(pending()):
            wanted = Operation(Kind.REDUCE, max(units))
            if self._replay is not None and self._deviation is None:
                self._deviation = wanted
            self._rendezvous(wanted, True)
        self._finish(self._rendezvous(Operation(Kind.BOUNDARY), True, 0 if self._edits is None else self._edits.word()))

    def watch_edits(self, watch: EditWatch) -> None:
        self._edits = watch

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        while units := list(pending()):
            wanted, replay = Operation(Kind.REDUCE, max(units)), self._replay
            place = None if replay is None else replay.schedule.find_in_pass(wanted, replay.position)
            if replay is not None and place is not None:
                replay.pass_by(place + 1)
                continue
            if replay is not None and self._deviation is None:
                self._deviation = wanted
            self._rendezvous(wanted, True)
        self.join()

    def join(self) -> None:
        self._rendezvous(Operation(Kind.JOIN), False)

    def keeps(self, unit: int) -> bool:
        replay = self._replay
        if replay is None:
            return False
        place = replay.schedule.find_in_pass(Operation(Kind.GATHER, unit), replay.position)
        return place is not None and replay.schedule.entries[place].kind is Kind.USE

    def run_ahead(self, accept: Callable[[int], bool]) -> None:
        if self._replay is not None:
            self._replay.run_ahead(accept)

    def _run(self, operation: Operation) -> None:
        self._sums[operation.kind] = checksum(operation, self._sums[operation.kind])
        if operation.kind is Kind.GATHER:
            self._executor.run_gather(operation.unit)
        else:
            self._executor.run_reduce(operation.unit)

    def _checksum(self) -> int:
        return (self._sums[Kind.GATHER] << 31) ^ self._sums[Kind.REDUCE]

    def _stray(self, wanted: Operation) -> None:
        replay = self._replay
        if replay is not None:
            replay.pass_by(len(replay.schedule))
        if self._deviation is None:
            self._deviation = wanted

    def _rendezvous(self, wanted: Operation, training: bool, edits: int = 0) -> list[Post]:
        """Post ``wanted`` round by round, serving the others, until it is fulfilled."""
        name = self._names.get(wanted.unit, str(wanted))  # where a hang is explained
        while True:
            position = 0 if self._replay is None else self._replay.position
            mine = Post(wanted, training, position, self._checksum(), self._deviation, edits)
            with dsx_comm.unit(name):
                posts = [Post.from_words(words) for words in self._channel.exchange(mine.to_words())]
            try:
                decision = decide(posts)
            except ValueError as error:
                raise ScheduleDivergence(
                    f"{error}. Before the next optimizer step every rank has to leave `uneven_forwards`, and to make"
                    " the same calls on gradients (`clip_grad_norm_`, changes of `.grad`)"
                ) from error
            self._carry_out(decision, wanted)
            self._note(posts)
            if self._channel.rank in decision.resume:
                return posts

    def _carry_out(self, decision: Decision, wanted: Operation) -> None:
        if self._replay is not None:
            self._replay.pass_by(decision.align)
        for operation in decision.operations:
            self._run(operation)
            if operation.kind is Kind.GATHER and operation != wanted:
                self._executor.discard(operation.unit)

    def _note(self, posts: list[Post]) -> None:
        """Record the round for the schedule, if this is a training step that is still uniform."""
        operation = posts[0].operation
        if any(post.operation != operation or post.training != posts[0].training for post in posts):
            self._uniform = False
        elif posts[0].training and operation.kind is not Kind.BOUNDARY:
            self._record.append(operation)

    def _finish(self, posts: list[Post]) -> None:
        """All ranks are at the boundary: compare, and choose the mode of the next step. The same outcome on every
        rank.
        """
        if len({post.checksum for post in posts}) > 1:
            sums = ", ".join(f"rank {rank}: {post.checksum:016x}" for rank, post in enumerate(posts))
            raise ScheduleDivergence(
                f"the ranks executed different collectives in this step ({sums}); results are not to be trusted. Every"
                " rank has to build the same model and shard it with the same arguments"
            )
        strayed = [(rank, post.deviation) for rank, post in enumerate(posts) if post.deviation is not None]
        frozen, uniform, record = self._schedule is not None, self._uniform, self._record
        if strayed:
            self._report(strayed)
        self._strayed_steps = self._strayed_steps + 1 if strayed else 0
        if frozen and self._strayed_steps >= _THAW_AFTER:
            self._schedule = None
        self._uniform_steps = self._uniform_steps + 1 if uniform else 0
        if not frozen and self._uniform_steps >= _FREEZE_AFTER:
            self._schedule = self._limits.apply(Schedule(tuple(record)))
            _log.debug("the order of collectives is frozen:\n%s", self._schedule)
        self._new_step()
        if self._edits is not None and self._edits.differ([post.edits for post in posts]):
            self._edits.refuse()
        if strayed and self._strict:
            raise ScheduleDivergence(
                "the ranks' needs differ from the agreed schedule: "
                + "; ".join(f"rank {rank} needed {operation}" for rank, operation in strayed)
                + ". Without strict mode this only costs time"
            )

    def _report(self, strayed: Sequence[tuple[int, Operation | None]]) -> None:
        if self._channel.rank == 0 and self._strayed_steps == 0:
            needs = "; ".join(f"rank {rank} needed {operation}" for rank, operation in strayed)
            _log.warning(
                "beyond the agreed schedule of collectives: %s (correct, but slower than an unchanging order)", needs
            )
