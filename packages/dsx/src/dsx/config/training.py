"""Sections that the engine itself reads: optimizer, scheduler, precision, checkpoint, timers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import Count, Int, Ratio, Real, Section, Size, Toggle, nested

__all__ = ["Amp", "Bf16", "Checkpoint", "DataTypes", "Fp16", "Optimizer", "Scheduler", "Timers", "TorchAutocast"]

ShortDtype = Literal["fp32", "fp16", "bf16"]


class Optimizer(Section):
    """The optimizer that updates the parameters."""

    type: str = Field(
        description="Adam, AdamW, Lamb, Lion, Adagrad, SGD or any class of torch.optim; case does not matter"
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the optimizer; names must match its constructor"
    )
    legacy_fusion: bool = Field(False, description="DeepSpeed: choice between its two fp16 wrappers")


class Scheduler(Section):
    """The schedule that sets the learning rate after every optimizer step."""

    type: str = Field(
        description=(
            "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or any class of torch.optim.lr_scheduler"
        )
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the schedule; names must match its constructor"
    )


class Fp16(Toggle):
    """Training with fp16 parameters, fp32 master weights and a loss scale."""

    auto_cast: bool = Field(False, description="cast floating-point inputs of the model to fp16")
    loss_scale: Real = Field(0.0, description="static loss scale; 0 chooses dynamic scaling")
    initial_scale_power: Size = Field(16, le=64, description="the dynamic scale starts at 2 to this power")
    loss_scale_window: Count = Field(1000, description="steps without overflow between two doublings of the scale")
    hysteresis: Count = Field(2, description="overflows tolerated before the scale is halved")
    consecutive_hysteresis: bool = Field(
        False, description="every step without overflow restores the tolerance of hysteresis"
    )
    min_loss_scale: Ratio = Field(1.0, description="lowest loss scale; an overflow at this scale is an error")
    fp16_master_weights_and_grads: bool = Field(False, description="keep master weights and gradients in fp16")


class Bf16(Toggle):
    """Training with bf16 parameters and fp32 master weights; no loss scale."""

    auto_cast: bool = Field(False, description="cast floating-point inputs of the model to bf16")
    immediate_grad_update: bool = Field(False, description="accumulate fp32 gradients inside backward hooks")
    check_grad_overflow: bool = Field(True, description="skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: bool = Field(False, description="keep master weights and gradients in bf16")
    bf16_optimizer_states: bool = Field(False, description="keep optimizer states in bf16")


class Amp(Toggle):
    """Apex-style mixed precision, done with torch.amp: fp32 parameters, fp16 inside safe operations, a loss scale."""

    opt_level: Literal["O0", "O1", "O2", "O3"] = Field("O1", description="O0 is plain fp32, O1 is autocast")
    loss_scale: Ratio | Literal["dynamic"] = Field("dynamic", description='static loss scale, or "dynamic"')
    min_loss_scale: Ratio = Field(1.0, description="lower bound of the dynamic scale")
    max_loss_scale: Ratio = Field(16777216.0, description="upper bound of the dynamic scale in apex")
    cast_model_type: str | None = Field(None, description="apex: data type of the model's parameters")
    cast_model_outputs: str | None = Field(None, description="apex: data type of the outputs")
    patch_torch_functions: bool = Field(True, description="apex: patch torch functions with casts")
    keep_batchnorm_fp32: bool | None = Field(None, description="apex: keep batch norms in fp32")
    master_weights: bool | None = Field(None, description="apex: keep fp32 master weights")
    num_losses: Count = Field(1, description="apex: number of losses, each with its own scale")
    verbosity: Size = Field(1, description="apex: how much it prints")


class TorchAutocast(Toggle):
    """torch.amp autocast around the forward pass: fp32 parameters, lower precision in safe operations."""

    dtype: Literal["bfloat16", "float16", "bf16", "fp16", "torch.bfloat16", "torch.float16"] = Field(
        "bfloat16", description="data type inside autocast"
    )
    lower_precision_safe_modules: list[str] | None = Field(
        None,
        description=(
            "classes of modules whose gradients may be reduced in the lower precision; null: torch's own choice"
        ),
    )


class DataTypes(Section):
    """Data types that differ from what the precision mode implies."""

    grad_accum_dtype: ShortDtype | None = Field(
        None, description="data type of gradient accumulation; null: that of the parameters"
    )
    param_dtype: ShortDtype | None = Field(
        None, description="data type of the parameters; null: that of the precision mode"
    )
    buffer_dtype: ShortDtype | None = Field(
        None, description="data type of floating-point buffers; null: each buffer keeps its own"
    )


class ParallelWrite(Section):
    """Options by which the ranks share the writing of a checkpoint."""

    pipeline_stage: bool = Field(
        False, description="each data-parallel replica writes some of the layers of a pipeline stage"
    )


class CheckpointWriter(Section):
    """DeepSpeed's choice of file writers."""

    type: str | None = Field(None, description="writer class")
    decoupled: bool = Field(False, description="write from a separate process")
    io_buffer_size: Int | None = Field(None, description="bytes of the write buffer")
    io_buffer_double: bool = Field(True, description="two write buffers")
    show_statistics: bool = Field(False, description="print throughput")
    data_parallel: str | None = Field(None, description="replica or socket or machine")
    io_multiplier: Int = Field(1, description="writers per rank")


class Checkpoint(Section):
    """Options for writing and reading checkpoints."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = Field(
        "Warn", description="what happens when ranks save with different tags; case does not matter"
    )
    load_universal: bool = Field(False, description="read a converted checkpoint at another world size")
    use_node_local_storage: bool = Field(
        False,
        description="each node saves to its own disk; what only one node has is also copied to the next node's disk",
    )
    checkpoint_serialization: bool = Field(True, description="DeepSpeed: how checkpoints are serialised")
    asynchronous: bool = Field(
        False, description="save_checkpoint copies to host memory and returns; the files are written during training"
    )
    max_in_flight: Count = Field(1, description="most asynchronous saves that are not on disk yet; the next save waits")
    keep_last: Count | None = Field(
        None,
        description=(
            "number of newest checkpoints that are kept; null: all. Those saved with save_latest=False are not counted"
        ),
    )
    keep_every: Count | None = Field(
        None, description="with keep_last: also keep checkpoints whose number of updates is a multiple of this"
    )
    parallel_write: ParallelWrite = nested(ParallelWrite, "how the ranks share the writing")
    writer: CheckpointWriter | None = Field(None, description="DeepSpeed: choice of the file writer")


class ThroughputTimer(Section):
    """Samples per second in the progress line."""

    enabled: bool = Field(True, description="measure throughput")
    synchronized: bool = Field(True, description="wait for the device before reading the clock")


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTimer = nested(ThroughputTimer, "throughput timer")
