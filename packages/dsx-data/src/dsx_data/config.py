"""The configuration sections of dsx-data, as frozen models that refuse unknown keys.

Only code that reads a configuration imports this module, because importing pydantic takes time. `findings` checks rules
over several fields: numbers that are missing although a section is enabled, and features that do not exist. Keys,
defaults and meanings are those of DeepSpeed's `data_efficiency`, `curriculum_learning` and `progressive_layer_drop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from dsx_core import Finding
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "CurriculumLearning",
    "CurriculumMetric",
    "CurriculumSchedule",
    "DataEfficiency",
    "DataRouting",
    "DataSampling",
    "DynamicBatching",
    "ProgressiveLayerDrop",
    "RandomLtd",
    "SamplingCurriculum",
    "findings",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class _Toggle(_Section):
    enabled: bool = Field(False, description="switches the section on")


def _whole(value: Any) -> Any:
    """Let 1e3 through as 1000, as JSON written by hand has it; the strict check judges the rest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_whole)]
_Size = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
_Real = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def _none_in_any_case(value: Any) -> Any:
    """DeepSpeed takes null and "NONE" for "none"."""
    return "none" if value is None or (isinstance(value, str) and value.lower() == "none") else value


def _nested(model: Any, description: str) -> Any:
    return Field(default_factory=model, description=description)


class CurriculumSchedule(_Section):
    """Parameters of a difficulty schedule."""

    total_curriculum_step: _Count | None = Field(
        None, description="number of steps from the least to the greatest difficulty"
    )
    difficulty_step: _Count | None = Field(None, description="the difficulty is rounded down to a multiple of this")
    root_degree: _Positive | None = Field(
        None, description="degree of the root (fixed_root), any number above 0; 2 is the square root"
    )
    difficulty: list[int] | None = Field(None, description="the difficulties, in order (fixed_discrete)")
    max_step: list[int] | None = Field(
        None, description="last step of each difficulty but the last one (fixed_discrete)"
    )


_ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class CurriculumMetric(_Section):
    """One difficulty metric of the curriculum sampler."""

    index_to_sample_path: str | None = Field(None, description="index file with the samples of each difficulty")
    index_to_metric_path: str | None = Field(None, description="index file with the difficulties")
    difficulty_type: Literal["value", "percentile"] | None = Field(
        None, description="a difficulty is a value of the metric, or a percentile of the samples"
    )
    clustering_type: Literal["single_cluster", "schedule_based"] | None = Field(
        None, description="single_cluster: the metric chooses no samples; schedule_based: it does"
    )
    min_difficulty: _Int | None = Field(None, description="difficulty at the start")
    max_difficulty: _Int | None = Field(None, description="difficulty at the end")
    schedule_type: _ScheduleType | None = Field(None, description="shape of the schedule")
    schedule_config: CurriculumSchedule | None = Field(None, description="parameters of the schedule")


class SamplingCurriculum(_Toggle):
    """Samples are drawn by difficulty."""

    data_cluster_path: str | None = Field(
        None, description="folder for the lists of admitted samples; null: they are kept in memory"
    )
    curriculum_metrics: dict[str, CurriculumMetric] = Field(default_factory=dict, description="metrics by name")


class DynamicBatching(_Toggle):
    """Batches by number of tokens instead of samples."""

    metrics_path: str | None = Field(None, description="folder of an analysis with the metric seqlen, or its index")
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"] | None, BeforeValidator(_none_in_any_case)] = Field(
        "linear", description="how the learning rate follows the number of samples of an update"
    )
    loss_weighting: Literal["tokens", "samples", "none"] = Field(
        "tokens",
        description=(
            "weights of the micro-batches' losses in an update: their tokens, their samples, or equal weights (none)"
        ),
    )
    min_batch_size: _Count = Field(1, description="fewest samples of a micro-batch")
    max_batch_size: _Count | None = Field(None, description="most samples of a micro-batch; null: as many as fit")
    max_tokens: _Count | None = Field(None, description="most tokens of a micro-batch")
    sequence_picking_order: Literal["dataloader", "random", "seqlen", "bucketed"] = Field(
        "dataloader", description="order of samples; bucketed: random, with similar lengths together"
    )
    verbose: bool = Field(False, description="log the number of batches and their sizes when the loader is built")


