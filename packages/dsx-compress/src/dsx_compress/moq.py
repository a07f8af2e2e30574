"""The optimizer's side of Mixture of Quantisation: quantise stored weights in place after each step.

It is for training loops with separate fp32 master weights and low-precision weights: the optimizer updates the
master weights, copies them to the weights, and `OptimizerQuantizer.step` quantises the weights. dsx does not need it:
its engine computes the quantised weights in the forward pass (`WeightQuantizer`), with the same result.

Stochastic rounding is drawn from the seed, the step and the tensor's name, so that all ranks write the same values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .bits import BitSchedule, period_factor
from .config import QuantizeTraining
from .errors import CompressionConfigError, CompressionError
from .quantizers import decode, encode

__all__ = ["OptimizerQuantizer"]


class OptimizerQuantizer:
    """Quantises weights in place; their number of bits falls during training.

    Args:
        named_parameters: names and low-precision weights. Weights of fewer than two dimensions are not quantised.
        config: the `quantize_training` section, as a model or a dictionary.
        seed: seed of stochastic rounding; it must be the same on all ranks.

    Raises:
        CompressionConfigError: the section is wrong or switched off.
        CompressionError: a weight is neither fp16 nor bf16. (An fp32 weight is its own master, so that quantising it in
            place would destroy it.) Or `quantize_groups` does not divide the number of a weight's elements.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]], config: Any, *, seed: int = 0) -> None:
        self.config = _section(config)
        bits, schedule = self.config.quantize_bits, self.config.quantize_schedule
        self._weights = {name: p for name, p in named_parameters if p.dim() > 1}
        for name, weight in self._weights.items():
            if weight.dtype not in (torch.float16, torch.bfloat16):
                raise CompressionError(
                    f"OptimizerQuantizer: {name} is {weight.dtype}, expected float16 or bfloat16 with masters apart;"
                    " for fp32 use init_compression with quantize_weight_in_forward"
                )
            if weight.numel() % self.config.quantize_groups:
                raise CompressionError(
                    f"quantize_groups: {self.config.quantize_groups} does not divide the {weight.numel()} weights of"
                    f" {name}"
                )
        self._schedules = {
            name: BitSchedule(bits.start_bits, bits.target_bits, schedule.quantize_period) for name in self._weights
        }
        self._seed, self._steps, self._ratio = seed, 0, 1.0

    @property
    def bits(self) -> dict[str, int]:
        """The bits of every weight, by name."""
        return {name: schedule.bits for name, schedule in self._schedules.items()}

    @property
    def ratio(self) -> float:
        """Fraction of the full-precision weight in the mixture. It falls from 1 to 0 and never rises."""
        return self._ratio if self.config.fp16_mixed_quantize.enabled else 0.0

    def needs_eigenvalues(self) -> bool:
        """Whether the next step may remove a bit from a weight, so that it needs eigenvalues."""
        coming = self._steps + 1 - self.config.quantize_schedule.schedule_offset
        return any(schedule.due(coming) for schedule in self._schedules.values())

    @torch.no_grad()
    def step(self, overflow: bool = False, eigenvalues: Mapping[str, float] | None = None) -> None:
        """Quantise the weights that the optimizer has just written.

        Args:
            overflow: the optimizer skipped this step. Then nothing is counted or written.
            eigenvalues: relative eigenvalue, 0 to 1, by the name of a parameter or of a module that holds it.
        """
        if overflow:
            return
        self._steps += 1
        counted = self._steps - self.config.quantize_schedule.schedule_offset
        if counted < 0:
            return
        if counted > 0:
            self._ratio = max(0.0, self._ratio - self.config.fp16_mixed_quantize.quantize_change_ratio)
        for name, weight in self._weights.items():
            self._schedules[name].advance(counted, _period_factor_of(name, eigenvalues or {}))
            weight.copy_(self._quantized(name, weight))

    def _quantized(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        how, generator = self.config.quantize_algo, None
        bits = self._schedules[name].bits
        if how.rounding == "stochastic" and bits > 2:
            generator = torch.Generator(weight.device)
            generator.manual_seed(zlib.crc32(f"{self._seed}/{self._steps}/{name}".encode()))
        encoded = encode(weight, bits, self.config.quantize_groups, how.q_type if bits > 2 else "symmetric",
                         how.rounding, generator)  # fmt: skip
        quantized = decode(encoded).view(weight.shape)
        return torch.lerp(quantized, weight.to(quantized.dtype), self.ratio) if self.ratio else quantized

    def state_dict(self) -> dict[str, Any]:
        """The steps, the mixture and the bits, as plain numbers."""
        return {
            "steps": self._steps,
            "ratio": self._ratio,
            "schedules": {name: schedule.state_dict() for name, schedule in self._schedules.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            CompressionError: the state belongs to another model.
        """
        if set(state["schedules"]) != set(self._schedules):
            odd = sorted(set(state["schedules"]) ^ set(self._schedules))
            raise CompressionError(f"load_state_dict: the saved weights differ from the model's: {odd[:5]}")
        for name, schedule in self._schedules.items():
            schedule.load_state_dict(state["schedules"][name])
        self._steps, self._ratio = int(state["steps"]), float(state["ratio"])


def _section(config: Any) -> QuantizeTraining:
    if isinstance(config, Mapping):
        from pydantic import ValidationError

        inner = config.get("quantize_training", config)
        try:
            config = QuantizeTraining.model_validate(dict(inner))
        except ValidationError as error:
            raise CompressionConfigError(f"quantize_training: {error}") from None
    if not isinstance(config, QuantizeTraining):
        raise CompressionConfigError(f"quantize_training: got {type(config).__name__}, expected a dictionary")
    if not config.enabled:
        raise CompressionConfigError("quantize_training.enabled: got false, expected true")
    return config


def _period_factor_of(name: str, eigenvalues: Mapping[str, float]) -> int:
    return next(
        (period_factor(v) for block, v in eigenvalues.items() if name == block or name.startswith(block + ".")), 1
    )
