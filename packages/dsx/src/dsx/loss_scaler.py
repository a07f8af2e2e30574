"""Loss scales as pure state machines: a number, and how an overflow or a good step changes it.

The scale keeps small fp16 gradients from vanishing: the loss is multiplied by it before backward, and the gradients are
divided by it before the update. Both must use the same number. So the order of one step is: read ``scale`` for
backward, divide by that value, then call ``update(overflow)``. A scaler does not use tensors.

The rules of ``DynamicScale`` are the same in every ZeRO stage and without ZeRO. The scale S starts at 2^power; h starts
at the hysteresis; steps are numbered from 0; ``last`` is the number of the last overflow, and -1 at first.

* Overflow: if h is 1, S is halved, but not below the minimum. If S is at the minimum already, an error is raised,
  because the run cannot recover. If h is larger than 1, h is lowered by one and S stays.
* Good step: with ``consecutive_hysteresis`` h is set back to the hysteresis. If k = number - last - 1 is a positive
  multiple of the window, S doubles and h is set back. So the first doubling is at good step window + 1, and then every
  window steps.

There is no upper bound on S: it grows until gradients overflow and then steps back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .errors import DsxConfigError, LossScaleError, Problem

__all__ = ["DynamicScale", "LossScale", "NullScale", "StaticScale", "build_loss_scale", "load_loss_scale"]


class LossScale(Protocol):
    """The methods of a loss scale that the engine uses."""

    @property
    def scale(self) -> float:
        """The factor for backward. Gradients must be divided by the same value."""
        ...

    @property
    def checks_overflow(self) -> bool:
        """Whether steps with non-finite gradients are expected, and skipped."""
        ...

    def update(self, overflow: bool) -> None:
        """Tell whether the gradients of the step that just ended were non-finite."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same kind."""
        ...


class NullScale:
    """No scaling: fp32 and bf16 training."""

    scale = 1.0
    checks_overflow = False

    def update(self, overflow: bool) -> None:
        """Does nothing: there is no scale to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """Return the kind; there is no state."""
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept the state of any scale and ignore it: this run does not scale."""


class StaticScale:
    """A constant scale; overflowing steps are skipped but change nothing.

    Args:
        scale: the factor, greater than 0.
    """

    checks_overflow = True

    def __init__(self, scale: float) -> None:
        self._scale = _positive("fp16.loss_scale", scale)

    @property
    def scale(self) -> float:
        """The constant factor."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Does nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return kind and factor."""
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the configured factor: the configuration of this run overrides an older one."""


class DynamicScale:
    """A scale that halves on overflow and doubles after a window of good steps.

    Args:
        initial_power: the scale starts at 2 to this power.
        window: good steps between doublings.
        hysteresis: overflows until the scale is halved; 1: the first overflow halves it.
        consecutive_hysteresis: reset the hysteresis at every good step instead of at every doubling.
        min_scale: lower bound; an overflow there raises ``LossScaleError``.
    """

    checks_overflow = True

    def __init__(
        self,
        *,
        initial_power: int = 16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        self.window = int(_positive("fp16.loss_scale_window", window))
        self.hysteresis = int(_positive("fp16.hysteresis", hysteresis))
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = _positive("fp16.min_loss_scale", min_scale)
        self._scale = max(2.0**initial_power, self.min_scale)
        self._left = self.hysteresis
        self._step = 0
        self._last_overflow = -1

    @property
    def scale(self) -> float:
        """The factor of the current step."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Apply the rules to the step that just ended.

        Raises:
            LossScaleError: the gradients overflowed although the scale is at its minimum.
        """
        if overflow:
            self._overflow()
        else:
            self._good_step()
        self._step += 1

    def _overflow(self) -> None:
        if self._left > 1:
            self._left -= 1
        elif self._scale <= self.min_scale:
            raise LossScaleError(
                f"step {self._step}: gradients are not finite although the loss scale is at its minimum"
                f" {self.min_scale:g}. Expected finite gradients at the latest here. The model diverged or computes"
                " NaN: lower the learning rate, check the data, or train in bf16; fp16.min_loss_scale moves the bound."
            )
        else:
            self._scale = max(self._scale / 2.0, self.min_scale)
        self._last_overflow = self._step

    def _good_step(self) -> None:
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        since = self._step - self._last_overflow - 1
        if since > 0 and since % self.window == 0:
            self._scale *= 2.0
            if not self.consecutive_hysteresis:
                self._left = self.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return kind, scale, remaining hysteresis and counters."""
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "hysteresis_left": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load scale and counters from ``state``; window, hysteresis and minimum stay as configured for this run.

        From a run with another kind of scale only the scale is loaded, if it had one.
        """
        if "scale" in state:
            self._scale = max(float(state["scale"]), self.min_scale)
        if state.get("kind") != "dynamic":
            return
        self._left = min(int(state["hysteresis_left"]), self.hysteresis)
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])


def build_loss_scale(precision: Any, fp16: Any = None, amp: Any = None) -> LossScale:
    """Choose the scale that belongs to a precision record.

    Args:
        precision: a ``dsx.precision.Precision``; only fp16 computation is scaled.
        fp16: the ``fp16`` section (``loss_scale``, ``initial_scale_power``, ...), or None for its defaults.
        amp: the ``amp`` section if it asked for fp16; then its ``loss_scale`` and ``min_loss_scale`` are used.
    """
    if not precision.needs_loss_scale:
        return NullScale()
    if amp is not None and amp.enabled:
        if amp.loss_scale != "dynamic":
            return StaticScale(amp.loss_scale)
        return DynamicScale(min_scale=amp.min_loss_scale)
    if fp16 is None:
        return DynamicScale()
    if fp16.loss_scale > 0:
        return StaticScale(fp16.loss_scale)
    return DynamicScale(
        initial_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )


def load_loss_scale(state: Mapping[str, Any]) -> LossScale:
    """Build a scale from its state alone, with default rules; for tools that read a checkpoint."""
    kinds: dict[str, Any] = {
        "none": NullScale,
        "static": lambda: StaticScale(float(state["scale"])),
        "dynamic": DynamicScale,
    }
    scale: LossScale = kinds[state["kind"]]()
    scale.load_state_dict(state)
    return scale


def _positive(path: str, value: float) -> float:
    if not value > 0:
        raise DsxConfigError([Problem("value", path, "a number greater than 0 is needed", got=str(value))])
    return float(value)
