"""The sections of `compression_training`, one for each method, and the kinds of values that they have.

The documents that consist of them, and the reading of a configuration, are in `config`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "ActivationQuantization", "Bits", "Count", "HeadPruning", "LayerReduction", "MixedQuantize", "Section", "Size",
    "SparsePruning", "StructuredPruning", "Toggle", "WeightQuantization", "check_low_bits", "nested",
]  # fmt: skip


def _without_fraction(value: Any) -> Any:
    """Let 1e3 through as 1000, as JSON written by hand has it; the strict check judges the rest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_without_fraction)]
Count = Annotated[_Int, Field(ge=1)]
Size = Annotated[_Int, Field(ge=0)]
Bits = Annotated[_Int, Field(ge=1, le=16)]
_Kept = Annotated[float, Field(gt=0.0, le=1.0)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class Toggle(Section):
    enabled: bool = Field(False, description="switches the section on")


def nested(model: Any, description: str) -> Any:
    """A field that holds a section and is that section's defaults when it is not given."""
    return Field(default_factory=model, description=description)


class _Group(Section):
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


class MixedQuantize(Toggle):
    """A mixture of the full-precision and the quantised weight."""

    quantize_change_ratio: _Share = Field(
        0.001, description="how much the fraction of the full-precision weight falls with each step"
    )


class LayerReduction(Toggle):
    """A student with fewer layers than its teacher."""

    keep_number_layer: Count | None = Field(None, description="number of layers of the student")
    module_name_prefix: str = Field("", description="path of the list of layers, such as bert.encoder.layer")
    teacher_layer: list[Size] = Field(
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


class WeightQuantizationShared(Toggle):
    """Settings of all weight-quantisation groups."""

    quantizer_kernel: bool = Field(False, description="accepted for old files; the arithmetic has one implementation")
    schedule_offset: Size = Field(0, description="number of steps after which it begins")
    quantize_groups: Count = Field(
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
    fp16_mixed_quantize: MixedQuantize = nested(MixedQuantize, "mixture of full-precision and quantised weight")


class WeightQuantizationParams(Section):
    """Settings of one group."""

    start_bits: Bits = Field(8, description="bits at the start; 2 is ternary, 1 is binary")
    target_bits: Bits = Field(8, description="bits at the end")
    quantization_period: Size = Field(
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

    params: WeightQuantizationParams = nested(WeightQuantizationParams, "settings of this group")


def check_low_bits(quantization_type: str, rounding: str, start: int, target: int) -> None:
    if target <= 2 and quantization_type == "asymmetric":
        raise ValueError(
            f"quantization_type asymmetric with target_bits {target}: binary and ternary weights are symmetric; "
            "set symmetric, or 3 bits or more"
        )
    if start <= 2 and rounding == "stochastic":
        raise ValueError(
            f"rounding stochastic with start_bits {start}: binary and ternary weights are not rounded; set nearest"
        )


class WeightQuantization(Section):
    """Quantised weights."""

    shared_parameters: WeightQuantizationShared = nested(WeightQuantizationShared, "settings of all groups")
    different_groups: dict[str, WeightQuantizationGroup] = Field(default_factory=dict, description="groups by name")

    @model_validator(mode="after")
    def _low_bits(self) -> WeightQuantization:
        shared = self.shared_parameters
        for group in self.different_groups.values():
            bits = group.params
            check_low_bits(shared.quantization_type, shared.rounding, bits.start_bits, bits.target_bits)
        return self


class ActivationQuantizationShared(Toggle):
    """Settings of all activation-quantisation groups."""

    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="kind of quantiser")
    range_calibration: Literal["static", "dynamic"] = Field(
        "static", description="static: one running range from training; dynamic: the range of each token or image"
    )
    schedule_offset: Size = Field(0, description="number of steps after which it begins")


class ActivationQuantizationParams(Section):
    """Settings of one group."""

    bits: Annotated[_Int, Field(ge=4, le=16)] = Field(8, description="number of bits")


class ActivationQuantizationGroup(_GroupAlone):
    """One group of modules."""

    params: ActivationQuantizationParams = nested(ActivationQuantizationParams, "settings of this group")


class ActivationQuantization(Section):
    """Quantised inputs of layers."""

    shared_parameters: ActivationQuantizationShared = nested(ActivationQuantizationShared, "settings of all groups")
    different_groups: dict[str, ActivationQuantizationGroup] = Field(default_factory=dict, description="groups by name")


class PruningParams(Section):
    """Settings of one group."""

    dense_ratio: _Kept = Field(0.5, description="fraction of the elements that is kept")


class SparsePruningGroup(_GroupAlone):
    """One group of modules."""

    params: PruningParams = nested(PruningParams, "settings of this group")


class PruningGroup(_Group):
    """One group of modules whose shapes shrink."""

    params: PruningParams = nested(PruningParams, "settings of this group")


_BLOCKS = re.compile(r"[1-9]\d*x[1-9]\d*|[1-9]\d*:[1-9]\d*")


class SparsePruningShared(Toggle):
    """Settings of all sparse-pruning groups."""

    schedule_offset: Size = Field(0, description="number of steps after which it begins")
    schedule_offset_end: Size | None = Field(
        None, description="step at which the final sparsity is reached (snip_momentum); null: schedule_offset"
    )
    schedule_offset_stride: Count = Field(1, description="steps between two prunings (snip_momentum)")
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


class SparsePruning(Section):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = nested(SparsePruningShared, "settings of all groups")
    different_groups: dict[str, SparsePruningGroup] = Field(default_factory=dict, description="groups by name")


class StructuredPruningShared(Toggle):
    """Settings of all row- or channel-pruning groups."""

    schedule_offset: Size = Field(0, description="number of steps after which it begins")
    method: Literal["l1", "topk"] = Field(
        "l1", description="l1: keep the rows with the largest L1 norm; topk: keep those with the largest learnt scores"
    )


class StructuredPruning(Section):
    """Pruning of rows or channels."""

    shared_parameters: StructuredPruningShared = nested(StructuredPruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class HeadPruningShared(Toggle):
    """Settings of all head-pruning groups."""

    schedule_offset: Size = Field(0, description="number of steps after which it begins")
    method: Literal["topk"] = Field("topk", description="topk: keep the heads with the largest learnt scores")
    num_heads: Count | None = Field(None, description="number of attention heads of a layer")

    @model_validator(mode="after")
    def _has_heads(self) -> HeadPruningShared:
        if self.enabled and self.num_heads is None:
            raise ValueError("num_heads: missing; say how many attention heads the layers have")
        return self


class HeadPruning(Section):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = nested(HeadPruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")
