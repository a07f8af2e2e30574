"""The simplest order of reductions: from the last unit to the first, each when it and all before it in that order are complete.

It needs no agreement, because it does not depend on what a rank executes; a unit that is late holds up those behind it.
Used at stages 0-2, where the order of definition is close to the order of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dsx_comm
import torch

__all__ = ["InOrder"]


class InOrder:
    """Canonical order of reductions over `units` (indices of the units that reduce).

    Every rank has to run the same number of reducing backwards between two boundaries; a rank that has run none takes part at
    its boundary.
    """

    def __init__(self, units: Sequence[int], *, control_group: Any, world_size: int) -> None:
        self._sequence = sorted(units, reverse=True)
        self._control_group, self._world_size = control_group, world_size
        self._execute: Callable[[int], None] | None = None
        self._ready: set[int] = set()
        self._next = 0
        self._passes = 0

    def bind(self, execute: Callable[[int], None]) -> None:
        """See `ReduceOrder.bind`."""
        self._execute = execute

    def reduce(self, unit: int) -> None:
        """Execute what has become possible."""
        self._ready.add(unit)
        while self._next < len(self._sequence) and self._sequence[self._next] in self._ready:
            self._run(self._sequence[self._next])

    def end_backward(self) -> None:
        """Execute the rest, complete or not."""
        while self._next < len(self._sequence):
            self._run(self._sequence[self._next])
        self._next = 0
        self._ready.clear()
        self._passes += 1

    def boundary(self, pending: Callable[[], Sequence[int]]) -> None:
        """Execute the union, over the ranks, of the pending units: one host all-reduce of a bit per unit."""
        if not self._passes:
            self.end_backward()
        self._passes = 0
        for unit in self._agree(pending()):
            self._run(unit)
        self._next = 0

    def _agree(self, units: Sequence[int]) -> list[int]:
        if self._world_size == 1:
            return sorted(units, reverse=True)
        bits = torch.zeros(len(self._sequence), dtype=torch.uint8)
        for unit in units:
            bits[self._sequence.index(unit)] = 1
        dsx_comm.all_reduce(bits, op=dsx_comm.ReduceOp.MAX, group=self._control_group)
        return [unit for unit, bit in zip(self._sequence, bits.tolist()) if bit]

    def _run(self, unit: int) -> None:
        if self._execute is None:
            raise RuntimeError("an order was used before it was bound")
        self._next += 1
        self._execute(unit)
