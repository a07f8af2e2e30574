"""Transfers of sub-groups: masters and states are fetched for their step, and stored afterwards beside later steps.

A buffer stays in memory from the start of its fetch until its store has ended. So a sub-group is fetched only when at
most `Pipeline.behind` earlier ones are still being stored.

Left out: when each sub-group is fetched and stored (`plan`), and what moves where (`states`, `homes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from dsx_comm.lanes import Lane

from ..homes.stored import StoredHome
from .masters import Master
from .states import OptimizerStates, Visit

__all__ = ["SubGroupTransfers"]


class SubGroupTransfers:
    """The transfers of one step. One thread at a time calls it.

    Args:
        states: the states of the optimizer.
        lane: runs the copies.
        behind: see `Pipeline`.
    """

    def __init__(self, states: OptimizerStates, lane: Lane, *, behind: int) -> None:
        self._states, self._lane, self._behind = states, lane, behind
        self._fetched: dict[int, list[Visit]] = {}
        self._writes: dict[int, list[int]] = {}
        """Of the masters of fetched sub-groups, from before the fetch."""
        self._under_way: deque[list[Visit]] = deque()

    def fetch(self, number: int, masters: Sequence[Master]) -> None:
        """Start to fetch a sub-group. Does nothing if it is fetched already."""
        if number in self._fetched:
            return
        while len(self._under_way) > self._behind:  # the buffers of earlier sub-groups must be free
            self._wait_oldest()
        self._fetched[number] = [self._states.fetch(master, self._lane) for master in masters]
        self._writes[number] = _writes(masters)

    def are_stale(self) -> bool:
        """Was a master written since its fetch began (an edit of the user reaches masters in the step)?"""
        visits = self._fetched.items()
        return any(_writes([visit.master for visit in found]) != self._writes[number] for number, found in visits)

    def attach(self, number: int) -> None:
        """Wait for a sub-group, and put it into `optimizer.state` and the masters' tensors. Does nothing if it was not
        fetched.
        """
        for visit in reversed(self._fetched.get(number, ())):  # the newest first, as in `Visit.wait`
            self._states.attach(visit)

    def store(self, number: int) -> None:
        """Start to store a sub-group that was fetched and stepped."""
        visits = self._fetched.pop(number)
        for visit in visits:
            self._states.store(visit, self._lane)
        self._under_way.append(visits)
        if not self._behind:
            self._wait_oldest()

    def wait(self) -> None:
        """Wait until everything is stored."""
        while self._under_way:
            self._wait_oldest()

    def end(self) -> None:
        """End the step: store what is still fetched (after an error) as it is, and wait until everything is stored."""
        for number in list(self._fetched):
            self.attach(number)
            self.store(number)
        self.wait()

    def abandon(self) -> None:
        """Let go of all buffers, once no transfer uses them. What was fetched and not stored is lost."""
        fetched = [visit for visits in self._fetched.values() for visit in visits]
        stored = [visit for visits in self._under_way for visit in visits]
        self._fetched.clear()
        self._under_way.clear()
        for visit in (*fetched, *stored):
            tickets, visit.tickets = visit.tickets, []
            for ticket in tickets:
                with suppress(OSError):  # the failure that matters was raised before
                    ticket.synchronize()
        for visit in fetched:
            if visit.values is not None:
                visit.master.tensor.data = visit.values.new_empty(0)

    def _wait_oldest(self) -> None:
        for visit in reversed(self._under_way.popleft()):
            visit.wait()


def _writes(masters: Sequence[Master]) -> list[int]:
    """The number of times that the stores of the masters' values were written."""
    homes = [master.group.master for master in masters]
    return [home.writes if isinstance(home, StoredHome) else 0 for home in homes]
