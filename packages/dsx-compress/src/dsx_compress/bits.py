"""When a quantiser loses a bit (the schedule of Mixture of Quantisation).

The bits begin at `start`. After `period` steps one bit is removed, and the period doubles. With eigenvalues the period
is also multiplied by 1 + floor(4 x eigenvalue), where the eigenvalue is in [0, 1], relative to the largest of all
blocks, so that blocks with large curvature stay precise for longer. This is repeated until `target` is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .errors import CompressionError

__all__ = ["BitSchedule", "period_factor"]


def period_factor(eigenvalue: float) -> int:
    """1 + floor(4 x eigenvalue)."""
    if not 0.0 <= eigenvalue <= 1.0:
        raise CompressionError(
            f"eigenvalue: got {eigenvalue}, expected a number from 0 to 1, relative to the largest of all blocks"
        )
    return 1 + math.floor(4.0 * eigenvalue)


@dataclass
class BitSchedule:
    """Bits of one tensor over training.

    Attributes:
        start, target: bits at the start and at the end.
        period: steps until the first bit goes; 0: target from the start.
        bits: bits in use.
        next_at: step, counted from the beginning of quantisation, at which the next bit goes.
    """

    start: int
    target: int
    period: int
    bits: int = field(init=False)
    next_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.bits = self.start if self.period else self.target
        self.next_at = self.period

    def advance(self, steps: int, factor: int = 1) -> bool:
        """Take note that `steps` steps with quantisation are done; returns whether a bit went."""
        if self.bits <= self.target or steps < self.next_at:
            return False
        self.bits -= 1
        self.next_at *= 2 * factor
        return True

    def due(self, steps: int) -> bool:
        """Whether a bit goes when `steps` steps are done."""
        return self.bits > self.target and steps >= self.next_at

    def finish(self) -> None:
        """Go to the target."""
        self.bits = self.target

    def state_dict(self) -> dict[str, Any]:
        """Bits, and when the next goes."""
        return {"bits": self.bits, "next_at": self.next_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave.

        Raises:
            CompressionError: bits outside of this schedule.
        """
        bits, next_at = int(state["bits"]), int(state["next_at"])
        if not self.target <= bits <= self.start:
            raise CompressionError(
                f"saved bits: got {bits}, expected {self.target} to {self.start} as the configuration says; was the "
                "checkpoint written with another configuration?"
            )
        self.bits, self.next_at = bits, next_at
