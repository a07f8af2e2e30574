"""The bytes that steps send: those of one step as counted, and of a schedule in closed form.

A step that averages in full precision sends as many bits as the gradient's dtype has, each way; a step in one bit sends
one. So 1-bit Adam over T steps, a share w of them warm-up, sends w b + (1 - w) bits per parameter and step: 1 / (w + (1
- w) / b) times less than b-bit Adam. 0/1 Adam follows from counting its rounds. Both leave out the scales (4 bytes per
run and message) and the padding of chunks; `OneBitLayout.sent_bytes` has them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .schedule import StepKind, ZeroOneClock, ZeroOnePolicy


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


@dataclass(frozen=True)
class Rounds:
    """Numbers of steps of each kind."""

    exact: int
    one_bit: int
    local: int

    @property
    def steps(self) -> int:
        """All steps."""
        return self.exact + self.one_bit + self.local

    def bits_per_step(self, exact_bits: int = 16) -> float:
        """Mean bits per parameter and step, each way."""
        return (exact_bits * self.exact + self.one_bit) / self.steps

    def reduction(self, exact_bits: int = 16) -> float:
        """The factor by which it sends less than averaging in `exact_bits` bits every step."""
        return exact_bits / self.bits_per_step(exact_bits)

    def sent_bytes(self, numel: int, world_size: int, exact_bits: int = 16) -> float:
        """Bytes one rank sends for `numel` parameters among `world_size` ranks, without scales and padding."""
        return 2 * (world_size - 1) / world_size * numel / 8 * self.bits_per_step(exact_bits) * self.steps


def onebit_rounds(steps: int, freeze_step: int) -> Rounds:
    """Rounds of 1-bit Adam and 1-bit LAMB."""
    exact = min(steps, freeze_step)
    return Rounds(exact, steps - exact, 0)


def zero_one_rounds(steps: int, policy: ZeroOnePolicy) -> Rounds:
    """Rounds of 0/1 Adam."""
    clock = ZeroOneClock()
    kinds = Counter(clock.advance(policy) for _ in range(steps))
    return Rounds(kinds[StepKind.EXACT], kinds[StepKind.ONE_BIT] + kinds[StepKind.SYNC], kinds[StepKind.LOCAL])
