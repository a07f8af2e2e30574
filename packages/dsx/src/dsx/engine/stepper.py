"""The update itself: unscale, check, clip, step, forget the gradients, adapt the loss scale.

The arithmetic is the sharded optimizer's; this file fixes the order and the scale. The scale that divides the gradients
is the one their backward was done with, times that of weighted micro-batches; the scaler learns of the outcome
afterwards, so that the step at which the scale grows is not divided by the new value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .errors import EngineError


class StepOutcome(Protocol):
    """What a sharded optimizer says about a step."""

    @property
    def overflow(self) -> bool: ...

    @property
    def grad_norm(self) -> float | None: ...


class LossScaler(Protocol):
    """State machine of the loss scale (`dsx.loss_scaler`); scale 1.0 for ever where there is no scaling."""

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
        max_norm: clip the global L2 norm of the gradients to this; None to leave them.
        gradient_scale: how many times too large the gradients are besides the loss scale (`Batches.gradient_scale`).
        known_before: the gradient scale and the learning rates are known before the last backward of an update.
        steps: how many updates are over.
    """

    def __init__(
        self, optimizer: Any, scaler: LossScaler, max_norm: float | None,
        gradient_scale: Callable[[], float] = lambda: 1.0, *, known_before: bool = False,
        steps: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._scaler, self._max_norm = optimizer, scaler, max_norm
        self._gradient_scale, self._steps = gradient_scale, steps
        self._announces = known_before and not max_norm

    def before_last_backward(self) -> None:
        """The last backward of an update comes: units may be stepped during it where nothing has to be known first."""
        if self._announces:
            self._optimizer.step_during_backward(self._scaler.scale * self._gradient_scale())

    def step(self) -> StepOutcome:
        """One update. On overflow nothing but the loss scale changes, and the gradients are dropped."""
        if self._steps is not None:
            self._optimizer.steps_done = self._steps()
        scale = self._scaler.scale * self._gradient_scale()
        outcome = self._optimizer.step(grad_scale=scale, max_norm=self._max_norm)
        self._optimizer.zero_grad()
        self._scaler.update(outcome.overflow)
        return outcome


class NoStepper:
    """Stands where an engine was built without an optimizer."""

    def before_last_backward(self) -> None:
        """`step` says what is missing."""

    def step(self) -> StepOutcome:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "step(): this engine has no optimizer; pass optimizer=... to dsx.initialize or set optimizer.type in the"
            " config"
        )
