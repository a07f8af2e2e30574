"""The schedule by which a quantiser loses bits (Mixture of Quantisation).

The bits begin at `start`. The first bit is removed when `period` steps are done, the next one after 2 `period` steps,
then after 4 `period` steps, and so on until `target` is reached. With eigenvalues each doubling is also multiplied by
1 + floor(4 x eigenvalue). The eigenvalue is in [0, 1], relative to the largest of all blocks. So blocks with large
curvature stay precise for longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .errors import CompressionError

__all__ = ["BitSchedule", "period_factor"]


def period_factor(eigenvalue: float) -> int:
    """1 + floor(4 x eigenvalue).

    Raises:
        CompressionError: the eigenvalue is not in [0, 1].
    """
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
        period: steps until the first bit is removed; 0: `target` from the start.
        bits: bits now.
        next_at: step, counted from the beginning of quantisation, at which the next bit is removed.
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
        """Note that `steps` steps with quantisation are done. Returns whether a bit was removed."""
        if self.bits <= self.target or steps < self.next_at:
            return False
        self.bits -= 1
        self.next_at *= 2 * factor
        return True

    def due(self, steps: int) -> bool:
        """Whether a bit is removed when `steps` steps are done."""
        return self.bits > self.target and steps >= self.next_at

    def finish(self) -> None:
        """Set the bits to the target."""
        self.bits = self.target

    def state_dict(self) -> dict[str, Any]:
        """The bits, and the step at which the next one is removed."""
        return {"bits": self.bits, "next_at": self.next_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            CompressionError: the saved bits are outside of this schedule.
        """
        bits, next_at = int(state["bits"]), int(state["next_at"])
        if not self.target <= bits <= self.start:
            raise CompressionError(
                f"saved bits: got {bits}, expected {self.target} to {self.start} as the configuration says; was the "
                "checkpoint written with another configuration?"
            )
        self.bits, self.next_at = bits, next_at
