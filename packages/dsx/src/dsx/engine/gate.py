"""Points between two updates at which all ranks stop together, agreed on by threads while training goes on.

Some actions must happen on every rank between the same two updates: raising the error of an asynchronous save, or
saving and ending because of a signal. A thread of each rank has such an action, and the threads call `agree` together.
Each thread says which update its rank has begun last; the action is due on every rank after the latest of these
updates. A rank that is about to begin an update while its thread is asking waits for the answer. The answer takes one
exchange of numbers between threads, and never depends on the training of another rank.

So no rank begins an update in which others do not take part, and no collective waits for ever: a rank that has begun an
update ends it, and a rank that is behind catches up, because some rank has begun the updates up to that point.
Evaluation changes nothing, so a rank may also stop in the middle of an evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["StepGate"]


class _Gatherer(Protocol):
    def gather(self, value: int) -> list[int]: ...


class StepGate:
    """Stops one rank's training at the update that the threads of all ranks have agreed on.

    Args:
        updates: returns how many updates are over.
    """

    def __init__(self, updates: Callable[[], int]) -> None:
        self._updates = updates
        self._changed = threading.Condition()
        self._running: int | None = None  # the number of the update that was begun and is not over
        self._asking = 0
        self._due: list[tuple[int, Callable[[], None]]] = []

    def agree(self, ranks: _Gatherer, action: Callable[[], None]) -> int:
        """Let every rank's training thread run `action` after the same update; returns the number of that update.
        Collective over the calling threads. A thread that trains must not call it.
        """
        with self._changed:
            self._asking += 1
            # Not counted from `updates`: at the end of an update it is counted already, while observers still run.
            begun = self._updates() if self._running is None else self._running
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
        """Run actions that are due. After that no rank stops before this update is over. A second call within an update
        does nothing.
        """
        if self._running is not None:
            return
        with self._changed:
            while self._asking:
                self._changed.wait()
            if not self._is_due():
                self._running = self._updates() + 1
                return
        self.at_rest()
        self.begin_update()

    def end_update(self) -> None:
        """Run the actions that are due after this update."""
        self._running = None
        self.at_rest()

    def abandon_update(self) -> None:
        """Drop the update that was begun; another one may begin."""
        self._running = None

    def at_rest(self) -> None:
        """Run actions that are due, unless an update is under way."""
        while self._running is None:
            with self._changed:
                found = next((one for one in self._due if one[0] <= self._updates()), None)
                if found is None:
                    return
                self._due.remove(found)
            found[1]()

    def _is_due(self) -> bool:
        return any(last <= self._updates() for last, _ in self._due)
