"""`Executor`: executes what an order of collectives decides: gathers (at stage 3) and reductions."""

from __future__ import annotations

from typing import Protocol

from ..errors import ZeroStateError

__all__ = ["CollectiveExecutor", "Executor", "Gathers", "NoGathers"]


class Gathers(Protocol):
    """The gathers of one model (`gather.executor.GatherExecutor`)."""

    def run_gather(self, unit: int) -> None:
        """Issue the gather of a unit and keep its result until it is used or discarded."""
        ...

    def discard(self, unit: int) -> None:
        """This rank passes by: the gathered unit is not needed here."""
        ...

    def holds(self, unit: int) -> bool:
        """Whether the unit is gathered here (or its gather is under way)."""
        ...

    def may_run_ahead(self, unit: int) -> bool:
        """Whether the unit may be gathered before it is needed."""
        ...


class Executor(Gathers, Protocol):
    """Executes operations. It is called in the same order on every rank, and must not ask the order for anything."""

    def run_reduce(self, unit: int) -> None:
        """Issue the reduction of a unit with the gradients this rank has for it now (zeros where there are none)."""
        ...


class NoGathers:
    """Stages 0-2: parameters are always whole."""

    def run_gather(self, unit: int) -> None:
        """Never asked for at these stages."""
        raise ZeroStateError(f"unit {unit} is whole at stages 0-2, there is nothing to gather")

    def discard(self, unit: int) -> None:
        """Whole units stay."""

    def holds(self, unit: int) -> bool:
        """They are always there."""
        return True

    def may_run_ahead(self, unit: int) -> bool:
        """There is nothing to gather."""
        return False


class _OnUnit(Protocol):
    def __call__(self, unit: int) -> None: ...


class _AskUnit(Protocol):
    def __call__(self, unit: int) -> bool: ...


class CollectiveExecutor:
    """The `Executor` of one model: `reduce` starts the reduction of a unit, `gathers` are the other half.

    Its operations are those of the halves themselves, so that none of them costs another call.
    """

    def __init__(self, reduce: _OnUnit, gathers: Gathers | None = None) -> None:
        half: Gathers = gathers or NoGathers()
        self.run_reduce: _OnUnit = reduce
        self.run_gather: _OnUnit = half.run_gather
        self.discard: _OnUnit = half.discard
        self.holds: _AskUnit = half.holds
        self.may_run_ahead: _AskUnit = half.may_run_ahead
