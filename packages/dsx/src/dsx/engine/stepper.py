"""The update: unscale, check, clip, step, drop the gradients, adapt the loss scale.

The sharded optimizer does the arithmetic; this module fixes the order and the scale. Gradients are divided by the loss
scale of their backward, times the scale of weighted micro-batches. The scaler is told the outcome afterwards, so that
the step at which the scale grows is not divided by the new value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .errors import EngineError


class StepOutcome(Protocol):
    """The result of a sharded optimizer's step."""

    @property
    def overflow(self) -> bool: ...

    @property
    def grad_norm(self) -> float | None: ...


class LossScaler(Protocol):
    """State machine of the loss scale (`dsx.loss_scaler`). Without scaling the scale is always 1.0."""

    @property
    def scale(self) -> float: ...

    def update(self, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stepper(Protocol):
    """Does one update; the engine calls it at each accumulation boundary."""

    def before_last_backward(self) -> None: ...

    def step(self) -> StepOutcome: ...


class ShardedStepper:
    """Updates through a `dsx_zero.ZeroOptimizer`.

    Args:
        optimizer: the sharded optimizer.
        scaler: the loss scale.
        max_norm: clip the global L2 norm of the gradients to this; None: no clipping.
        gradient_scale: returns the factor by which gradients are too large, besides the loss scale
            (`Batches.gradient_scale`).
        known_before: the gradient scale and the learning rates are known before the last backward of an update.
        steps: returns how many updates are over.
    """

    def __init__(
        self, optimizer: Any, scaler: LossScaler, max_norm: float | None,
        gradient_scale: Callable[[], float] = lambda: 1.0, *, known_before: bool = False,
        steps: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._scaler, self._max_norm = optimizer, scaler, max_norm
        self._gradient_scale, self._steps = gradient_scale, steps
        self._announces = known_before

    def before_last_backward(self) -> None:
        """Called before the last backward of an update. Units may be stepped during it, if everything but the norm is
        known before.
        """
        if self._announces:
            scale = self._scaler.scale * self._gradient_scale()
            self._optimizer.step_during_backward(grad_scale=scale, max_norm=self._max_norm)

    def step(self) -> StepOutcome:
        """Do one update. On overflow only the loss scale changes, and the gradients are dropped."""
        if self._steps is not None:
            self._optimizer.steps_done = self._steps()
        scale = self._scaler.scale * self._gradient_scale()
        outcome = self._optimizer.step(grad_scale=scale, max_norm=self._max_norm)
        self._optimizer.zero_grad()
        self._scaler.update(outcome.overflow)
        return outcome


class NoStepper:
    """The stepper of an engine without an optimizer."""

    def before_last_backward(self) -> None:
        """Does nothing; `step` raises."""

    def step(self) -> StepOutcome:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "step(): this engine has no optimizer; pass optimizer=... to dsx.initialize or set optimizer.type in the"
            " config"
        )
