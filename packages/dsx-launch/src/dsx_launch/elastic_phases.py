"""The time from a loss of ranks to the next update: seconds per phase, in the launcher's log.

    node-0: update 13 is done 4.1 s after the change was noticed: stopping 0.3, rendezvous 0.0, starting processes 0.0,
    the program up to join 0.6, building the engine 1.9, loading from memory 0.4, first update 0.9

The agent measures the first phases. The ranks tell the time at which the later ones end (`dsx_launch.notes`); the
first rank of the host speaks for it. Where a program does not call `resume`, nothing is said.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

from .notes import BUILT, JOINED, LOADED, UPDATED, read_note

__all__ = ["ResumePhases"]

log = logging.getLogger("dsx.launcher")

_OF_RANKS = (
    (JOINED, "the program up to join"),
    (BUILT, "building the engine"),
    (LOADED, "loading"),
    (UPDATED, "first update"),
)


class ResumePhases:
    """Notes when phases end, and writes one line when the ranks have done an update.

    Args:
        host: its name.
        notes: the folder in which ranks and agent leave each other notes.
    """

    def __init__(self, host: str, notes: Path) -> None:
        self._host, self.notes = host, notes
        self._ends: list[tuple[str, float]] = []

    def begin(self) -> None:
        """A loss or a change was noticed. A second one before the next update changes nothing."""
        if not self._ends:
            self._ends.append(("", time.time()))

    def end(self, name: str) -> None:
        """A phase is over. Before `begin` (in the first round) nothing is noted."""
        if self._ends:
            self._ends.append((name, time.time()))

    def forget_ranks(self) -> None:
        """Remove what ranks of an earlier round have told."""
        for note, _ in _OF_RANKS:
            (self.notes / note).unlink(missing_ok=True)

    def look(self) -> None:
        """Write the line, if the ranks have done their first update."""
        if not self._ends or not (self.notes / UPDATED).exists():
            return
        ends, update = list(self._ends), ""
        for note, name in _OF_RANKS:
            when, _, detail = read_note(self.notes, note).partition(" ")
            if when:
                ends.append((f"{name} from {detail}" if note == LOADED and detail else name, float(when)))
            update = detail if note == UPDATED else update
        ends.sort(key=lambda end: end[1])  # a rank may be at work before the agent has started the last one
        self._ends = []
        log.info(
            "%s: update %s is done %.1f s after the change was noticed: %s", self._host, update,
            ends[-1][1] - ends[0][1], ", ".join(f"{name} {seconds:.1f}" for name, seconds in _lengths(ends)),
        )  # fmt: skip


def _lengths(ends: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Seconds of each phase; those of one name, which several rounds had, together."""
    found: dict[str, float] = {}
    for (_, before), (name, end) in itertools.pairwise(ends):
        found[name] = found.get(name, 0.0) + end - before
    return list(found.items())
