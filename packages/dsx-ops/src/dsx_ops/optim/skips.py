"""Steps that the device decides to skip, without the host knowing.

After an overflow nothing may change, and the step must not count, or the bias corrections would run ahead. The host
counts every step; the device counts those it skipped, and subtracts. `settle` brings the two together; it waits for the
device, and is called where numbers leave the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec import Batch, Guard


class SkipCounter:
    """Counts skipped steps of one set of parameters, on their device."""

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._skipped: Tensor | None = None

    def fits(self, states: list[dict[str, Any]]) -> bool:
        """Whether what was counted so far holds for just these states."""
        return self._skipped is None or [id(s) for s in self._states] == [id(s) for s in states]

    def arm(self, batches: list[Batch], states: list[dict[str, Any]], found_inf: Tensor) -> None:
        """Make the batches depend on `found_inf`, one number on their device (not 0 = skip)."""
        self._states = states
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=found_inf.device)
        flag = found_inf.detach().reshape(()).to(torch.float32)
        for batch in batches:
            batch.guard = Guard(flag, self._skipped)

    def count(self, found_inf: Tensor) -> None:
        """To be called when the batches are under way."""
        if self._skipped is not None:
            self._skipped = self._skipped + (found_inf.detach().reshape(()) != 0)

    def settle(self) -> None:
        """Take the skipped steps off the counters of the states. Waits for the device."""
        if self._skipped is None:
            return
        skipped = int(self._skipped)
        for state in self._states:
            state["step"] -= skipped
        self._states, self._skipped = [], None
