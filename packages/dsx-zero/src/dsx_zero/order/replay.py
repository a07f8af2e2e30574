"""One rank's way through a frozen schedule."""

from __future__ import annotations

from collections.abc import Callable

from .schedule import Kind, Operation, Schedule

__all__ = ["Replay"]


class Replay:
    """How far a rank has come in a frozen schedule.

    ``position`` is the place after the last entry that this rank has used or passed by. Gathers may have been issued
    ahead of it. A reduce is issued when the rank has offered it (its gradients are complete), every reduce before it is
    issued and every gather that stands before it too; a rank that goes past it issues it with what it has. So whoever
    waits in one operation has issued everything that stands before it, and no two ranks wait for each other.
    """

    def __init__(
        self,
        schedule: Schedule,
        run: Callable[[Operation], None],
        discard: Callable[[int], None],
        *,
        alone: bool = False,
    ) -> None:
        self.schedule = schedule
        self.position = 0
        self._run, self._discard, self._alone = run, discard, alone
        entries, self._end = schedule.entries, len(schedule)
        self._gathers = [i for i, entry in enumerate(entries) if entry.kind is Kind.GATHER]
        self._reduces = [i for i, entry in enumerate(entries) if entry.kind is Kind.REDUCE]
        self._issued_gathers = self._issued_reduces = 0
        self._gather_place = self._gathers[0] if self._gathers else self._end
        """Place of the next gather to issue; the schedule's length if there is none. (Looked at in every hook.)"""
        self._reduce_place = self._reduces[0] if self._reduces else self._end
        self._offered: set[int] = set()
        self.skipped = False
        """Whether the rank has passed by a gather."""

    def _issue_gather(self) -> None:
        place = self._gather_place
        self._leave_gather()
        self._run(self.schedule.entries[place])

    def _leave_gather(self) -> None:
        """The next gather to issue is the one after it."""
        places = self._gathers
        self._issued_gathers = issued = self._issued_gathers + 1
        self._gather_place = places[issued] if issued < len(places) else self._end

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
            if self._alone and place == self._gather_place:
                self._leave_gather()  # no other rank needs this one's shard
            self.issue(place + 1)
            if entries[place].kind in (Kind.GATHER, Kind.USE):
                self.skipped = True
                self._discard(entries[place].unit)
        self.position = max(self.position, stop)

    def complete(self) -> None:
        """Execute all that is left, giving up its gathers."""
        self.pass_by(len(self.schedule))

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
