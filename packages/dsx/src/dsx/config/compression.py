"""The ``compression_training`` and ``quantize_training`` blocks.

Not available yet; modelled so that they are checked (see ``later.py``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from dsx_monitor.config import EigenvalueConfig
from pydantic import Field

from .base import Count, Probability, Section, Size, Toggle, nested

__all__ = ["CompressionTraining", "QuantizeTraining"]

Bits = Annotated[Count, Field(le=16)]
Modules = list[str]


class MixedQuantize(Toggle):
    """A mixture of the full-precision and the quantised weight."""

    quantize_change_ratio: Probability = Field(0.001, description="change of the mixture per step")


class LayerReduction(Toggle):
    """A student with fewer layers."""

    keep_number_layer: Count | None = Field(None, description="layers of the student")
    module_name_prefix: str = Field("", description="where the layers are")
    teacher_layer: list[int] = Field(default_factory=list, description="teacher's layer of every student's layer")
    other_module_name: Modules = Field(default_factory=list, description="further modules that are copied")


class WeightQuantizationShared(Toggle):
    """Settings of all weight-quantisation groups."""

    quantizer_kernel: bool = Field(False, description="use the fused kernel")
    schedule_offset: Size = Field(0, description="step at which it begins")
    quantize_groups: Count = Field(1, description="groups with a scale of their own")
    quantize_verbose: bool = Field(False, description="log")
    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="algorithm")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="rounding")
    quantize_weight_in_forward: bool = Field(False, description="quantise in forward instead of in the optimizer")
    fp16_mixed_quantize: MixedQuantize = nested(MixedQuantize, "mixture")


class WeightQuantizationParams(Section):
    """Settings of one group."""

    start_bits: Bits = Field(8, description="bits at the start")
    target_bits: Bits = Field(8, description="bits at the end")
    quantization_period: Size = Field(1, description="steps per bit; 0: from the first step at the target bits")


class WeightQuantizationGroup(Section):
    """One group of modules."""

    params: WeightQuantizationParams = nested(WeightQuantizationParams, "settings")
    modules: Modules | None = Field(None, description="patterns; null: all linear and convolution layers")
    related_modules: list[Modules] | None = Field(None, description="modules that follow")


class WeightQuantization(Section):
    """Quantised weights."""

    shared_parameters: WeightQuantizationShared = nested(WeightQuantizationShared, "shared")
    different_groups: dict[str, WeightQuantizationGroup] = Field(default_factory=dict, description="groups by name")


class ActivationQuantizationShared(Toggle):
    """Settings of all activation-quantisation groups."""

    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="algorithm")
    range_calibration: Literal["static", "dynamic"] = Field("static", description="how ranges are found")
    schedule_offset: Size = Field(0, description="step at which it begins")


class ActivationQuantizationParams(Section):
    """Settings of one group."""

    bits: Annotated[Bits, Field(ge=4)] = Field(8, description="bits")


class ActivationQuantizationGroup(Section):
    """One group of modules."""

    params: ActivationQuantizationParams = nested(ActivationQuantizationParams, "settings")
    modules: Modules | None = Field(None, description="patterns; null: all linear and convolution layers")
    related_modules: list[Modules] | None = Field(None, description="modules that follow")


class ActivationQuantization(Section):
    """Quantised activations."""

    shared_parameters: ActivationQuantizationShared = nested(ActivationQuantizationShared, "shared")
    different_groups: dict[str, ActivationQuantizationGroup] = Field(default_factory=dict, description="groups by name")


class PruningParams(Section):
    """Settings of one group."""

    dense_ratio: Probability = Field(0.5, description="fraction that is kept")


class PruningGroup(Section):
    """One group of modules."""

    params: PruningParams = nested(PruningParams, "settings")
    modules: Modules | None = Field(None, description="patterns; null: all layers of the kind")
    related_modules: list[Modules] | None = Field(None, description="modules whose inputs shrink with it")


class SparsePruningShared(Toggle):
    """Settings of all sparse-pruning groups."""

    schedule_offset: Size = Field(0, description="step at which it begins")
    schedule_offset_end: Size = Field(0, description="step at which it ends (snip_momentum)")
    schedule_offset_stride: Count = Field(1, description="steps between two prunings (snip_momentum)")
    method: Literal["l1", "topk", "snip_momentum"] = Field("l1", description="algorithm")
    block_pattern: str = Field("4x1", description="block shape (snip_momentum)")
    dense_ratio: Probability = Field(0.1, description="fraction that is kept (snip_momentum)")
    excluded_modules: Modules = Field(default_factory=list, description="modules left alone")


class SparsePruning(Section):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = nested(SparsePruningShared, "shared")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class StructuredPruningShared(Toggle):
    """Settings of all row- or channel-pruning groups."""

    schedule_offset: Size = Field(0, description="step at which it begins")
    method: Literal["l1", "topk"] = Field("l1", description="algorithm")


class StructuredPruning(Section):
    """Pruning of rows or channels."""

    shared_parameters: StructuredPruningShared = nested(StructuredPruningShared, "shared")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class HeadPruningShared(Toggle):
    """Settings of all head-pruning groups."""

    schedule_offset: Size = Field(0, description="step at which it begins")
    method: Literal["topk"] = Field("topk", description="algorithm")
    num_heads: Count | None = Field(None, description="number of attention heads")


class HeadPruning(Section):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = nested(HeadPruningShared, "shared")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="groups by name")


class CompressionTraining(Section):
    """Quantisation and pruning during training."""

    layer_reduction: LayerReduction = nested(LayerReduction, "fewer layers")
    weight_quantization: WeightQuantization = nested(WeightQuantization, "quantised weights")
    activation_quantization: ActivationQuantization = nested(ActivationQuantization, "quantised activations")
    sparse_pruning: SparsePruning = nested(SparsePruning, "pruned weights")
    row_pruning: StructuredPruning = nested(StructuredPruning, "pruned rows")
    head_pruning: HeadPruning = nested(HeadPruning, "pruned heads")
    channel_pruning: StructuredPruning = nested(StructuredPruning, "pruned channels")


class QuantizeBits(Section):
    """Bits at the start and at the end."""

    start_bits: Bits = Field(16, description="bits at the start")
    target_bits: Bits = Field(8, description="bits at the end")


class QuantizeSchedule(Section):
    """When a bit is taken away."""

    quantize_period: Count = Field(1000, description="steps until the next bit goes")
    schedule_offset: Size = Field(1000, description="step at which it begins")


class QuantizeAlgorithm(Section):
    """Algorithm of the quantiser."""

    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="algorithm")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="rounding")


class QuantizeTraining(Toggle):
    """Quantisation by the optimizer (legacy block of MoQ)."""

    quantize_verbose: bool = Field(False, description="log")
    quantizer_kernel: bool = Field(False, description="use the fused kernel")
    quantize_groups: Count = Field(1, description="groups with a scale of their own")
    quantize_bits: QuantizeBits = nested(QuantizeBits, "bits")
    quantize_schedule: QuantizeSchedule = nested(QuantizeSchedule, "schedule")
    quantize_algo: QuantizeAlgorithm = nested(QuantizeAlgorithm, "algorithm")
    fp16_mixed_quantize: MixedQuantize = nested(MixedQuantize, "mixture")
    eigenvalue: EigenvalueConfig = nested(EigenvalueConfig, "curvature for the schedule")
