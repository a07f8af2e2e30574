"""Those who are told of gradients: the object that scales losses (`BackwardWatch`), and whoever works beside the
reductions (`ReductionWatch`).
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["BackwardWatch", "ReductionWatch"]


class BackwardWatch(Protocol):
    """Lets the object that scales losses correct, or refuse, a backward whose loss was not scaled."""

    @property
    def needed(self) -> bool:
        """Whether the gradients of such a backward would be wrong at present."""
        ...

    def factor(self) -> float:
        """The factor for the gradients of the running backward; 0.0 if `begin` will refuse it."""
        ...

    def begin(self) -> float:
        """The first gradient of the running backward has arrived. Returns the factor; raises to refuse it."""
        ...


class ReductionWatch(Protocol):
    """Is told of the reductions of one model."""

    def begin_backward(self) -> None:
        """A backward begins. To refuse it, raise an error."""
        ...

    def started(self, unit: int) -> None:
        """The reduction of a unit was started. Calls come in the same order on every rank."""
        ...

    def finished(self, unit: int) -> None:
        """The reduction of a unit is complete: the reduced gradients are in their home, or are being copied to it."""
        ...