class DataSampling(_Toggle):
    """Sampling techniques."""

    num_epochs: _Count = Field(1000, description="a curriculum draws at most this many times the size of the dataset")
    num_workers: _Size = Field(0, description="worker processes of the loader")
    pin_memory: bool = Field(False, description="the loader puts batches into page-locked memory")
    curriculum_learning: SamplingCurriculum = _nested(SamplingCurriculum, "samples drawn by difficulty")
    dynamic_batching: DynamicBatching = _nested(DynamicBatching, "batches by number of tokens")


class LtdScheduleConfig(_Section):
    """Parameters of the token schedule."""

    require_steps: _Count | None = Field(None, description="number of steps until no token is dropped")
    seq_per_step: _Count | None = Field(
        None, description="the number of kept tokens is rounded down to a multiple of this"
    )


class LtdSchedule(_Section):
    """Schedule of the number of tokens that the selected layers process."""

    min_value: _Count | None = Field(None, description="kept tokens of a sequence at the start")
    max_value: _Count | None = Field(None, description="kept tokens at the end, which is the sequence length")
    schedule_type: Literal["fixed_linear"] = Field("fixed_linear", description="shape of the schedule")
    schedule_config: LtdScheduleConfig | None = Field(None, description="parameters of the schedule")


class LayerTokenLrSchedule(_Toggle):
    """Learning rate by layer tokens; not available."""

    total_layer_tokens: _Count | None = Field(None, description="layer tokens of the complete run")
    warmup_type: str | None = Field(None, description="shape of the warm-up")
    warmup_layer_tokens: _Count | None = Field(None, description="layer tokens of the warm-up")


class RandomLtd(_Toggle):
    """Random layer-token dropping."""

    NO_EFFECT: ClassVar[dict[str, str]] = {
        "global_batch_size": "the engine knows it",
        "micro_batch_size": "the engine knows it",
    }

    total_layer_num: _Count | None = Field(None, description="number of layers of the model")
    random_ltd_layer_num: _Count | None = Field(None, description="number of layers that drop tokens")
    random_ltd_layer_id: list[int] | None = Field(
        None, description="numbers of the layers that drop tokens; the first layer is 0"
    )
    model_mask_name: str | None = Field(
        "attention_mask",
        description="name of the layers' argument that holds the attention mask; null for layers without a mask",
    )
    model_type: Literal["decoder", "encoder"] = Field("decoder", description="kind of model; it makes no difference")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = Field(
        "batch_seq_dim", description="order of the dimensions of the hidden states"
    )
    random_ltd_schedule: LtdSchedule = _nested(LtdSchedule, "schedule of the kept tokens")
    layer_token_lr_schedule: LayerTokenLrSchedule = _nested(LayerTokenLrSchedule, "learning rate by layer tokens")
    micro_batch_size: _Count | None = Field(
        None, description="samples per micro-batch; DeepSpeed's engine writes it, dsx does not read it"
    )
    global_batch_size: _Count | None = Field(None, description="samples per optimizer step, for use without an engine")


class DataRouting(_Toggle):
    """Routing techniques."""

    random_ltd: RandomLtd = _nested(RandomLtd, "random layer-token dropping")


_RESUMED = {"": "a resumed run has the same batches, with any number of ranks"}
"""Comparison of these sections with DeepSpeed's; "" is the section itself."""


class DataEfficiency(_Toggle):
    """Data sampling and routing."""

    BETTER: ClassVar[dict[str, str]] = _RESUMED

    seed: _Int = Field(1234, description="seed of the sampling")
    data_sampling: DataSampling = _nested(DataSampling, "sampling techniques")
    data_routing: DataRouting = _nested(DataRouting, "routing techniques")


class CurriculumLearning(_Toggle):
    """Sequence-length curriculum (legacy block)."""

    BETTER: ClassVar[dict[str, str]] = _RESUMED

    curriculum_type: Literal["seqlen"] = Field("seqlen", description="metric of the difficulty: the sequence length")
    min_difficulty: _Count | None = Field(None, description="sequence length at the start")
    max_difficulty: _Count | None = Field(None, description="sequence length at the end")
    schedule_type: _ScheduleType | None = Field(None, description="shape of the schedule")
    schedule_config: CurriculumSchedule | None = Field(None, description="parameters of the schedule")


