"""Gradients as the optimizer asks for them (`Gradients`), and their questions to the object that scales losses
(`BackwardWatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import dsx_comm
import torch
from dsx_comm.lanes import Ticket

from ..homes.blocks import HostBlocks
from ..homes.home import Home
from ..order.protocol import EditWatch, RowSum
from ..params.flat import FlatGroup, Part
from ..plan.layout import LocalSlice
from .reductions import ReductionWatch

__all__ = ["BackwardWatch", "Gradients"]


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


class Gradients(Protocol):
    """The gradients as the optimizer uses them."""

    def no_sync(self) -> Any: ...

    def finish(
        self, squares: Callable[[], float] | None = None, meanwhile: Callable[[], object] | None = None
    ) -> float | None:
        """The optimizer steps now: complete every reduction. The sum over the ranks of `squares()`, which reads reduced
        gradients, or None where it has to be added up otherwise.

        `meanwhile()` reads reduced gradients too; it runs while the ranks exchange words, where they do. Its last call
        sees the gradients that the step uses.
        """
        ...

    def complete(self) -> None:
        """Between backward and step: reduce the gradients that have arrived so far.

        The first call after a backward is collective; further calls do nothing until the next backward.
        """
        ...

    def complete_due(self) -> None:
        """Call `complete` if the last backward reduces, and the order has left some of its reductions for the step
        (after a step without gradients, for example). Collective, as `complete`.
        """
        ...

    def watch_edits(self, watch: EditWatch) -> None:
        """From now on compare over the ranks, at each step, what users wrote into parameters."""
        ...

    def agree_by(self, row_sum: RowSum) -> None:
        """From the next step on the ranks agree by these sums. When rows are added up, this rank's gradients have been
        reduced as far as it knows.
        """
        ...

    def parts(
        self, group: FlatGroup, parts: Sequence[Part], blocks: HostBlocks | None = None, *, as_kept: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of these parts of the group's parameters, 1-D, in the dtype and on the device of the masters.

        Args:
            parts: in order of their offsets.
            blocks: memory for gradients that are kept in host memory, in another dtype than the masters'.
            as_kept: leave those in the dtype in which they are kept.
        """
        ...

    def norms(self) -> Iterator[tuple[dsx_comm.RankSet, torch.Tensor]]:
        """The L2 norms (0-dim, fp32 or fp64) of the buffers that together have every gradient that this rank steps,
        each once; and the ranks that share each buffer. A buffer is freed before the next one is read.
        """
        ...

    def read(self, group: FlatGroup, index: int, part: LocalSlice) -> torch.Tensor | None:
        """The reduced gradient of the part of a parameter that this rank steps, 1-D; None if there is none."""
        ...

    def write(self, group: FlatGroup, index: int, part: LocalSlice, values: torch.Tensor) -> None:
        """Set the gradient that `read` returns. If there is none, nothing happens."""
        ...

    def unreduced(self, group: FlatGroup, index: int) -> torch.Tensor | None:
        """This rank's own gradient of a parameter that no reduction has taken, in the parameter's shape; None if there
        is none.
        """
        ...

    def clear(self) -> None: ...

    def has_new(self) -> bool:
        """Whether there are gradients since the last step (or `clear`) that would be lost with this object."""
        ...

    def has_any(self) -> bool:
        """Whether there are gradients, stepped or not, that would be lost with this object."""
        ...

    def refuse_until_clear(self, why: str) -> None:
        """Earlier gradients are lost: refuse backwards, which would add to them, until `clear` is called.

        Args:
            why: text of the `ZeroStateError`.
        """
        ...

    def changed(self) -> None:
        """Note that gradients were written."""
        ...

    def follow(self, watch: BackwardWatch) -> None:
        """Multiply the gradients of each backward by the factor of `watch`. Call it again if `watch.needed` changes."""
        ...

    def remove_hooks(self) -> None: ...

    def tensors(self) -> list[torch.Tensor]: ...

    def homes(self) -> list[Home]:
        """The homes of reduced gradients."""
        ...

    def idle_bytes(self) -> int: ...

    def drop_idle(self) -> None:
        """Free the memory that is kept for the buffers of later backwards."""
        ...

    def expect_last(self) -> None:
        """Note that the next backward is the last one before the step."""
        ...

    def watch_reductions(self, watch: ReductionWatch) -> None:
        """Tell `watch` of every reduction from now on."""
        ...

    def reduced(self, unit: int) -> list[tuple[FlatGroup, Home, Ticket | None]]:
        """For each trainable group of a unit: the home of the reduced gradients, and the ticket to wait for before
        another thread reads them there.
        """
        ...

    def is_final(self, unit: int) -> bool:
        """Whether every trainable parameter of the unit has its gradient of the running backward, this backward is the
        last one before the step, and no further gradient can arrive on this rank.
        """
        ...

    def refuse_backwards(self, why: str | None) -> None:
        """Make backwards raise a `ZeroStateError` with this text; None: allow backwards again."""
        ...
