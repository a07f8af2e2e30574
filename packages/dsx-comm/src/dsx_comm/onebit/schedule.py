"""The schedule of the compressed optimizers' steps, as arithmetic on counters.

    EXACT     gradients averaged in full precision; both moments move
    ONE_BIT   the gradient (0/1 Adam) or the momentum (1-bit Adam, 1-bit LAMB) averaged in one bit; the variance stays
    LOCAL     nothing is sent; every rank goes on by itself (0/1 Adam)
    SYNC      what the local steps have added up is averaged in one bit (0/1 Adam)

0/1 Adam (arXiv:2202.06009) has two intervals that grow. While the variance moves (steps up to `var_freeze_step`), step
t is EXACT if `var_interval` divides t, and the interval doubles after every `var_update_scaler` of those; other steps
are ONE_BIT. Afterwards step t is SYNC if `local_interval` divides t, else LOCAL, and that interval doubles every
`local_step_scaler` steps up to `local_step_clipper`. Steps count from 1.

A variance that is frozen keeps what noise it had: b2 = 0.95 averages some 20 squared gradients, and elements that
happened to be small make large steps for ever. `VarianceWindow` lets the last exact steps be averaged evenly instead.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import CommArgumentError


class StepKind(enum.Enum):
    """The kind of a step, by what it sends."""

    EXACT = "exact"
    ONE_BIT = "one_bit"
    LOCAL = "local"
    SYNC = "sync"


@dataclass(frozen=True)
class VarianceWindow:
    """In the k-th of the last `length` steps up to step `end`, v moves with max(b2, 1 - 1/k): it comes to be a plain
    mean.

    Without length every step has b2.
    """

    end: int = 0
    length: int = 0

    def beta2(self, beta2: float, step: int) -> float:
        """The decay of v in step `step`, counted from 1."""
        k = step - (self.end - self.length)
        return max(beta2, 1 - 1 / k) if 1 <= k <= self.length else beta2

    def rest(self, beta2: float, steps: int) -> float:
        """Share of v that is still its initial zero after `steps` steps: the product of their decays."""
        begin = self.end - self.length
        own = min(int(1 / (1 - beta2)), self.length)  # steps of the window in which b2 is the larger
        inside = min(steps - begin, self.length)
        if inside <= own:
            return beta2**steps
        return beta2 ** (begin + own + max(steps - self.end, 0)) * own / inside


EVERY_STEP_ALIKE = VarianceWindow()


@dataclass(frozen=True)
class ZeroOnePolicy:
    """The constants of 0/1 Adam's intervals."""

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CommArgumentError(f"{name}: got {value!r}, expected a whole number of at least 1")


@dataclass
class ZeroOneClock:
    """The position of a run of 0/1 Adam: `step` steps are done."""

    step: int = 0
    variance_steps: int = 0
    var_interval: int = 1
    var_counter: int = 0
    local_step_interval: int = 1
    local_step_counter: int = 0

    def coming(self, policy: ZeroOnePolicy) -> StepKind:
        """The kind of the next step."""
        step = self.step + 1
        if step <= policy.var_freeze_step:
            return StepKind.ONE_BIT if step % self.var_interval else StepKind.EXACT
        return StepKind.LOCAL if step % self.local_step_interval else StepKind.SYNC

    def advance(self, policy: ZeroOnePolicy) -> StepKind:
        """Do the next step's counting; returns what it was."""
        kind = self.coming(policy)
        self.step += 1
        if kind is StepKind.EXACT:
            self.variance_steps += 1
            self.var_counter += 1
            if self.var_counter == policy.var_update_scaler:
                self.var_counter, self.var_interval = 0, 2 * self.var_interval
        if self.step > policy.var_freeze_step:
            self.local_step_counter += 1
            if self.local_step_counter == policy.local_step_scaler:
                self.local_step_counter = 0
                self.local_step_interval = min(policy.local_step_clipper, 2 * self.local_step_interval)
        return kind

    def without_compression(self) -> StepKind:
        """Count a step that is exact because compression is off."""
        self.step += 1
        self.variance_steps += 1
        return StepKind.EXACT
