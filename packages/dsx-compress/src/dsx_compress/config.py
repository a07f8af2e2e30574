"""The `compression_training` and `quantize_training` sections, as frozen models that refuse unknown keys.

Keys and defaults are those of DeepSpeed's documentation. If its source has other defaults, the documented ones are used
(`schedule_offset` 0, static ranges of activations, `modules` means all layers). Combinations without a meaning are
refused here, so that no key is accepted without effect. Only code that reads a configuration imports this module,
because pydantic costs more than the rest of the package.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import CompressionConfigError, near

__all__ = ["METHODS", "CompressionTraining", "QuantizeTraining", "load_config"]

METHODS = (
    "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
    "channel_pruning",
)  # fmt: skip
"""The methods that change a model's layers; `layer_reduction` chooses layers instead."""


def _without_fraction(value: Any) -> Any:
    """Let 1e3 through as 1000, as JSON written by hand has it; the strict check judges the rest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_without_fraction)]
_Count = Annotated[_Int, Field(ge=1)]
_Size = Annotated[_Int, Field(ge=0)]
_Bits = Annotated[_Int, Field(ge=1, le=16)]
_Kept = Annotated[float, Field(gt=0.0, le=1.0)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class _Toggle(_Section):
    enabled: bool = Field(False, description="switches the section on")


def _nested(model: Any, description: str) -> Any:
    """A field that holds a section and is that section's defaults when it is not given."""
    return Field(default_factory=model, description=description)


class _Group(_Section):
    """A group of modules. `related_modules` has one list of patterns for each pattern of `modules`."""

    modules: list[str] | None = Field(None, description='patterns (re.search); null or ["*"]: all layers of the kind')
    related_modules: list[list[str]] | None = Field(
        None, description="for each pattern of `modules`: patterns of the modules that shrink together with its modules"
    )

    @field_validator("modules")
    @classmethod
    def _patterns(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and "*" in value:
            if len(value) > 1:
                raise ValueError('"*" means all layers and stands alone; leave out the other patterns, or "*"')
            return None  # DeepSpeed's own default, which is no regular expression
        if value == []:
            raise ValueError("an empty list selects nothing; leave the key out to select all layers")
        for pattern in value or ():
            _checked_pattern(pattern)
        return value

    @field_validator("related_modules")
    @classmethod
    def _related_patterns(cls, value: list[list[str]] | None) -> list[list[str]] | None:
        for patterns in value or ():
            for pattern in patterns:
                _checked_pattern(pattern)
        return value

    @model_validator(mode="after")
    def _related_fit(self) -> _Group:
        if self.related_modules is not None and len(self.related_modules) != len(self.modules or [""]):
            raise ValueError(
                f"related_modules: got {len(self.related_modules)} lists for {len(self.modules or [''])} patterns of "
                "modules, expected one list for each pattern"
            )
        return self


class _GroupAlone(_Group):
    """A group of a method that changes no shapes."""

    @field_validator("related_modules")
    @classmethod
    def _no_related(cls, value: list[list[str]] | None) -> list[list[str]] | None:
        if value:
            raise ValueError("this method changes no shapes, so no module is related; leave the key out")
        return value


def _checked_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


class MixedQuantize(_Toggle):
    """A mixture of the full-precision and the quantised weight."""

    quantize_change_ratio: _Share = Field(
        0.001, description="how much the fraction of the full-precision weight falls with each step"
    )


class LayerReduction(_Toggle):
    """A student with fewer layers than its teacher."""

    keep_number_layer: _Count | None = Field(None, description="number of layers of the student")
    module_name_prefix: str = Field("", description="path of the list of layers, such as bert.encoder.layer")
    teacher_layer: list[_Size] = Field(
        default_factory=list,
        description="for each layer of the student, the number of the teacher's layer it is copied from",
    )
    other_module_name: list[str] = Field(default_factory=list, description="names of other modules that are copied")

    @model_validator(mode="after")
    def _complete(self) -> LayerReduction:
        if self.enabled:
            if not self.module_name_prefix:
                raise ValueError("module_name_prefix: missing; name the list of layers, such as bert.encoder.layer")
            if not self.teacher_layer:
                raise ValueError("teacher_layer: missing; give the teacher's layer of every student's layer")
            if self.keep_number_layer is not None and self.keep_number_layer != len(self.teacher_layer):
                raise ValueError(
                    f"keep_number_layer: got {self.keep_number_layer}, but teacher_layer has "
                    f"{len(self.teacher_layer)} entries; both must say the same number"
                )
        return self


class WeightQuantizationShared(_Toggle):
    """Settings of all weight-quantisation groups."""

    quantizer_kernel: bool = Field(False, description="accepted for old files; the arithmetic has one implementation")
    schedule_offset: _Size = Field(0, description="number of steps after which it begins")
    quantize_groups: _Count = Field(
        1,
        description="number of equal groups of a tensor; each group has its own scale; embeddings have one per row",
    )
    quantize_verbose: bool = Field(False, description="log every change of the number of bits")
    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="kind of quantiser")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="how codes are rounded")
    quantize_weight_in_forward: bool = Field(
        False,
        description=(
            "both values compute the same: forward uses the quantised weight, the optimizer updates the"
            " full-precision one"
        ),
    )
    fp16_mixed_quantize: MixedQuantize = _nested(MixedQuantize, "mixture of full-precision and quantised weight")


