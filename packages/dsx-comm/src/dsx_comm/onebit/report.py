"""A record of what one step sent, and of what it would have sent without compression."""

from __future__ import annotations

from dataclasses import dataclass

from .gate import Estimate
from .schedule import StepKind


@dataclass(frozen=True)
class StepTraffic:
    """One step of a compressed optimizer on one rank.

    Attributes:
        step: its number, counted from 1.
        kind: what was done.
        sent: bytes this rank sent for gradients and momenta, in an engine's reduction too.
        uncompressed: bytes that an exact step sends.
        estimate: what `compression="auto"` has measured; None with "on" and "off", and in a world of one.
    """

    step: int
    kind: StepKind
    sent: float
    uncompressed: float
    estimate: Estimate | None = None

    @property
    def gain_seconds(self) -> float | None:
        """Estimated time saved in this step; negative where compression costs. None without measurement."""
        if self.estimate is None or self.kind is StepKind.EXACT:
            return None if self.estimate is None else 0.0
        spent = 0.0 if self.kind is StepKind.LOCAL else self.estimate.compressed_seconds
        return self.estimate.exact_seconds - spent

    def __str__(self) -> str:
        gain = "" if self.gain_seconds is None else f", estimated gain {self.gain_seconds * 1e3:.2f} ms"
        return (
            f"step {self.step} ({self.kind.value}): sent {self.sent:.0f} B, uncompressed "
            f"{self.uncompressed:.0f} B{gain}"
        )
