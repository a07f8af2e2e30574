"""Points between two updates at which all ranks stop together, agreed on by threads while training goes on.

A thread of each rank has something that every rank must do between the same two updates: raise the error of a save
behind, or save and end because a signal came. The threads call `agree` together. Each says which update its rank has
begun last; the action is due on every rank when the latest of these is over. A rank that is about to begin an update
while its thread asks waits for the answer, which takes one exchange of numbers between threads and never depends on
another rank's training.

So no rank begins an update that others do not take part in, and no collective is left waiting: a rank that has begun
one ends it, and one that is behind catches up, since the updates up to that point have been begun by some rank.
Evaluation changes nothing, so a rank also stops in the middle of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["StepGate"]


class _Gatherer(Protocol):
    def gather(self, value: int) -> list[int]: ...


class StepGate:
    """Stops one rank's training where all ranks' threads have agreed.

    Args:
        updates: how many updates are over.
    """

    def __init__(self, updates: Callable[[], int]) -> None:
        self._updates = updates
        self._changed = threading.Condition()
        self._in_update = False
        self._asking = 0
        self._due: list[tuple[int, Callable[[], None]]] = []

    def agree(self, ranks: _Gatherer, action: Callable[[], None]) -> int:
        """Have `action` run by every rank's training thread after the same update; returns its number. Collective over
        the threads that call it, and never called by a thread that trains.
        """
        with self._changed:
            self._asking += 1
            begun = self._updates() + self._in_update
        try:
            last = max(ranks.gather(begun))
            with self._changed:
                self._due.append((last, action))
            return last
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def begin_update(self) -> None:
        """Run what is due; then no rank stops before this update is over. Called again within an update, nothing."""
        if self._in_update:
            return
        with self._changed:
            while self._asking:
                self._changed.wait()
            if not self._is_due():
                self._in_update = True
                return
        self.at_rest()
        self.begin_update()

    def end_update(self) -> None:
        """Run what is due after this update."""
        self._in_update = False
        self.at_rest()

    def abandon_update(self) -> None:
        """The update that was begun is not gone on with; another one may begin."""
        self._in_update = False

    def at_rest(self) -> None:
        """Run what is due, unless an update is under way."""
        while not self._in_update:
            with self._changed:
                found = next((one for one in self._due if one[0] <= self._updates()), None)
                if found is None:
                    return
                self._due.remove(found)
            found[1]()

    def _is_due(self) -> bool:
        return any(last <= self._updates() for last, _ in self._due)
