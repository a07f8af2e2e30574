"""`Order`: a rank reports its needs to it, and all ranks execute the same collectives in the same order.
`ReduceOrder` is the part of it that gradients use.

`AgreedOrder` (`agreed`) is for several ranks; `NullOrder` executes every need immediately. `Channel`, `EditWatch` and
`RowSum` are arguments of an `AgreedOrder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .executor import Executor
from .schedule import Pass

__all__ = ["Channel", "EditWatch", "NoRowSum", "NullOrder", "Order", "ReduceOrder", "RowSum"]


class ReduceOrder(Protocol):
    """Decides, equally on all ranks, when each unit is reduced."""

    def reduce(self, unit: int) -> None:
        """This rank has complete gradients for the unit. The order may leave their reduction to ``boundary``."""
        ...

    def end_backward(self) -> None:
        """A backward has ended."""
        ...

    def boundary(
        self,
        pending: Callable[[], Sequence[int]],
        squares: Callable[[], float] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> float | None:
        """The rank comes to its optimizer step. ``pending()`` gives the units whose gradients have not been reduced
        yet.

        ``meanwhile()`` is called when this rank's gradients have been reduced, while the words of the ranks are under
        way; again if gradients are reduced after that, and not where there is no other rank.

        Returns:
            The sum over the ranks of ``squares()``, which is asked for when this rank's gradients have been reduced;
            None without ``squares``, or where there is no other rank.
        """
        ...

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        """Between a backward and the step: all ranks reduce the units that are pending on any of them.

        ``pending()`` is that of ``boundary``.
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """From now on compare over the ranks, at every boundary, what users wrote into parameters."""
        ...

    def agree_by(self, row_sum: RowSum) -> None:
        """From the next step on agree by these sums at the boundary, wherever no rank needs more than is known."""
        ...


class Order(ReduceOrder, Protocol):
    """The calls by which a rank reports what it needs and what it has."""

    def gather(self, unit: int, *, during: Pass = Pass.TRAINING) -> None:
        """This rank needs the unit now. On return its gather has been issued, unless the unit is still gathered.

        In a pass whose order is known, the next gathers are issued too, as far as the executor allows.
        """
        ...

    def use(self, unit: int) -> None:
        """This rank uses the unit, which is gathered already."""
        ...

    def end_forward(self, *, during: Pass = Pass.TRAINING) -> None:
        """The outermost forward has ended."""
        ...

    def join(self) -> None:
        """This rank has run its last forward without gradients; it takes part in those of the others until all end."""
        ...

    def keeps(self, unit: int) -> bool:
        """Whether the unit must stay gathered until its next use in this pass."""
        ...


class Channel(Protocol):
    """Sends words between the ranks."""

    rank: int

    def exchange(self, words: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The words of all ranks, by rank. It returns when every rank has called it."""
        ...

    def post(self, words: tuple[int, ...]) -> Callable[[], list[tuple[int, ...]]]:
        """Start an `exchange`. Calling the result waits for the words; only after that may the next words be sent."""
        ...


class EditWatch(Protocol):
    """Summarises what users wrote into parameters between two steps (``edits.EditAgreement``)."""

    def word(self) -> int:
        """A number below 2^31. Ranks that wrote the same values have the same number."""
        ...

    def differ(self, words: Sequence[int]) -> bool:
        """Whether these words, by rank, say that ranks wrote different values into what they share.

        The answer is the same on all ranks.
        """
        ...

    def refuse(self) -> None:
        """Raise on every rank, because the words differ. Collective."""
        ...


class RowSum(Protocol):
    """Adds up one row of numbers of each rank. Every rank takes part once per step, by one of the two calls."""

    ranks: int
    """The number of ranks that take part; 0: rows cannot be added up."""

    def add_up(self, row: Sequence[float]) -> list[float]:
        """The sums over the ranks, exact in fp64. Waits for the ranks."""
        ...

    def take_part(self, row: Sequence[float]) -> None:
        """Have this row added to the sums of the other ranks, without waiting for them."""
        ...


class NoRowSum:
    """Nothing happens at a step that could carry rows."""

    ranks = 0

    def add_up(self, row: Sequence[float]) -> list[float]:
        """As if a rank declined."""
        return [1.0]

    def take_part(self, row: Sequence[float]) -> None:
        """Nothing to do: no other rank adds rows up."""


class NullOrder:
    """The order of one rank alone: every need is executed at once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def gather(self, unit: int, *, during: Pass = Pass.TRAINING) -> None:
        self._executor.run_gather(unit)

    def use(self, unit: int) -> None:
        """Nothing to do: no schedule counts uses."""

    def reduce(self, unit: int) -> None:
        self._executor.run_reduce(unit)

    def end_forward(self, *, during: Pass = Pass.TRAINING) -> None:
        """Nothing to do: there is no other rank to wait for."""

    def end_backward(self) -> None:
        """Nothing to do: there is no other rank to wait for."""

    def boundary(
        self,
        pending: Callable[[], Sequence[int]],
        squares: Callable[[], float] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> float | None:
        for unit in pending():
            self._executor.run_reduce(unit)
        return None

    def complete(self, pending: Callable[[], Sequence[int]]) -> None:
        self.boundary(pending)

    def watch_edits(self, watch: EditWatch) -> None:
        """Nothing to do: there is no other rank to compare with."""

    def agree_by(self, row_sum: RowSum) -> None:
        """Nothing to do: there is no other rank to agree with."""

    def join(self) -> None:
        """Nothing to do: there is no other rank."""

    def keeps(self, unit: int) -> bool:
        return False
