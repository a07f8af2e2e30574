"""The loss scale under the names that DeepSpeed's scalers and `loss_scale_config` have."""

from __future__ import annotations

from typing import Any

from dsx.loss_scaler import DynamicScale, LossScale

__all__ = ["LossScaleView"]


class LossScaleView:
    """The values of a dsx loss scale under DeepSpeed's names. It is read when it is asked for.

    Args:
        scale: the loss scale of an engine.
    """

    scale_factor = 2.0

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    @property
    def cur_scale(self) -> float:
        """The factor on the loss of the next backward."""
        return self._scale.scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if not isinstance(self._scale, DynamicScale):
            raise AttributeError("cur_scale: got a constant loss scale; set fp16.loss_scale in the configuration")
        self._scale.load_state_dict({"scale": value})

    @property
    def loss_scale(self) -> float:
        """The same as `cur_scale`."""
        return self._scale.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return isinstance(self._scale, DynamicScale)

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether the loss is scaled at all."""
        return self._scale.checks_overflow

    @property
    def cur_iter(self) -> int:
        """Number of steps so far; 0 for a constant scale."""
        return self._state("step", 0)

    @property
    def last_overflow_iter(self) -> int:
        """The last step whose gradients were not finite; -1: none so far."""
        return self._state("last_overflow", -1)

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale is halved."""
        return self._state("hysteresis_left", 1)

    @property
    def scale_window(self) -> int:
        """Good steps between two doublings."""
        return self._rule("window")

    @property
    def delayed_shift(self) -> int:
        """Overflows until the scale is halved, at the start."""
        return self._rule("hysteresis")

    @property
    def consecutive_hysteresis(self) -> bool:
        """Whether a good step sets the hysteresis back."""
        return self._rule("consecutive_hysteresis")

    @property
    def min_scale(self) -> float:
        """The lower bound of the scale."""
        return self._rule("min_scale")

    min_loss_scale = min_scale

    def _state(self, name: str, otherwise: int) -> int:
        return self._scale.state_dict().get(name, otherwise)

    def _rule(self, name: str) -> Any:
        if not isinstance(self._scale, DynamicScale):
            raise AttributeError(f"a constant loss scale has no {name}")
        return getattr(self._scale, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scale.state_dict()})"
