"""`Executor`: executes the gathers (at stage 3) and reductions that an order of collectives decides on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..errors import ZeroStateError

__all__ = ["CollectiveExecutor", "Executor", "Gathers", "NoGathers"]


class Gathers(Protocol):
    """The gathers of one model (`gather.executor.GatherExecutor`)."""

    def run_gather(self, unit: int) -> None:
        """Issue the gather of a unit and keep its result until it is used or discarded."""
        ...

    def discard(self, unit: int) -> None:
        """This rank does not need the gathered unit: free it."""
        ...

    def holds(self, unit: int) -> bool:
        """Whether the unit is gathered on this rank, or its gather is in flight."""
        ...

    def held(self) -> Collection[int]:
        """The units that are gathered on this rank, or whose gathers are in flight."""
        ...

    def waits_for(self, unit: int) -> bool:
        """Whether a gather of the unit makes the host wait for this rank's shard (on a disk)."""
        ...


class Executor(Gathers, Protocol):
    """Executes operations. It is called in the same order on every rank, and must not ask the order for anything."""

    def run_reduce(self, unit: int) -> None:
        """Issue the reduction of a unit with the gradients this rank has now; missing ones count as zeros."""
        ...


class NoGathers:
    """The gathers of stages 0-2, where whole parameters are always in memory: there are none."""

    def run_gather(self, unit: int) -> None:
        """Raises `ZeroStateError`: no order gathers at these stages."""
        raise ZeroStateError(f"unit {unit} is whole at stages 0-2, there is nothing to gather")

    def discard(self, unit: int) -> None:
        """Nothing to do: whole units stay."""

    def holds(self, unit: int) -> bool:
        """True: whole units are always in memory."""
        return True

    def held(self) -> Collection[int]:
        """None: nothing is gathered."""
        return ()

    def waits_for(self, unit: int) -> bool:
        """False: there is nothing to gather."""
        return False


class _OnUnit(Protocol):
    def __call__(self, unit: int) -> None: ...


class _AskUnit(Protocol):
    def __call__(self, unit: int) -> bool: ...


class _Held(Protocol):
    def __call__(self) -> Collection[int]: ...


class CollectiveExecutor:
    """The `Executor` of one model, made of a function that starts reductions and of gathers.

    Its methods are those of the parts themselves, so that an operation costs no additional Python call.
    """

    def __init__(self, reduce: _OnUnit, gathers: Gathers | None = None) -> None:
        gathers = gathers or NoGathers()
        self.run_reduce: _OnUnit = reduce
        self.run_gather: _OnUnit = gathers.run_gather
        self.discard: _OnUnit = gathers.discard
        self.holds: _AskUnit = gathers.holds
        self.held: _Held = gathers.held
        self.waits_for: _AskUnit = gathers.waits_for
