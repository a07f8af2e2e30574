"""Flat groups that were stepped during backward: what shows that somebody has written to them since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsx_comm.lanes import Ticket

from ..homes.home import DeviceHome, Home, HostHome
from ..homes.stored import StoredHome
from ..params.flat import FlatGroup

__all__ = ["SteppedGroup", "note_stepped", "wait_for_gradients"]


@dataclass
class SteppedGroup:
    """A flat group whose masters were stepped, and numbers that show later writes to it: each write makes one of them
    grow.
    """

    group: FlatGroup
    gradients: Home
    arriving: Ticket | None
    before: list[int] = field(default_factory=list)
    """Of gradients and partitioned parameters, from before the thread has begun."""
    stepped: int = 0
    """Of the masters, which the thread writes itself."""

    def __post_init__(self) -> None:
        self.before = self._sources()

    def _sources(self) -> list[int]:
        return [_version(self.gradients), self.group.replaced]

    def note_stepped(self) -> None:
        """The masters have the values that they keep until the step."""
        self.stepped = _version(self.group.master)

    def was_written(self) -> bool:
        """Was anything written since?"""
        return self._sources() != self.before or _version(self.group.master) != self.stepped


def _version(home: Home | None) -> int:
    """Grows with each write. A view would make the host wait for values that are under way, in the middle of backward;
    a store of them was counted when it was launched.
    """
    if isinstance(home, (DeviceHome, HostHome)):
        return home.memory._version
    return home.writes if isinstance(home, StoredHome) else 0  # units with other tiers are not stepped early


def wait_for_gradients(groups: Sequence[SteppedGroup]) -> None:
    """Wait until the reduced gradients are in their homes."""
    for entry in groups:
        if entry.arriving is not None:
            entry.arriving.synchronize()


def note_stepped(groups: Sequence[SteppedGroup]) -> None:
    """The masters have the values that they keep until the step: remember their versions."""
    for entry in groups:
        entry.note_stepped()
