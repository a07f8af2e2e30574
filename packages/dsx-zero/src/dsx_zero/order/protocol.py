"""`Order`: a rank reports its needs to it while it computes, so that all ranks execute the same collectives in the same
order.

`AgreedOrder` (`agreed`) is for several ranks; `NullOrder` executes every need immediately. `Channel` and
`EditWatch` are arguments of an `AgreedOrder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .executor import Executor
from .schedule import Pass

__all__ = ["Channel", "EditWatch", "NullOrder", "Order"]


class Order(Protocol):
    """What a rank tells while it computes."""

    def gather(self, unit: int, *, during: Pass = Pass.TRAINING) -> None:
        """This rank needs the unit now. On return its gather has been issued (or it is a use of a kept unit).

        In a pass whose order is known, the gathers that come next are issued too, as far as the executor allows.
        """
        ...

    def use(self, unit: int) -> None:
        """This rank uses the unit, which it holds already."""
        ...

    def reduce(self, unit: int) -> None:
        """This rank has complete gradients for the unit. They may be left pending, for ``boundary`` to ask for."""
        ...

    def end_forward(self, *, during: Pass = Pass.TRAINING) -> None:
        """The outermost forward ended."""
        ...

    def end_backward(self) -> None:
        """A backward ended."""
        ...

    def boundary(
        self, pending: Callable[[], Sequence[int]], squares: Callable[[], float] | None = None
    ) -> float | None:
        """The rank comes to its optimizer step. ``pending()`` gives the units whose gradients have not been reduced
        yet.

        Returns:
            The sum over the ranks of ``squares()``, which is asked for when this rank's gradients have been reduced;
            None without ``squares``, or where there is no other rank.
        """
        ...

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        """Between a backward and the step: all ranks reduce what is pending on any of them (``pending()`` as for
        ``boundary``).
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """At every boundary compare over the ranks what users wrote into parameters."""
        ...

    def join(self) -> None:
        """The rank has run its last forward without gradients; serve the others until all have."""
        ...

    def keeps(self, unit: int) -> bool:
        """Whether the unit's next use in this pass is meant to find it still gathered."""
        ...


class Channel(Protocol):
    """Carries words between the ranks."""

    rank: int

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The words of all ranks, by rank; returns when all have called it."""
        ...

    def post(self, words: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        """`exchange` without the wait: calling the result waits. Only then may the next words be sent."""
        ...


class EditWatch(Protocol):
    """What users wrote into parameters between two steps (``edits.EditAgreement``)."""

    def word(self) -> int:
        """A number below 2^31 that is the same on ranks that wrote the same."""
        ...

    def differ(self, words: Sequence[int]) -> bool:
        """Whether these words, by rank, say that ranks wrote differently what they hold alike. The same on all
        ranks.
        """
        ...

    def refuse(self) -> None:
        """The words differ. Collective; raises on every rank."""
        ...


class NullOrder:
    """One rank: every need is executed as it comes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def gather(self, unit: int, *, during: Pass = Pass.TRAINING) -> None:
        self._executor.run_gather(unit)

    def use(self, unit: int) -> None:
        """Nothing to keep count of."""

    def reduce(self, unit: int) -> None:
        self._executor.run_reduce(unit)

    def end_forward(self, *, during: Pass = Pass.TRAINING) -> None:
        """There is no rank to wait for."""

    def end_backward(self) -> None:
        """There is no rank to wait for."""

    def boundary(
        self, pending: Callable[[], Sequence[int]], squares: Callable[[], float] | None = None
    ) -> float | None:
        for unit in pending():
            self._executor.run_reduce(unit)
        return None

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        self.boundary(pending)

    def watch_edits(self, watch: EditWatch) -> None:
        """There is no rank to compare with."""

    def join(self) -> None:
        """There is no rank to serve."""

    def keeps(self, unit: int) -> bool:
        return False
