"""The whole configuration as one model: sections of dsx itself and sections owned by the sibling packages.

A section is defined in the package that uses it; this file collects them. It is imported only when a configuration is
loaded, because importing pydantic and the sibling packages takes time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dsx_activations.config import ActivationCheckpointing, SequenceParallelSection
from dsx_comm import config as comm_section
from dsx_data.config import CurriculumLearning, DataEfficiency, ProgressiveLayerDrop
from dsx_moe.config import ExpertParallelConfig
from dsx_monitor.config import (
    CometConfig,
    CSVConfig,
    EigenvalueConfig,
    FlopsProfilerConfig,
    GradientNoiseConfig,
    JSONLConfig,
    StragglerConfig,
    TensorBoardConfig,
    TimelineConfig,
    WandbConfig,
)
from dsx_nvme import config as aio_section
from dsx_pipe.config import Pipeline, TensorParallel
from dsx_sparse_attn.config import SparseAttentionConfig
from dsx_zero.config import ZeroConfig
from pydantic import Field

from .base import Count, Ratio, Real, Section, Size, from_dataclass, nested
from .compression import CompressionTraining, QuantizeTraining
from .elastic import Elasticity
from .fp8 import FP8
from .later import (
    CompileSection,
    HybridEngine,
    Nebula,
)
from .training import (
    Amp,
    Bf16,
    Checkpoint,
    DataTypes,
    Fp16,
    Optimizer,
    Scheduler,
    ShortDtype,
    Timers,
    TorchAutocast,
)

__all__ = ["Root"]

if TYPE_CHECKING:
    AioConfig = aio_section.AioConfig
    CommsLoggerConfig = comm_section.CommsLoggerConfig
else:
    AioConfig = from_dataclass(aio_section.AioConfig, module=__name__)
    CommsLoggerConfig = from_dataclass(comm_section.CommsLoggerConfig, module=__name__)


class Root(Section):
    """All keys a configuration may hold."""

    # - batch
    train_batch_size: Count | None = Field(None, description="samples per optimizer step over all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples per rank in one forward pass")
    gradient_accumulation_steps: Count | None = Field(None, description="forward passes per optimizer step")

    # - update
    optimizer: Optimizer | None = Field(None, description="optimizer; null: the one given to initialize")
    scheduler: Scheduler | None = Field(None, description="learning-rate schedule; null: the one given to initialize")
    gradient_clipping: Real = Field(
        1.0, description="largest global gradient norm; larger gradients are scaled down to it; 0: no clipping"
    )

    # - gradient reduction
    communication_data_type: ShortDtype | None = Field(
        None, description="data type of reductions; null: that of the precision mode"
    )
    seq_parallel_communication_data_type: ShortDtype = Field(
        "fp32", description="data type of the reductions of sequence parallelism"
    )
    prescale_gradients: bool = Field(
        False, description="divide gradients by the number of ranks before the sum, not after it"
    )
    gradient_predivide_factor: Ratio = Field(
        1.0, description="divide gradients by this before the sum, and by the rest of the number of ranks after it"
    )
    gradient_allreduce_op: Literal["mean", "sum"] = Field(
        "mean", description="mean: average gradients over the ranks; sum: add them up"
    )
    sparse_gradients: bool = Field(
        False, description="stage 0: of embeddings with sparse=True, send only the rows that have a gradient"
    )
    disable_allgather: bool = Field(False, description="DeepSpeed parses it and never reads it")

    # - precision
    fp16: Fp16 = nested(Fp16, "fp16 training with a loss scale")
    bf16: Bf16 = nested(Bf16, "bf16 training")
    amp: Amp = nested(Amp, "apex-style mixed precision through torch.amp")
    torch_autocast: TorchAutocast = nested(TorchAutocast, "torch.autocast around the forward pass")
    data_types: DataTypes = nested(DataTypes, "data types that differ from the precision mode")

    # - ZeRO
    zero_optimization: ZeroConfig = nested(ZeroConfig, "partitioning of states, gradients and parameters")
    zero_allow_untested_optimizer: bool = Field(
        False, description="accept optimizers that are not tested with partitioning"
    )
    zero_force_ds_cpu_optimizer: bool = Field(True, description="DeepSpeed: with offload, allow only its own CPU Adam")

    # - engine
    steps_per_print: Size | None = Field(
        10, description="optimizer steps between two progress lines; 0 or null: no progress lines"
    )
    wall_clock_breakdown: bool = Field(False, description="time forward, backward and step")
    memory_breakdown: bool = Field(False, description="log the memory in use at each phase of a step")
    dump_state: bool = Field(False, description="log the engine's state when it is built")
    log_level: str | None = Field(None, description="level of dsx's logger, such as info; null: unchanged")
    dataloader_drop_last: bool = Field(False, description="drop the last batch of an epoch if it is incomplete")
    managed_gradient_accumulation: bool = Field(
        True, description="the engine counts micro-batches and decides which one ends a step"
    )
    disable_python_gc: bool = Field(False, description="run Python's garbage collector only between steps")
    timers: Timers = nested(Timers, "timers of the engine")
    checkpoint: Checkpoint = nested(Checkpoint, "how checkpoints are written and read")
    cuda_visible_devices: int | str | None = Field(None, description="devices of a node, as older launchers chose them")
    vocabulary_size: Count | None = Field(None, description="DeepSpeed parses it and never reads it")
    use_data_before_expert_parallelism: bool = Field(
        False, description="neighbouring ranks hold the same experts, instead of different ones"
    )
    graph_harvesting: bool = Field(False, description="DeepSpeed: capture the step as a device graph and replay it")

    # - monitoring
    tensorboard: TensorBoardConfig = nested(TensorBoardConfig, "events to TensorBoard")
    wandb: WandbConfig = nested(WandbConfig, "events to Weights & Biases")
    csv_monitor: CSVConfig = nested(CSVConfig, "events to CSV files")
    jsonl: JSONLConfig = nested(JSONLConfig, "events to one file of JSON lines, which the HTML report reads")
    comet: CometConfig = nested(CometConfig, "events to Comet")
    flops_profiler: FlopsProfilerConfig = nested(FlopsProfilerConfig, "floating-point operations per module")
    comms_logger: CommsLoggerConfig = nested(CommsLoggerConfig, "log of communication")
    timeline: TimelineConfig = nested(TimelineConfig, "trace of some steps on every rank")
    straggler: StragglerConfig = nested(StragglerConfig, "name the rank that delays the others")
    eigenvalue: EigenvalueConfig = nested(EigenvalueConfig, "largest curvature of each block")
    gradient_noise_scale: GradientNoiseConfig = nested(GradientNoiseConfig, "estimate of the largest useful batch size")

    # - the model
    activation_checkpointing: ActivationCheckpointing = nested(
        ActivationCheckpointing, "where the inputs of recomputed layers are kept"
    )
    fp8: FP8 | None = Field(None, description="linear layers that multiply in 8-bit floating point")
    sparse_attention: SparseAttentionConfig | None = Field(None, description="block-sparse attention")
    expert_parallel: ExpertParallelConfig = nested(ExpertParallelConfig, "automatic expert parallelism")
    compression_training: CompressionTraining = nested(CompressionTraining, "quantisation and pruning")
    quantize_training: QuantizeTraining = nested(
        QuantizeTraining, "Mixture of Quantisation: weights lose their bits one by one (legacy)"
    )

    # - data
    data_efficiency: DataEfficiency = nested(DataEfficiency, "data sampling and routing")
    curriculum_learning: CurriculumLearning = nested(CurriculumLearning, "sequence-length curriculum (legacy)")
    progressive_layer_drop: ProgressiveLayerDrop = nested(ProgressiveLayerDrop, "stochastic depth")

    # - the other sections
    pipeline: Pipeline = nested(Pipeline, "pipeline parallelism")
    aio: AioConfig = nested(AioConfig, "file I/O for offload to disk")
    elasticity: Elasticity = nested(Elasticity, "batch sizes for many world sizes")
    hybrid_engine: HybridEngine = nested(HybridEngine, "training and generation in one engine")
    nebula: Nebula = nested(Nebula, "checkpoints through a cloud service")
    sequence_parallel_size: Count = Field(
        1, description="ranks that share each sequence; they are no data-parallel ranks in the batch arithmetic"
    )
    sequence_parallel: SequenceParallelSection = nested(
        SequenceParallelSection, "attention over the ranks of sequence_parallel_size"
    )
    tensor_parallel: TensorParallel = nested(TensorParallel, "automatic tensor parallelism")
    compile: CompileSection = nested(CompileSection, "torch.compile of the model's blocks")
    datastates_ckpt: dict[str, Any] | None = Field(
        None, description="DeepSpeed: asynchronous checkpoints of a third party"
    )

    @property
    def max_norm(self) -> float | None:
        """The largest global norm of gradients; None: no clipping."""
        return self.gradient_clipping or None
