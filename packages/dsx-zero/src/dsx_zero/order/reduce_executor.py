"""What an order of collectives can have executed at stages 0-2: reductions only, because parameters are always
whole.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ReduceExecutor"]


class ReduceExecutor:
    """An `Executor` without gathers; `bind` completes the circle with the gradients, which need the order first."""

    def __init__(self) -> None:
        self._reduce: Callable[[int], None] | None = None

    def bind(self, reduce: Callable[[int], None]) -> None:
        """Set what starts a unit's reduction."""
        self._reduce = reduce

    def run_reduce(self, unit: int) -> None:
        """See `Executor`."""
        if self._reduce is None:
            raise RuntimeError("a reduction was asked for before gradients were bound")
        self._reduce(unit)

    def run_gather(self, unit: int) -> None:
        """Never asked for at these stages."""
        raise RuntimeError(f"unit {unit} is whole at stages 0-2, there is nothing to gather")

    def discard(self, unit: int) -> None:
        """Whole units stay."""

    def holds(self, unit: int) -> bool:
        """They are always there."""
        return True