class WeightQuantizationParams(_Section):
    """Settings of one group."""

    start_bits: _Bits = Field(8, description="bits at the start; 2 is ternary, 1 is binary")
    target_bits: _Bits = Field(8, description="bits at the end")
    quantization_period: _Size = Field(
        1,
        description=(
            "step at which the first bit is removed; each further bit is removed at twice the step of the"
            " one before; 0: target bits from the start"
        ),
    )

    @model_validator(mode="after")
    def _falls(self) -> WeightQuantizationParams:
        if self.start_bits < self.target_bits:
            raise ValueError(f"start_bits {self.start_bits} is below target_bits {self.target_bits}; bits only fall")
        return self


class WeightQuantizationGroup(_GroupAlone):
    """One group of modules."""

    params: WeightQuantizationParams = _nested(WeightQuantizationParams, "settings of this group")


def _check_low_bits(quantization_type: str, rounding: str, start: int, target: int) -> None:
    if target <= 2 and quantization_type == "asymmetric":
        raise ValueError(
            f"quantization_type asymmetric with target_bits {target}: binary and ternary weights are symmetric; "
            "set symmetric, or 3 bits or more"
        )
    if start <= 2 and rounding == "stochastic":
        raise ValueError(
            f"rounding stochastic with start_bits {start}: binary and ternary weights are not rounded; set nearest"
        )


class WeightQuantization(_Section):
    """Quantised weights."""

    shared_parameters: WeightQuantizationShared = _nested(WeightQuantizationShared, "settings of all groups")
    different_groups: dict[str, WeightQuantizationGroup] = Field(default_factory=dict, description="groups by name")

    @model_validator(mode="after")
    def _low_bits(self) -> WeightQuantization:
        shared = self.shared_parameters
        for group in self.different_groups.values():
            bits = group.params
            _check_low_bits(shared.quantization_type, shared.rounding, bits.start_bits, bits.target_bits)
        return self


class ActivationQuantizationShared(_Toggle):
    """Settings of all activation-quantisation groups."""

    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="kind of quantiser")
    range_calibration: Literal["static", "dynamic"] = Field(
        "static", description="static: one running range from training; dynamic: the range of each token or image"
    )
    schedule_offset: _Size = Field(0, description="number of steps after which it begins")


class ActivationQuantizationParams(_Section):
    """Settings of one group."""

    bits: Annotated[_Int, Field(ge=4, le=16)] = Field(8, description="number of bits")


