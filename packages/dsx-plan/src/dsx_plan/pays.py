"""Does a setting that sends less save time? The step with it is planned, and the step without it.

There is no formula of its own: both steps are replayed, and the one cost model gives them times. So it counts what
computation hides, what quantising costs, and which link is the slow one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .configs import ONE_BIT, value_of, with_values
from .errors import explains_itself
from .plans import Change, Plan

__all__ = ["plans_without"]

_ZERO = "zero_optimization"

_SAVING: dict[str, dict[str, Any]] = {
    "zero_quantized_weights": {"zero_quantized_weights": False, "zero_quantized_weights_bits": None},
    "zero_quantized_nontrainable_weights": {"zero_quantized_nontrainable_weights": False},
    "zero_quantized_gradients": {
        "zero_quantized_gradients": False, "zero_quantized_error_feedback": None, "zeropp_loco_param": None,
    },
    "zero_hpz_partition_size": {"zero_hpz_partition_size": None},
    "mics_hierarchical_params_gather": {"mics_hierarchical_params_gather": False},
}  # fmt: skip
"""Settings of ZeRO++ and MiCS that change how much is sent where, each with what takes it away."""


def plans_without(answer: Plan, planned: Callable[[Mapping[str, Any], bool], Plan]) -> list[Change]:
    """For each setting of a plan that is there to send less: the plan without it.

    Args:
        answer: the plan.
        planned: (configuration, recomputation) -> its plan.

    Returns:
        A `Change` for each: `what` is the path of the setting, the numbers are those without it. A setting that others
        need cannot be taken away by itself, and is left out.
    """
    found = []
    for path, values in _asked_for(answer.config):
        try:
            other = planned(with_values(answer.config, values), bool(answer.layout["recompute"]))
        except Exception as error:
            if explains_itself(error):
                continue
            raise
        found.append(Change(path, values, other.peak_bytes, other.step_seconds))
    return found


def _asked_for(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, values in _SAVING.items():
        value = value_of(config, f"{_ZERO}.{name}")
        if value is True or (name == "zero_hpz_partition_size" and isinstance(value, int) and value > 1):
            found.append((f"{_ZERO}.{name}", {f"{_ZERO}.{key}": other for key, other in values.items()}))
    kind = value_of(config, "optimizer.type")
    if str(kind).lower() in ONE_BIT and value_of(config, "optimizer.params.compression") != "off":
        found.append((f"optimizer.type {kind}", {"optimizer.params.compression": "off"}))
    return found
