"""One rank's position in a frozen schedule."""

from __future__ import annotations

from .executor import Executor
from .schedule import Kind, Operation, Schedule

__all__ = ["Replay"]


class Replay:
    """How far a rank has come in a frozen schedule.

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
        """How many operations of the order have been issued."""
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