class ProgressiveLayerDrop(_Toggle):
    """Stochastic depth that grows over training."""

    theta: _Real = Field(1.0, le=1.0, description="limit of theta(t); 1 drops nothing")
    gamma: _Real = Field(0.001, description="rate at which theta(t) falls from 1 to its limit, per step")


def findings(
    data_efficiency: DataEfficiency, curriculum: CurriculumLearning, layer_drop: ProgressiveLayerDrop
) -> Iterator[Finding]:
    """Yield what is wrong with sections that are switched on."""
    del layer_drop  # its fields say all
    if curriculum.enabled:
        yield from _schedule_findings(curriculum, "curriculum_learning")
    if not data_efficiency.enabled:
        return
    sampling = data_efficiency.data_sampling
    if sampling.enabled:
        yield from _sampling_findings(sampling)
    routing = data_efficiency.data_routing
    if routing.enabled and routing.random_ltd.enabled:
        yield from _ltd_findings(routing.random_ltd)


def _sampling_findings(sampling: DataSampling) -> Iterator[Finding]:
    where = "data_efficiency.data_sampling"
    curriculum, batching = sampling.curriculum_learning, sampling.dynamic_batching
    if curriculum.enabled and batching.enabled:
        yield Finding(
            f"{where}.dynamic_batching.enabled", "both decide which samples a batch holds", "true",
            "curriculum_learning or dynamic_batching", "switch one of the two off",
        )  # fmt: skip
    if curriculum.enabled:
        yield from _curriculum_findings(curriculum, f"{where}.curriculum_learning")
    if batching.enabled:
        for key, meaning in (("max_tokens", "tokens per micro-batch"), ("metrics_path", "the lengths of the samples")):
            if getattr(batching, key) is None:
                yield _missing(f"{where}.dynamic_batching.{key}", meaning)


def _curriculum_findings(section: SamplingCurriculum, where: str) -> Iterator[Finding]:
    if not section.curriculum_metrics:
        yield _missing(f"{where}.curriculum_metrics", "at least one metric")
    for name, metric in section.curriculum_metrics.items():
        path = f"{where}.curriculum_metrics.{name}"
        yield from _schedule_findings(metric, path)
        if metric.clustering_type == "single_cluster":
            continue
        needed = ["index_to_sample_path", "difficulty_type", "clustering_type"]
        needed += ["index_to_metric_path"] if metric.difficulty_type == "value" else []
        for key in needed:
            if getattr(metric, key) is None:
                yield _missing(f"{path}.{key}", "a metric that chooses samples needs it")


def _schedule_findings(section: CurriculumMetric | CurriculumLearning, path: str) -> Iterator[Finding]:
    from .curriculum import CurriculumScheduler
    from .errors import DataArgumentError

    missing = [key for key in ("min_difficulty", "max_difficulty", "schedule_type") if getattr(section, key) is None]
    for key in missing:
        yield _missing(f"{path}.{key}", "a schedule needs it")
    if missing:
        return
    try:
        CurriculumScheduler(section, name=path)
    except DataArgumentError as error:
        key, _, rest = str(error).partition(": got ")
        got, _, expected = rest.partition(", expected ")
        yield Finding(key, "the schedule is incomplete or contradicts itself", got, expected, "set it")


def _ltd_findings(section: RandomLtd) -> Iterator[Finding]:
    from .errors import DataArgumentError
    from .routing.ltd_schedule import RandomLTDScheduler

    where = "data_efficiency.data_routing.random_ltd"
    if section.layer_token_lr_schedule.enabled:
        yield Finding(
            f"{where}.layer_token_lr_schedule.enabled",
            "a learning rate by layer tokens is not available: DeepSpeed never defined it"
            " (it raises NotImplementedError)",
            "true", "false",
            "use scheduler, which counts steps; random_ltd_scheduler.consumed_layer_tokens counts tokens",
        )  # fmt: skip
    try:
        RandomLTDScheduler(section.model_copy(update={"layer_token_lr_schedule": None}))
    except DataArgumentError as error:
        key, _, rest = str(error).removeprefix("random_ltd.").partition(": got ")
        got, _, expected = rest.partition(", expected ")
        yield Finding(
            f"{where}.{key}", "the token schedule is incomplete or contradicts itself", got, expected, "set it"
        )


def _missing(key: str, meaning: str) -> Finding:
    return Finding(key, f"a value is missing: {meaning}", "nothing", "a value", "set it, or switch the section off")
