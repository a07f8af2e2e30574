"""The ``data_efficiency`` block: curriculum sampling, dynamic batching and random layer-token dropping.

Not available yet; modelled so that it is checked (see ``later.py``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Count, Int, Section, Size, Toggle, nested
from .later import CurriculumSchedule

__all__ = ["DataEfficiency"]


class CurriculumMetric(Section):
    """One difficulty metric of the curriculum sampler."""

    index_to_sample_path: str | None = Field(None, description="file with the samples of each difficulty")
    index_to_metric_path: str | None = Field(None, description="file with the difficulties")
    difficulty_type: Literal["value", "percentile"] | None = Field(None, description="unit of the difficulty")
    clustering_type: Literal["single_cluster", "schedule_based"] | None = Field(
        None, description="how samples are grouped"
    )
    min_difficulty: Int | None = Field(None, description="difficulty at the start")
    max_difficulty: Int | None = Field(None, description="difficulty at the end")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = Field(
        None, description="shape of the schedule"
    )
    schedule_config: CurriculumSchedule | None = Field(None, description="parameters of the schedule")


class SamplingCurriculum(Toggle):
    """Samples are drawn by difficulty."""

    data_cluster_path: str | None = Field(None, description="folder for the index of clusters")
    curriculum_metrics: dict[str, CurriculumMetric] = Field(default_factory=dict, description="metrics by name")


class DynamicBatching(Toggle):
    """Batches by number of tokens instead of samples."""

    metrics_path: str | None = Field(None, description="folder with the lengths of samples")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field("linear", description="learning rate by batch size")
    min_batch_size: Count = Field(1, description="smallest batch")
    max_batch_size: Count | None = Field(None, description="largest batch")
    max_tokens: Count | None = Field(None, description="tokens per batch")
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field(
        "dataloader", description="order of samples"
    )
    verbose: bool = Field(False, description="log the batches")


class DataSampling(Toggle):
    """Sampling techniques."""

    num_epochs: Count = Field(1000, description="largest number of passes over the data")
    num_workers: Size = Field(0, description="worker processes of the loader")
    pin_memory: bool = Field(False, description="loader uses pinned memory")
    curriculum_learning: SamplingCurriculum = nested(SamplingCurriculum, "curriculum")
    dynamic_batching: DynamicBatching = nested(DynamicBatching, "batches by tokens")


class LtdScheduleConfig(Section):
    """Parameters of the token schedule."""

    require_steps: Count | None = Field(None, description="steps until no token is dropped")
    seq_per_step: Count | None = Field(None, description="the length is a multiple of this")


class LtdSchedule(Section):
    """How many tokens pass the selected layers."""

    min_value: Count | None = Field(None, description="length at the start")
    max_value: Count | None = Field(None, description="length at the end")
    schedule_type: Literal["fixed_linear"] = Field("fixed_linear", description="shape of the schedule")
    schedule_config: LtdScheduleConfig | None = Field(None, description="parameters of the schedule")


class LayerTokenLrSchedule(Toggle):
    """Learning rate by layer tokens."""

    total_layer_tokens: Count | None = Field(None, description="layer tokens of the whole run")
    warmup_type: str | None = Field(None, description="shape of the warm-up")
    warmup_layer_tokens: Count | None = Field(None, description="layer tokens of the warm-up")


class RandomLtd(Toggle):
    """Random layer-token dropping."""

    total_layer_num: Count | None = Field(None, description="layers of the model")
    random_ltd_layer_num: Count | None = Field(None, description="layers that drop tokens")
    random_ltd_layer_id: list[int] | None = Field(None, description="which layers drop tokens")
    model_mask_name: str = Field("attention_mask", description="argument that carries the mask")
    model_type: Literal["decoder", "encoder"] = Field("decoder", description="kind of model")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = Field(
        "batch_seq_dim", description="order of dimensions"
    )
    random_ltd_schedule: LtdSchedule = nested(LtdSchedule, "token schedule")
    layer_token_lr_schedule: LayerTokenLrSchedule = nested(LayerTokenLrSchedule, "learning rate by layer tokens")
    micro_batch_size: Count | None = Field(None, description="filled in by the engine upstream")
    global_batch_size: Count | None = Field(None, description="filled in by the engine upstream")


class DataRouting(Toggle):
    """Routing techniques."""

    random_ltd: RandomLtd = nested(RandomLtd, "random layer-token dropping")


class DataEfficiency(Toggle):
    """Data sampling and routing."""

    seed: Int = Field(1234, description="seed of the sampling")
    data_sampling: DataSampling = nested(DataSampling, "sampling techniques")
    data_routing: DataRouting = nested(DataRouting, "routing techniques")