class ActivationQuantizationGroup(_GroupAlone):
    """One group of modules."""

    params: ActivationQuantizationParams = _nested(ActivationQuantizationParams, "settings of this group")


class ActivationQuantization(_Section):
    """Quantised inputs of layers."""

    shared_parameters: ActivationQuantizationShared = _nested(ActivationQuantizationShared, "settings of all groups")
    different_groups: dict[str, ActivationQuantizationGroup] = Field(default_factory=dict, description="groups by name")


class PruningParams(_Section):
    """Settings of one group."""

    dense_ratio: _Kept = Field(0.5, description="fraction of the elements that is kept")


class SparsePruningGroup(_GroupAlone):
    """One group of modules."""

    params: PruningParams = _nested(PruningParams, "settings of this group")


class PruningGroup(_Group):
    """One group of modules whose shapes shrink."""

    params: PruningParams = _nested(PruningParams, "settings of this group")


_BLOCKS = re.compile(r"[1-9]\d*x[1-9]\d*|[1-9]\d*:[1-9]\d*")


class SparsePruningShared(_Toggle):
    """Settings of all sparse-pruning groups."""

    schedule_offset: _Size = Field(0, description="number of steps after which it begins")
    schedule_offset_end: _Size | None = Field(
        None, description="step at which the final sparsity is reached (snip_momentum); null: schedule_offset"
    )
    schedule_offset_stride: _Count = Field(1, description="steps between two prunings (snip_momentum)")
    method: Literal["l1", "topk", "snip_momentum"] = Field(
        "l1",
        description=(
            "l1: keep the largest weights; topk: keep those with the largest learnt scores; snip_momentum: prune blocks"
            " by |weight x gradient|"
        ),
    )
    block_pattern: str = Field(
        "4x1", description="rows x columns of a block, or N:M, which keeps N of M inputs (snip_momentum)"
    )
    dense_ratio: _Kept = Field(0.1, description="fraction of the weights that is kept (snip_momentum)")
    excluded_modules: list[str] = Field(default_factory=list, description="patterns of modules that are not pruned")

    @model_validator(mode="after")
    def _fits(self) -> SparsePruningShared:
        if not _BLOCKS.fullmatch(self.block_pattern):
            raise ValueError(f"block_pattern: got {self.block_pattern!r}, expected rows x columns (4x1), or N:M (2:4)")
        end = self.schedule_offset_end
        if end and end < self.schedule_offset:
            raise ValueError(f"schedule_offset_end {end} is before schedule_offset {self.schedule_offset}")
        for pattern in self.excluded_modules:
            _checked_pattern(pattern)
        if self.method != "snip_momentum":
            unread = {"block_pattern", "dense_ratio", "schedule_offset_stride"} & self.model_fields_set
            fields = type(self).model_fields
            changed = sorted(name for name in unread if getattr(self, name) != fields[name].default)
            if changed and self.enabled:
                raise ValueError(
                    f"{', '.join(changed)}: only method snip_momentum reads this, got method {self.method}"
                )
        if ":" in self.block_pattern:
            self._check_n_of_m()
        return self

    def _check_n_of_m(self) -> None:
        keep, of = map(int, self.block_pattern.split(":"))
        if keep > of:
            raise ValueError(f"block_pattern: {self.block_pattern} keeps more than there are")
        if "dense_ratio" in self.model_fields_set and abs(self.dense_ratio - keep / of) > 1e-9:
            raise ValueError(
                f"dense_ratio {self.dense_ratio} with block_pattern {self.block_pattern}, which keeps {keep / of:g}; "
                "leave dense_ratio out"
            )

    @property
    def end(self) -> int:
        """Step at which the final sparsity is reached."""
        return max(self.schedule_offset, self.schedule_offset_end or 0)


