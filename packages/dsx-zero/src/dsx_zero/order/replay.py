"""One rank's position in a frozen schedule."""

from __future__ import annotations

from .executor import Executor
from .schedule import Kind, Operation, Schedule

__all__ = ["Replay"]


class Replay:
    """How far a rank has come in a frozen schedule.

    ``position`` is the place after the last entry that this rank has used or passed by. Gathers may have been issued
    ahead of it. A reduce is issued when the rank has offered it (its gradients are complete) and every earlier reduce
    and gather has been issued. A rank that passes by a reduce issues it with the gradients that it has. So a rank that
    waits in one operation has issued everything before it, and no two ranks wait for each other.

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
        self._gather_place = schedule.gathers[0]
        """Place of the next gather to issue; the schedule's length if there is none."""
        self._reduce_place = schedule.reduces[0]
        self._offered: set[int] = set()
        self.skipped = False
        """Whether the rank has passed by a gather."""

    def gather(self, unit: int) -> bool:
        """This rank needs a unit now. On return its gather has been issued, and later ones as the executor allows.

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
        stop = self.schedule.backward_ends[self.position]  # after the end of a backward parameters may change
        while self._gather_place < stop and self._executor.may_run_ahead(entries[self._gather_place].unit):
            self._issue_gather()
            if self._reduce_place in self._offered:
                self._issue_offered()
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
        while self._reduce_place in self._offered and self._reduce_place < self._gather_place:
            self._issue_reduce()

    def pass_by(self, stop: int) -> None:
        """Execute everything before ``stop``, and discard the units gathered there."""
        entries = self.schedule.entries
        for place in range(self.position, stop):
            if self._alone and place == self._gather_place:
                self._gather_place = self.schedule.gathers[place + 1]  # no other rank needs this one's shard
            self._issue(place + 1)
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
        if self._gather_place <= place or self._reduce_place <= place:
            self._issue(place + 1)
        self.position = place + 1
        if self._reduce_place in self._offered:
            self._issue_offered()

    def _issue(self, stop: int) -> None:
        """Issue all operations before place ``stop`` that have not been issued."""
        while self._gather_place < stop or self._reduce_place < stop:
            if self._gather_place < self._reduce_place:
                self._issue_gather()
            else:
                self._issue_reduce()

    def _issue_offered(self) -> None:
        """Issue the next reduces, as long as they are offered and no gather comes before them."""
        while self._reduce_place in self._offered and self._reduce_place < self._gather_place:
            self._issue_reduce()

    def _issue_gather(self) -> None:
        operation = self.schedule.entries[self._gather_place]
        self._gather_place = self.schedule.gathers[self._gather_place + 1]
        self._executed.append(operation)
        self._executor.run_gather(operation.unit)

    def _issue_reduce(self) -> None:
        operation = self.schedule.entries[self._reduce_place]
        self._reduce_place = self.schedule.reduces[self._reduce_place + 1]
        self._executed.append(operation)
        self._executor.run_reduce(operation.unit)
