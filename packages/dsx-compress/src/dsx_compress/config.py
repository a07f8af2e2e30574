"""The `compression_training` and `quantize_training` sections, as frozen models that refuse unknown keys.

Keys and defaults are those of DeepSpeed's documentation. If its source has other defaults, the documented ones are used
(`schedule_offset` 0, static ranges of activations, `modules` means all layers). Combinations without a meaning are
refused here, so that no key is accepted without effect. Only code that reads a configuration imports this module,
because pydantic costs more than the rest of the package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from .errors import CompressionConfigError, near
from .sections import (
    ActivationQuantization,
    Bits,
    Count,
    HeadPruning,
    LayerReduction,
    MixedQuantize,
    Section,
    Size,
    SparsePruning,
    StructuredPruning,
    Toggle,
    WeightQuantization,
    check_low_bits,
    nested,
)  # fmt: skip

__all__ = ["METHODS", "CompressionTraining", "QuantizeTraining", "load_config"]

METHODS = (
    "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
    "channel_pruning",
)  # fmt: skip
"""The methods that change a model's layers; `layer_reduction` chooses layers instead."""


class CompressionTraining(Section):
    """Quantisation and pruning during training."""

    layer_reduction: LayerReduction = nested(LayerReduction, "a student with fewer layers than its teacher")
    weight_quantization: WeightQuantization = nested(WeightQuantization, "quantised weights")
    activation_quantization: ActivationQuantization = nested(ActivationQuantization, "quantised activations")
    sparse_pruning: SparsePruning = nested(SparsePruning, "pruned weights")
    row_pruning: StructuredPruning = nested(StructuredPruning, "pruned rows")
    head_pruning: HeadPruning = nested(HeadPruning, "pruned heads")
    channel_pruning: StructuredPruning = nested(StructuredPruning, "pruned channels")

    @model_validator(mode="after")
    def _have_groups(self) -> CompressionTraining:
        for name in METHODS:
            section = getattr(self, name)
            alone = getattr(section.shared_parameters, "method", "") == "snip_momentum"  # has no setting per group
            if section.shared_parameters.enabled and not section.different_groups and not alone:
                raise ValueError(f"{name}: enabled without different_groups, so nothing would change; add a group")
        return self

    def methods(self) -> list[str]:
        """The methods that are switched on and change layers."""
        return [name for name in METHODS if getattr(self, name).shared_parameters.enabled]

    @property
    def enabled(self) -> bool:
        """Whether anything is switched on."""
        return self.layer_reduction.enabled or bool(self.methods())


class QuantizeBits(Section):
    """Bits at the start and at the end."""

    start_bits: Bits = Field(16, description="bits at the start")
    target_bits: Bits = Field(8, description="bits at the end")


class QuantizeSchedule(Section):
    """The schedule by which quantization removes bits."""

    quantize_period: Count = Field(
        1000,
        description=(
            "step at which the first bit is removed; each further bit is removed at twice the step of the one before"
        ),
    )
    schedule_offset: Size = Field(1000, description="number of steps after which it begins")


class QuantizeAlgorithm(Section):
    """Algorithm of the quantiser."""

    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="kind of quantiser")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="how codes are rounded")


class QuantizeTraining(Toggle):
    """Mixture of Quantisation (MoQ): all weights of two dimensions or more lose their bits one by one."""

    quantize_verbose: bool = Field(False, description="log every change of the number of bits")
    quantizer_kernel: bool = Field(False, description="accepted for old files; the arithmetic has one implementation")
    quantize_groups: Count = Field(1, description="number of equal groups of a tensor; each group has its own scale")
    quantize_bits: QuantizeBits = nested(QuantizeBits, "number of bits")
    quantize_schedule: QuantizeSchedule = nested(QuantizeSchedule, "when bits are removed")
    quantize_algo: QuantizeAlgorithm = nested(QuantizeAlgorithm, "algorithm")
    fp16_mixed_quantize: MixedQuantize = nested(MixedQuantize, "mixture of full-precision and quantised weight")

    @model_validator(mode="after")
    def _bits_fit(self) -> QuantizeTraining:
        bits, algorithm = self.quantize_bits, self.quantize_algo
        if bits.start_bits < bits.target_bits:
            raise ValueError(f"start_bits {bits.start_bits} is below target_bits {bits.target_bits}; bits only fall")
        check_low_bits(algorithm.q_type, algorithm.rounding, bits.start_bits, bits.target_bits)
        return self

    def as_compression(self) -> CompressionTraining:
        """The same quantisation written as `compression_training`, over all layers."""
        bits, when, how = self.quantize_bits, self.quantize_schedule, self.quantize_algo
        shared = {
            "enabled": self.enabled,
            "schedule_offset": when.schedule_offset,
            "quantize_groups": self.quantize_groups,
            "quantize_verbose": self.quantize_verbose,
            "quantization_type": how.q_type,
            "rounding": how.rounding,
            "fp16_mixed_quantize": self.fp16_mixed_quantize,
        }
        params = {**bits.model_dump(), "quantization_period": when.quantize_period}
        groups = {"quantize_training": {"params": params}}
        section = {"shared_parameters": shared, "different_groups": groups}
        return CompressionTraining.model_validate({"weight_quantization": section})


def load_config(source: Any) -> CompressionTraining:
    """Read a configuration.

    Args:
        source: the section as a model or dictionary, a whole configuration (a dictionary that has the key
            `compression_training`), or the path of a JSON file with one of the two.

    Raises:
        CompressionConfigError: unknown keys, wrong values, or no such file; the text has the path of the key.
    """
    if isinstance(source, CompressionTraining):
        return source
    if isinstance(source, (str, os.PathLike)):
        source = _read(Path(source))
    if not isinstance(source, dict):
        raise CompressionConfigError(
            f"configuration: got {type(source).__name__}, expected a dictionary, a path, or a CompressionTraining"
        )
    section = source.get("compression_training", source)
    if section is source and source and not set(source) & set(CompressionTraining.model_fields):
        raise CompressionConfigError(
            f"configuration: got the keys {', '.join(map(repr, sorted(source)))}, expected compression_training or its"
            " methods"
            f" ({', '.join(CompressionTraining.model_fields)}){near(min(source), CompressionTraining.model_fields)}"
        )
    try:
        return CompressionTraining.model_validate(section)
    except ValidationError as error:
        raise CompressionConfigError(_explained(error)) from None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompressionConfigError(f"configuration: {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise CompressionConfigError(f"configuration: {path} is not JSON: {error}") from None


def _explained(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(["compression_training", *map(str, item["loc"])])
        if item["type"] == "extra_forbidden":
            known = _fields_at(item["loc"][:-1])
            lines.append(f"{path}: unknown key{near(str(item['loc'][-1]), known)}; known: {', '.join(known)}")
        else:
            got = "" if isinstance(item["input"], (dict, BaseModel)) else f" (got {item['input']!r})"
            lines.append(f"{path}: {item['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that the section at a location knows."""
    model: Any = CompressionTraining
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel):
            found: Any = model.model_fields[str(part)].annotation
        else:
            found = model.__args__[1]  # dict[str, Group]: the part is the group's name
        model = found
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