class SparsePruning(_Section):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = _nested(SparsePruningShared, "settings of all groups")
    different_groups: dict[str, SparsePruningGroup] = Field(default_factory=dict, description="groups by name")


class StructuredPruningShared(_Toggle):
    """Settings of all row- or channel-pruning groups."""

    schedule_offset: _Size = Field(0, description="number of steps after which it begins")
    method: Literal["l1", "topk"] = Field(
        "l1", description="l1: keep the rows with the largest L1 norm; topk: keep those with the largest learnt scores"
    )


class StructuredPruning(_Section):
    """Pruning of rows or channels."""

    shared_parameters: StructuredPruningShared = _nested(StructuredPruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class HeadPruningShared(_Toggle):
    """Settings of all head-pruning groups."""

    schedule_offset: _Size = Field(0, description="number of steps after which it begins")
    method: Literal["topk"] = Field("topk", description="topk: keep the heads with the largest learnt scores")
    num_heads: _Count | None = Field(None, description="number of attention heads of a layer")

    @model_validator(mode="after")
    def _has_heads(self) -> HeadPruningShared:
        if self.enabled and self.num_heads is None:
            raise ValueError("num_heads: missing; say how many attention heads the layers have")
        return self


class HeadPruning(_Section):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = _nested(HeadPruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class CompressionTraining(_Section):
    """Quantisation and pruning during training."""

    layer_reduction: LayerReduction = _nested(LayerReduction, "a student with fewer layers than its teacher")
    weight_quantization: WeightQuantization = _nested(WeightQuantization, "quantised weights")
    activation_quantization: ActivationQuantization = _nested(ActivationQuantization, "quantised activations")
    sparse_pruning: SparsePruning = _nested(SparsePruning, "pruned weights")
    row_pruning: StructuredPruning = _nested(StructuredPruning, "pruned rows")
    head_pruning: HeadPruning = _nested(HeadPruning, "pruned heads")
    channel_pruning: StructuredPruning = _nested(StructuredPruning, "pruned channels")

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


class QuantizeBits(_Section):
    """Bits at the start and at the end."""

    start_bits: _Bits = Field(16, description="bits at the start")
    target_bits: _Bits = Field(8, description="bits at the end")


class QuantizeSchedule(_Section):
    """The schedule by which quantization removes bits."""

    quantize_period: _Count = Field(
        1000,
        description=(
            "step at which the first bit is removed; each further bit is removed at twice the step of the one before"
        ),
    )
    schedule_offset: _Size = Field(1000, description="number of steps after which it begins")


class QuantizeAlgorithm(_Section):
    """Algorithm of the quantiser."""

    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="kind of quantiser")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="how codes are rounded")


class QuantizeTraining(_Toggle):
    """Mixture of Quantisation (MoQ): all weights of two dimensions or more lose their bits one by one."""

    quantize_verbose: bool = Field(False, description="log every change of the number of bits")
    quantizer_kernel: bool = Field(False, description="accepted for old files; the arithmetic has one implementation")
    quantize_groups: _Count = Field(1, description="number of equal groups of a tensor; each group has its own scale")
    quantize_bits: QuantizeBits = _nested(QuantizeBits, "number of bits")
    quantize_schedule: QuantizeSchedule = _nested(QuantizeSchedule, "when bits are removed")
    quantize_algo: QuantizeAlgorithm = _nested(QuantizeAlgorithm, "algorithm")
    fp16_mixed_quantize: MixedQuantize = _nested(MixedQuantize, "mixture of full-precision and quantised weight")

    @model_validator(mode="after")
    def _bits_fit(self) -> QuantizeTraining:
        bits, algorithm = self.quantize_bits, self.quantize_algo
        if bits.start_bits < bits.target_bits:
            raise ValueError(f"start_bits {bits.start_bits} is below target_bits {bits.target_bits}; bits only fall")
        _check_low_bits(algorithm.q_type, algorithm.rounding, bits.start_bits, bits.target_bits)
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
