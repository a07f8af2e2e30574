"""The number of tokens that token-dropping layers process at each step, and a count of layer tokens.

A layer token is one token that passes through one layer.

    kept(t) = floor(min + (max - min) * t / require_steps), rounded down to a multiple of seq_per_step,
              at least min and at most max
    layer tokens of a step = batch * (kept * dropping layers + max * other layers)

The formulas are those of DeepSpeed's random-LTD.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import DataArgumentError

__all__ = ["RandomLTDScheduler"]


class RandomLTDScheduler:
    """The schedule of kept tokens. `convert_to_random_ltd(..., config=schedule)` gives it to the layers of a model.

    Args:
        config: the `random_ltd` section: a mapping, or an object with attributes.
        global_batch_size: samples per optimizer step; None: the section's `global_batch_size`, or 1.

    Raises:
        DataArgumentError: a number is missing, or numbers contradict each other.
    """

    def __init__(self, config: Any, *, global_batch_size: int | None = None) -> None:
        self.config = config
        schedule = _get(config, "random_ltd_schedule")
        steps = _get(schedule, "schedule_config")
        kind = _get(schedule, "schedule_type") or "fixed_linear"
        if kind != "fixed_linear":
            raise DataArgumentError(f"random_ltd_schedule.schedule_type: got {kind!r}, expected 'fixed_linear'")
        self.min_value = _number(schedule, "min_value", "random_ltd_schedule.min_value")
        self.max_value = _number(schedule, "max_value", "random_ltd_schedule.max_value")
        self.require_steps = _number(steps, "require_steps", "random_ltd_schedule.schedule_config.require_steps")
        self.seq_per_step = _number(steps, "seq_per_step", "random_ltd_schedule.schedule_config.seq_per_step")
        self.total_layers = _number(config, "total_layer_num", "random_ltd.total_layer_num")
        self.layer_ids = list(_get(config, "random_ltd_layer_id") or ())
        self._check(_get(config, "random_ltd_layer_num"))
        self.batch_size = global_batch_size or _get(config, "global_batch_size") or 1
        self.current_seq = self.min_value
        self.consumed_layer_tokens = 0
        self.current_step = -1  # as in DeepSpeed: no step has ended

    @property
    def model_layer_num(self) -> int:
        """Number of layers of the model; DeepSpeed's name of `total_layers`."""
        return self.total_layers

    @property
    def random_ltd_layer_num(self) -> int:
        """Number of layers that drop tokens."""
        return len(self.layer_ids)

    @property
    def state(self) -> Mapping[str, Any]:
        """The state under DeepSpeed's names, for reading: "min_value", "max_value", "current_value", "current_steps",
        "consumed_layer_tokens", "schedule_type" and "schedule_config".
        """
        return MappingProxyType({
            "min_value": self.min_value, "max_value": self.max_value, "current_value": self.current_seq,
            "current_steps": self.current_step, "consumed_layer_tokens": self.consumed_layer_tokens,
            "schedule_type": "fixed_linear",
            "schedule_config": MappingProxyType(
                {"require_steps": self.require_steps, "seq_per_step": self.seq_per_step}
            ),
        })  # fmt: skip

    def _check(self, count: int | None) -> None:
        if self.min_value > self.max_value:
            raise DataArgumentError(
                f"random_ltd_schedule: got min_value {self.min_value}, expected at most max_value, {self.max_value}"
            )
        wrong = [number for number in self.layer_ids if not 0 <= number < self.total_layers]
        if wrong or not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise DataArgumentError(
                f"random_ltd.random_ltd_layer_id: got {self.layer_ids}, expected different numbers from 0 to"
                f" {self.total_layers - 1}"
            )
        if count is not None and count != len(self.layer_ids):
            raise DataArgumentError(
                f"random_ltd.random_ltd_layer_num: got {count}, expected {len(self.layer_ids)}, the count of"
                " random_ltd_layer_id"
            )
        if _get(_get(self.config, "layer_token_lr_schedule") or {}, "enabled"):
            raise DataArgumentError(
                "random_ltd.layer_token_lr_schedule.enabled: got True, expected False: a learning rate by layer tokens"
                " is not available (DeepSpeed raises NotImplementedError); use a scheduler that counts steps"
            )

    def get_seq(self, global_steps: int) -> int:
        """Tokens per sequence that are kept at step `global_steps`."""
        span = self.max_value - self.min_value
        kept = self.min_value + span * global_steps // self.require_steps
        return max(self.min_value, min(kept - kept % self.seq_per_step, self.max_value))

    def get_current_seq(self) -> int:
        """Tokens per sequence that are kept at the current step."""
        return self.current_seq

    def get_random_ltd_layer_num(self) -> int:
        """Number of layers that drop tokens."""
        return len(self.layer_ids)

    def update_seq(self, global_steps: int) -> int:
        """End a step: count its layer tokens, and set and return the tokens kept at the next step, `global_steps`.

        A second call with the same number counts nothing.
        """
        if global_steps != self.current_step:
            self.consumed_layer_tokens += self.layer_tokens(self.current_seq)
        self.current_step = global_steps
        self.current_seq = self.get_seq(global_steps)
        return self.current_seq

    def layer_tokens(self, kept: int) -> int:
        """Layer tokens of one optimizer step over all ranks, if dropping layers keep `kept` tokens per sequence."""
        dropping = len(self.layer_ids)
        return self.batch_size * (kept * dropping + self.max_value * (self.total_layers - dropping))

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Layer tokens of the first `train_iters` steps."""
        return sum(self.layer_tokens(self.get_seq(step)) for step in range(train_iters))

    def state_dict(self) -> dict[str, Any]:
        """The tokens that are kept now, the layer tokens counted so far, and the number of the last step."""
        return {
            "current_seq": self.current_seq, "consumed_layer_tokens": self.consumed_layer_tokens,
            "current_step": self.current_step,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.current_seq = int(state["current_seq"])
        self.consumed_layer_tokens = int(state["consumed_layer_tokens"])
        self.current_step = int(state.get("current_step", -1))


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _number(config: Any, key: str, path: str) -> int:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataArgumentError(f"{path}: got {value!r}, expected a whole number of at least 1")
    return value
