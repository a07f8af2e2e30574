"""A record of what one step sent, and of what it would have sent without compression."""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import StepKind


@dataclass(frozen=True)
class StepTraffic:
    """One step of a compressed optimizer on one rank.

    Attributes:
        step: its number, counted from 1.
        kind: what was done.
        sent: bytes this rank sent for gradients and momenta, in an engine's reduction too.
        uncompressed: bytes that an exact step sends.
    """

    step: int
    kind: StepKind
    sent: float
    uncompressed: float

    def __str__(self) -> str:
        return f"step {self.step} ({self.kind.value}): sent {self.sent:.0f} B, uncompressed {self.uncompressed:.0f} B"
