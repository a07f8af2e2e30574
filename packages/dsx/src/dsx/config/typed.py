"""The keys of a configuration as types, so that an editor completes them and marks a misspelt one.

    config = dsx.Config(
        train_batch_size=32, zero_optimization=dsx.Zero(stage=3, offload_optimizer=dsx.OffloadOptimizer(device="cpu"))
    )
    config: dsx.Config = {"train_batch_size": 32, "zero_optimization": {"stage": 3}}

Each type is a `TypedDict`: calling it makes a dictionary, which `dsx.initialize` takes as any other, and json can
write. What the keys mean is in docs/config.md. Every value may also be "auto", which leaves the choice to dsx.

Written by `dsx config types`; a test compares this file with the model of the keys.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

__all__ = [
    "ActivationCheckpointing", "ActivationQuantization", "ActivationQuantizationGroup", "ActivationQuantizationParams",
    "ActivationQuantizationShared", "Aio", "Amp", "Autotuning", "Bf16", "CSV", "Checkpoint", "CheckpointWriter",
    "Comet", "CommsLogger", "Compile", "CompressionTraining", "Config", "CurriculumLearning", "CurriculumMetric",
    "CurriculumSchedule", "DataEfficiency", "DataRouting", "DataSampling", "DataTypes", "DynamicBatching", "Eigenvalue",
    "Elasticity", "ExpertParallel", "FP8", "FlopsProfiler", "Fp16", "GradientNoise", "HeadPruning", "HeadPruningShared",
    "HybridEngine", "JSONL", "LayerReduction", "LayerTokenLrSchedule", "LeafModules", "LoCo", "LtdSchedule",
    "LtdScheduleConfig", "MixedQuantize", "ModelInfo", "Nebula", "OffloadOptimizer", "OffloadParam", "Optimizer",
    "ParallelWrite", "Pipeline", "ProgressiveLayerDrop", "PruningGroup", "PruningParams", "QuantizeAlgorithm",
    "QuantizeBits", "QuantizeSchedule", "QuantizeTraining", "RandomLtd", "SamplingCurriculum", "Scheduler",
    "SequenceParallel", "SparseAttention", "SparsePruning", "SparsePruningGroup", "SparsePruningShared", "Straggler",
    "StructuredPruning", "StructuredPruningShared", "TensorBoard", "TensorParallel", "ThroughputTimer", "Timeline",
    "Timers", "TorchAutocast", "Wandb", "WeightQuantization", "WeightQuantizationGroup", "WeightQuantizationParams",
    "WeightQuantizationShared", "Zero",
]  # fmt: skip

Auto = Literal["auto"]


class ActivationCheckpointing(TypedDict, total=False):
    """Recomputation of activations: where the inputs of `dsx.checkpointing.checkpoint` are kept."""

    partition_activations: bool | Auto
    cpu_checkpointing: bool | Auto
    contiguous_memory_optimization: bool | Auto
    number_checkpoints: int | Auto | None
    synchronize_checkpoint_boundary: bool | Auto
    profile: bool | Auto
    memory_budget: int | float | Auto | None


class ActivationQuantization(TypedDict, total=False):
    """Quantised inputs of layers."""

    shared_parameters: ActivationQuantizationShared | Auto
    different_groups: dict[str, ActivationQuantizationGroup] | Auto


class ActivationQuantizationGroup(TypedDict, total=False):
    """One group of modules."""

    modules: list[str] | Auto | None
    related_modules: list[list[str]] | Auto | None
    params: ActivationQuantizationParams | Auto


class ActivationQuantizationParams(TypedDict, total=False):
    """Settings of one group."""

    bits: int | Auto


class ActivationQuantizationShared(TypedDict, total=False):
    """Settings of all activation-quantisation groups."""

    enabled: bool | Auto
    quantization_type: Literal["symmetric", "asymmetric"] | Auto
    range_calibration: Literal["static", "dynamic"] | Auto
    schedule_offset: int | Auto


class Aio(TypedDict, total=False):
    """Asynchronous file I/O for offload to disk."""

    block_size: int | Auto
    queue_depth: int | Auto
    intra_op_parallelism: int | Auto
    single_submit: bool | Auto
    overlap_events: bool | Auto
    use_gds: bool | Auto


class Amp(TypedDict, total=False):
    """Apex-style mixed precision, done with torch.amp: fp32 parameters, fp16 inside safe operations, a loss scale."""

    enabled: bool | Auto
    opt_level: Literal["O0", "O1", "O2", "O3"] | Auto
    loss_scale: Literal["dynamic"] | float | Auto
    min_loss_scale: float | Auto
    max_loss_scale: float | Auto
    cast_model_type: str | Auto | None
    cast_model_outputs: str | Auto | None
    patch_torch_functions: bool | Auto
    keep_batchnorm_fp32: bool | Auto | None
    master_weights: bool | Auto | None
    num_losses: int | Auto
    verbosity: int | Auto


class Autotuning(TypedDict, total=False):
    """Search for the fastest ZeRO stage, micro-batch size and other settings: `dsx launch --autotuning tune|run`."""

    enabled: bool | Auto
    results_dir: str | Auto | None
    exps_dir: str | Auto | None
    overwrite: bool | Auto
    metric: Literal["throughput", "latency", "FLOPS", "flops"] | Auto
    start_profile_step: int | Auto
    end_profile_step: int | Auto
    fast: bool | Auto
    max_train_batch_size: int | Auto | None
    min_train_batch_size: int | Auto
    max_train_micro_batch_size_per_gpu: int | Auto
    min_train_micro_batch_size_per_gpu: int | Auto
    mp_size: int | Auto
    num_tuning_micro_batch_sizes: int | Auto
    tuner_type: Literal["model_based", "gridsearch", "random"] | Auto
    tuner_early_stopping: int | Auto
    tuner_num_trials: int | Auto
    arg_mappings: dict[str, str] | Auto | None
    num_nodes: int | Auto | None
    num_gpus: int | Auto | None
    model_info: ModelInfo | Auto | None
    model_info_path: str | Auto | None
    metric_path: str | Auto | None
    max_memory_per_gpu: int | Auto | None
    trial_timeout: float | Auto | None


class Bf16(TypedDict, total=False):
    """Training with bf16 parameters and fp32 master weights; no loss scale."""

    enabled: bool | Auto
    auto_cast: bool | Auto
    immediate_grad_update: bool | Auto
    check_grad_overflow: bool | Auto
    bf16_master_weights_and_grads: bool | Auto
    bf16_optimizer_states: bool | Auto


class CSV(TypedDict, total=False):
    """One CSV file per label."""

    enabled: bool | Auto
    output_path: str | Auto | None
    job_name: str | Auto


class Checkpoint(TypedDict, total=False):
    """Options for writing and reading checkpoints."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] | Auto
    load_universal: bool | Auto
    use_node_local_storage: bool | Auto
    checkpoint_serialization: bool | Auto
    asynchronous: bool | Auto
    max_in_flight: int | Auto
    keep_last: int | Auto | None
    keep_every: int | Auto | None
    parallel_write: ParallelWrite | Auto
    writer: CheckpointWriter | Auto | None


class CheckpointWriter(TypedDict, total=False):
    """DeepSpeed's choice of file writers."""

    type: str | Auto | None
    decoupled: bool | Auto
    io_buffer_size: int | Auto | None
    io_buffer_double: bool | Auto
    show_statistics: bool | Auto
    data_parallel: str | Auto | None
    io_multiplier: int | Auto


class Comet(TypedDict, total=False):
    """Scalars to Comet."""

    enabled: bool | Auto
    workspace: str | Auto | None
    project: str | Auto | None
    experiment_name: str | Auto | None
    experiment_key: str | Auto | None
    api_key: str | Auto | None
    samples_log_interval: int | Auto
    online: bool | Auto | None
    mode: Literal["get", "create", "get_or_create"] | Auto | None


class CommsLogger(TypedDict, total=False):
    """Settings of the communication log."""

    enabled: bool | Auto
    verbose: bool | Auto
    prof_all: bool | Auto
    prof_ops: list[str] | Auto
    debug: bool | Auto


class Compile(TypedDict, total=False):
    """`torch.compile` of the model's blocks."""

    enabled: bool | Auto
    backend: str | Auto | None
    kwargs: dict[str, Any] | Auto
    deepcompile: bool | Auto
    free_activation: bool | Auto
    offload_activation: bool | Auto
    offload_opt_states: bool | Auto
    offload_parameters: bool | Auto
    double_buffer: bool | Auto
    symmetric_memory: bool | Auto
    passes: list[str] | Auto | None
    debug_log: bool | Auto
    sync_before_reduce: bool | Auto
    sync_after_reduce: bool | Auto
    sync_before_allgather: bool | Auto
    sync_after_allgather: bool | Auto
    keep_int_input_tensors: bool | Auto
    keep_all_input_tensors: bool | Auto


class CompressionTraining(TypedDict, total=False):
    """Quantisation and pruning during training."""

    layer_reduction: LayerReduction | Auto
    weight_quantization: WeightQuantization | Auto
    activation_quantization: ActivationQuantization | Auto
    sparse_pruning: SparsePruning | Auto
    row_pruning: StructuredPruning | Auto
    head_pruning: HeadPruning | Auto
    channel_pruning: StructuredPruning | Auto


class CurriculumLearning(TypedDict, total=False):
    """Sequence-length curriculum (legacy block)."""

    enabled: bool | Auto
    curriculum_type: Literal["seqlen"] | Auto
    min_difficulty: int | Auto | None
    max_difficulty: int | Auto | None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | Auto | None
    schedule_config: CurriculumSchedule | Auto | None


class CurriculumMetric(TypedDict, total=False):
    """One difficulty metric of the curriculum sampler."""

    index_to_sample_path: str | Auto | None
    index_to_metric_path: str | Auto | None
    difficulty_type: Literal["value", "percentile"] | Auto | None
    clustering_type: Literal["single_cluster", "schedule_based"] | Auto | None
    min_difficulty: int | Auto | None
    max_difficulty: int | Auto | None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | Auto | None
    schedule_config: CurriculumSchedule | Auto | None


class CurriculumSchedule(TypedDict, total=False):
    """Parameters of a difficulty schedule."""

    total_curriculum_step: int | Auto | None
    difficulty_step: int | Auto | None
    root_degree: float | Auto | None
    difficulty: list[int] | Auto | None
    max_step: list[int] | Auto | None


class DataEfficiency(TypedDict, total=False):
    """Data sampling and routing."""

    enabled: bool | Auto
    seed: int | Auto
    data_sampling: DataSampling | Auto
    data_routing: DataRouting | Auto


class DataRouting(TypedDict, total=False):
    """Routing techniques."""

    enabled: bool | Auto
    random_ltd: RandomLtd | Auto


class DataSampling(TypedDict, total=False):
    """Sampling techniques."""

    enabled: bool | Auto
    num_epochs: int | Auto
    num_workers: int | Auto
    pin_memory: bool | Auto
    curriculum_learning: SamplingCurriculum | Auto
    dynamic_batching: DynamicBatching | Auto


class DataTypes(TypedDict, total=False):
    """Data types that differ from what the precision mode implies."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | Auto | None
    param_dtype: Literal["fp32", "fp16", "bf16"] | Auto | None
    buffer_dtype: Literal["fp32", "fp16", "bf16"] | Auto | None


class DynamicBatching(TypedDict, total=False):
    """Batches by number of tokens instead of samples."""

    enabled: bool | Auto
    metrics_path: str | Auto | None
    lr_scaling_method: Literal["linear", "sqrt", "none"] | Auto | None
    loss_weighting: Literal["tokens", "samples", "none"] | Auto
    min_batch_size: int | Auto
    max_batch_size: int | Auto | None
    max_tokens: int | Auto | None
    sequence_picking_order: Literal["dataloader", "random", "seqlen", "bucketed"] | Auto
    verbose: bool | Auto


class Eigenvalue(TypedDict, total=False):
    """Largest curvature of each block, by power iteration."""

    enabled: bool | Auto
    verbose: bool | Auto
    max_iter: int | Auto
    tol: float | Auto
    stability: float | Auto
    gas_boundary_resolution: int | Auto
    layer_name: str | Auto
    layer_num: int | Auto


class Elasticity(TypedDict, total=False):
    """A batch size that suits many world sizes."""

    enabled: bool | Auto
    max_train_batch_size: int | Auto
    micro_batch_sizes: list[int] | Auto
    min_gpus: int | Auto
    max_gpus: int | Auto
    min_time: int | Auto
    prefer_large_batch: bool | Auto
    version: float | Auto
    ignore_non_elastic_batch_info: bool | Auto
    num_gpus_per_node: int | Auto
    model_parallel_size: int | Auto
    replace_stragglers: int | Auto


class ExpertParallel(TypedDict, total=False):
    """Mixture-of-experts models of Hugging Face in expert-parallel form."""

    enabled: bool | Auto
    autoep_size: int | Auto
    expert_tensor_parallel_size: int | Auto
    moe_layer_pattern: str | Auto | None
    expert_pattern: str | Auto | None
    router_pattern: str | Auto | None
    shared_experts_pattern: str | Auto | None
    shared_experts_gate_pattern: str | Auto | None
    top_k: Literal["auto"] | int
    score_func: Literal["auto", "softmax", "sigmoid"]
    route_norm: bool | Auto | None
    route_scale: float | Auto
    routed_scaling_factor: Literal["auto"] | float
    load_balance_coeff: float | Auto | None
    overlap_chunks: int | Auto
    devices_per_node: int | Auto | None
    has_shared_experts: bool | Auto | None
    preset_model: str | Auto | None
    validate_folding_routing: bool | Auto
    async_split_plan: bool | Auto
    use_grouped_mm: bool | Auto
    disable_triton_grouped_mm: bool | Auto
    combine_impl: str | Auto
    row_weighting_impl: str | Auto
    gate_up_impl: str | Auto
    comm_backend: str | Auto
    comm_num_sm: int | Auto
    comm_qp_margin: int | Auto
    comm_max_tokens_per_rank: int | Auto
    num_expert_groups: int | Auto | None
    num_limited_groups: int | Auto | None
    score_apply: Literal["auto", "pre", "post"]
    expert_w1: str | Auto | None
    expert_w2: str | Auto | None
    expert_w3: str | Auto | None
    expert_activation: str | Auto | None
    num_experts_attr: str | Auto | None
    top_k_attr: str | Auto | None


class FP8(TypedDict, total=False):
    """Linear layers that multiply in 8-bit floating point, by torchao; masters and states keep their dtypes."""

    enabled: bool | Auto
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | Auto
    exclude: list[str] | Auto
    gather: bool | Auto
    emulate: Literal["auto"] | bool


class FlopsProfiler(TypedDict, total=False):
    """Count and time the floating-point operations of one step."""

    enabled: bool | Auto
    profile_step: int | Auto
    module_depth: int | Auto
    top_modules: int | Auto
    detailed: bool | Auto
    output_file: str | Auto | None
    recompute_fwd_factor: float | Auto


class Fp16(TypedDict, total=False):
    """Training with fp16 parameters, fp32 master weights and a loss scale."""

    enabled: bool | Auto
    auto_cast: bool | Auto
    loss_scale: float | Auto
    initial_scale_power: int | Auto
    loss_scale_window: int | Auto
    hysteresis: int | Auto
    consecutive_hysteresis: bool | Auto
    min_loss_scale: float | Auto
    fp16_master_weights_and_grads: bool | Auto


class GradientNoise(TypedDict, total=False):
    """The gradient noise scale: the batch size from which on larger batches help little."""

    enabled: bool | Auto
    memory: int | Auto


class HeadPruning(TypedDict, total=False):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared | Auto
    different_groups: dict[str, PruningGroup] | Auto


class HeadPruningShared(TypedDict, total=False):
    """Settings of all head-pruning groups."""

    enabled: bool | Auto
    schedule_offset: int | Auto
    method: Literal["topk"] | Auto
    num_heads: int | Auto | None


class HybridEngine(TypedDict, total=False):
    """Training and generation in one engine."""

    enabled: bool | Auto
    max_out_tokens: int | Auto
    inference_tp_size: int | Auto
    release_inference_cache: bool | Auto
    pin_parameters: bool | Auto
    tp_gather_partition_size: int | Auto
    enable_cuda_graph: bool | Auto


class JSONL(TypedDict, total=False):
    """All events in one `events.jsonl`, one JSON object per line; what the HTML report reads."""

    enabled: bool | Auto
    output_path: str | Auto | None
    job_name: str | Auto


class LayerReduction(TypedDict, total=False):
    """A student with fewer layers than its teacher."""

    enabled: bool | Auto
    keep_number_layer: int | Auto | None
    module_name_prefix: str | Auto
    teacher_layer: list[int] | Auto
    other_module_name: list[str] | Auto


class LayerTokenLrSchedule(TypedDict, total=False):
    """Learning rate by layer tokens; not available."""

    enabled: bool | Auto
    total_layer_tokens: int | Auto | None
    warmup_type: str | Auto | None
    warmup_layer_tokens: int | Auto | None


class LeafModules(TypedDict, total=False):
    """Modules that are fetched and freed as a whole."""

    classes: list[str] | Auto
    names: list[str] | Auto
    name_suffixes: list[str] | Auto


class LoCo(TypedDict, total=False):
    """Error feedback of quantised gradients."""

    err_beta: float | Auto
    reset_T: int | Auto


class LtdSchedule(TypedDict, total=False):
    """Schedule of the number of tokens that the selected layers process."""

    min_value: int | Auto | None
    max_value: int | Auto | None
    schedule_type: Literal["fixed_linear"] | Auto
    schedule_config: LtdScheduleConfig | Auto | None


class LtdScheduleConfig(TypedDict, total=False):
    """Parameters of the token schedule."""

    require_steps: int | Auto | None
    seq_per_step: int | Auto | None


class MixedQuantize(TypedDict, total=False):
    """A mixture of the full-precision and the quantised weight."""

    enabled: bool | Auto
    quantize_change_ratio: float | Auto


class ModelInfo(TypedDict, total=False):
    """Known facts about the model, and whether an engine writes down what it finds."""

    profile: bool | Auto
    num_params: int | Auto | None
    hidden_size: int | Auto | None
    num_layers: int | Auto | None


class Nebula(TypedDict, total=False):
    """Checkpoints through a cloud service."""

    enabled: bool | Auto
    persistent_storage_path: str | Auto | None
    persistent_time_interval: int | Auto
    num_of_version_in_retention: int | Auto
    enable_nebula_load: bool | Auto
    load_path: str | Auto | None


class OffloadOptimizer(TypedDict, total=False):
    """The place of fp32 master weights and optimizer states, and of their update."""

    device: Literal["none", "cpu", "nvme"] | Auto
    nvme_path: str | Auto | None
    pin_memory: bool | Auto
    buffer_count: int | Auto
    fast_init: bool | Auto
    ratio: float | Auto
    step_during_backward: bool | Auto
    max_in_cpu: int | Auto
    late_update_after: int | Auto | None
    pipeline_read: bool | Auto
    pipeline_write: bool | Auto
    super_offload: bool | Auto
    cpuadam_cores_perc: float | Auto


class OffloadParam(TypedDict, total=False):
    """The place of parameters between uses (stage 3)."""

    device: Literal["none", "cpu", "nvme"] | Auto
    nvme_path: str | Auto | None
    pin_memory: bool | Auto
    buffer_count: int | Auto
    buffer_size: int | Auto
    max_in_cpu: int | Auto


class Optimizer(TypedDict, total=False):
    """The optimizer that updates the parameters."""

    type: str | Auto
    params: dict[str, Any] | Auto
    legacy_fusion: bool | Auto


class ParallelWrite(TypedDict, total=False):
    """Options by which the ranks share the writing of a checkpoint."""

    pipeline_stage: bool | Auto


class Pipeline(TypedDict, total=False):
    """Pipeline parallelism."""

    stages: Literal["auto"] | int
    partition: str | Auto
    schedule: str | Auto | None
    chunks: int | Auto | None
    seed_layers: bool | Auto
    activation_checkpoint_interval: int | Auto
    pipe_partitioned: bool | Auto
    grad_partitioned: bool | Auto
    use_reentrant: bool | Auto


class ProgressiveLayerDrop(TypedDict, total=False):
    """Stochastic depth that grows over training."""

    enabled: bool | Auto
    theta: float | Auto
    gamma: float | Auto


class PruningGroup(TypedDict, total=False):
    """One group of modules whose shapes shrink."""

    modules: list[str] | Auto | None
    related_modules: list[list[str]] | Auto | None
    params: PruningParams | Auto


class PruningParams(TypedDict, total=False):
    """Settings of one group."""

    dense_ratio: float | Auto


class QuantizeAlgorithm(TypedDict, total=False):
    """Algorithm of the quantiser."""

    q_type: Literal["symmetric", "asymmetric"] | Auto
    rounding: Literal["nearest", "stochastic"] | Auto


class QuantizeBits(TypedDict, total=False):
    """Bits at the start and at the end."""

    start_bits: int | Auto
    target_bits: int | Auto


class QuantizeSchedule(TypedDict, total=False):
    """The schedule by which quantization removes bits."""

    quantize_period: int | Auto
    schedule_offset: int | Auto


class QuantizeTraining(TypedDict, total=False):
    """Mixture of Quantisation (MoQ): all weights of two dimensions or more lose their bits one by one."""

    enabled: bool | Auto
    quantize_verbose: bool | Auto
    quantizer_kernel: bool | Auto
    quantize_groups: int | Auto
    quantize_bits: QuantizeBits | Auto
    quantize_schedule: QuantizeSchedule | Auto
    quantize_algo: QuantizeAlgorithm | Auto
    fp16_mixed_quantize: MixedQuantize | Auto
    eigenvalue: Eigenvalue | Auto


class RandomLtd(TypedDict, total=False):
    """Random layer-token dropping."""

    enabled: bool | Auto
    total_layer_num: int | Auto | None
    random_ltd_layer_num: int | Auto | None
    random_ltd_layer_id: list[int] | Auto | None
    model_mask_name: str | Auto | None
    model_type: Literal["decoder", "encoder"] | Auto
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | Auto
    random_ltd_schedule: LtdSchedule | Auto
    layer_token_lr_schedule: LayerTokenLrSchedule | Auto
    micro_batch_size: int | Auto | None
    global_batch_size: int | Auto | None


class SamplingCurriculum(TypedDict, total=False):
    """Samples are drawn by difficulty."""

    enabled: bool | Auto
    data_cluster_path: str | Auto | None
    curriculum_metrics: dict[str, CurriculumMetric] | Auto


class Scheduler(TypedDict, total=False):
    """The schedule that sets the learning rate after every optimizer step."""

    type: str | Auto
    params: dict[str, Any] | Auto


class SequenceParallel(TypedDict, total=False):
    """Options for attention over the ranks of `sequence_parallel_size`."""

    convert: bool | Auto
    order: Literal["plain", "zigzag"] | Auto
    length: int | Auto | None
    team: int | Auto | None
    overlap: int | Auto
    kernel: Literal["auto", "sdpa", "flex", "pieces"]
    host_chunks: int | Auto | None


class SparseAttention(TypedDict, total=False):
    """Layout of block-sparse attention."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] | Auto
    block: int | Auto
    different_layout_per_head: bool | Auto
    num_local_blocks: int | Auto
    num_global_blocks: int | Auto
    attention: Literal["bidirectional", "unidirectional"] | Auto
    horizontal_global_attention: bool | Auto
    num_different_global_patterns: int | Auto
    num_random_blocks: int | Auto
    local_window_blocks: list[int] | Auto
    global_block_indices: list[int] | Auto
    global_block_end_indices: list[int] | Auto | None
    num_sliding_window_blocks: int | Auto


class SparsePruning(TypedDict, total=False):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared | Auto
    different_groups: dict[str, SparsePruningGroup] | Auto


class SparsePruningGroup(TypedDict, total=False):
    """One group of modules."""

    modules: list[str] | Auto | None
    related_modules: list[list[str]] | Auto | None
    params: PruningParams | Auto


class SparsePruningShared(TypedDict, total=False):
    """Settings of all sparse-pruning groups."""

    enabled: bool | Auto
    schedule_offset: int | Auto
    schedule_offset_end: int | Auto | None
    schedule_offset_stride: int | Auto
    method: Literal["l1", "topk", "snip_momentum"] | Auto
    block_pattern: str | Auto
    dense_ratio: float | Auto
    excluded_modules: list[str] | Auto


class Straggler(TypedDict, total=False):
    """Name the rank that holds the others up, by comparing the ranks' own work now and then."""

    enabled: bool | Auto | None
    every: int | Auto
    ratio: float | Auto
    share: float | Auto


class StructuredPruning(TypedDict, total=False):
    """Pruning of rows or channels."""

    shared_parameters: StructuredPruningShared | Auto
    different_groups: dict[str, PruningGroup] | Auto


class StructuredPruningShared(TypedDict, total=False):
    """Settings of all row- or channel-pruning groups."""

    enabled: bool | Auto
    schedule_offset: int | Auto
    method: Literal["l1", "topk"] | Auto


class TensorBoard(TypedDict, total=False):
    """Scalars as TensorBoard event files."""

    enabled: bool | Auto
    output_path: str | Auto | None
    job_name: str | Auto


class TensorParallel(TypedDict, total=False):
    """Automatic tensor parallelism."""

    autotp_size: int | Auto
    tp_overlap_comm: bool | Auto
    sequence_parallel: bool | Auto
    preset_model: str | Auto | None
    partition_config: dict[str, Any] | Auto | None


class ThroughputTimer(TypedDict, total=False):
    """Samples per second in the progress line."""

    enabled: bool | Auto
    synchronized: bool | Auto


class Timeline(TypedDict, total=False):
    """A Chrome/Perfetto trace of some steps on every rank: computing, gathering, reducing, waiting."""

    enabled: bool | Auto
    output_path: str | Auto | None
    start_step: int | Auto
    steps: int | Auto


class Timers(TypedDict, total=False):
    """Timers of the engine."""

    throughput: ThroughputTimer | Auto


class TorchAutocast(TypedDict, total=False):
    """torch.amp autocast around the forward pass: fp32 parameters, lower precision in safe operations."""

    enabled: bool | Auto
    dtype: Literal["bfloat16", "float16", "bf16", "fp16", "torch.bfloat16", "torch.float16"] | Auto
    lower_precision_safe_modules: list[str] | Auto | None


class Wandb(TypedDict, total=False):
    """Scalars to Weights & Biases."""

    enabled: bool | Auto
    group: str | Auto | None
    team: str | Auto | None
    project: str | Auto
    mode: Literal["online", "offline", "disabled"] | Auto | None


class WeightQuantization(TypedDict, total=False):
    """Quantised weights."""

    shared_parameters: WeightQuantizationShared | Auto
    different_groups: dict[str, WeightQuantizationGroup] | Auto


class WeightQuantizationGroup(TypedDict, total=False):
    """One group of modules."""

    modules: list[str] | Auto | None
    related_modules: list[list[str]] | Auto | None
    params: WeightQuantizationParams | Auto


class WeightQuantizationParams(TypedDict, total=False):
    """Settings of one group."""

    start_bits: int | Auto
    target_bits: int | Auto
    quantization_period: int | Auto


class WeightQuantizationShared(TypedDict, total=False):
    """Settings of all weight-quantisation groups."""

    enabled: bool | Auto
    quantizer_kernel: bool | Auto
    schedule_offset: int | Auto
    quantize_groups: int | Auto
    quantize_verbose: bool | Auto
    quantization_type: Literal["symmetric", "asymmetric"] | Auto
    rounding: Literal["nearest", "stochastic"] | Auto
    quantize_weight_in_forward: bool | Auto
    fp16_mixed_quantize: MixedQuantize | Auto


class Zero(TypedDict, total=False):
    """The sharding of optimizer states, gradients and parameters over the ranks."""

    stage: Literal[0, 1, 2, 3] | Auto
    keep_full_gradients: bool | Auto
    allgather_partitions: bool | Auto
    allgather_bucket_size: int | Auto
    overlap_comm: bool | Auto | None
    reduce_scatter: bool | Auto
    use_multi_rank_bucket_allreduce: bool | Auto
    reduce_bucket_size: Literal["auto"] | int
    compute_grad_norm: bool | Auto
    contiguous_gradients: bool | Auto
    load_from_fp32_weights: bool | Auto
    grad_hooks: bool | Auto
    step_agreement: Literal["message", "norm"] | Auto
    notice_data_writes: bool | Auto | None
    round_robin_gradients: bool | Auto
    parameter_alignment: bool | Auto
    elastic_checkpoint: bool | Auto
    ignore_unused_parameters: bool | Auto
    legacy_stage1: bool | Auto
    offload_param: OffloadParam | Auto | None
    offload_optimizer: OffloadOptimizer | Auto | None
    cpu_offload: bool | Auto
    cpu_offload_params: bool | Auto
    cpu_offload_use_pin_memory: bool | Auto
    sub_group_size: int | Auto
    stage3_max_live_parameters: int | Auto
    stage3_max_reuse_distance: int | Auto
    stage3_prefetch_bucket_size: Literal["auto"] | int
    stage3_param_persistence_threshold: Literal["auto"] | int
    stage3_model_persistence_threshold: int | Auto
    stage3_gather_16bit_weights_on_model_save: bool | Auto | None
    stage3_module_granularity_threshold: int | Auto
    stage3_use_all_reduce_for_fetch_params: bool | Auto
    stage3_allgather_sequential: bool | Auto
    zero_hpz_partition_size: int | Auto
    zero_quantized_weights: bool | Auto
    zero_quantized_weights_bits: Literal[8, 4, 2] | Auto
    zero_quantized_nontrainable_weights: bool | Auto
    zero_quantized_gradients: bool | Auto
    zero_quantized_gradients_bits: Literal[8, 4, 2] | Auto
    zero_quantized_gradients_block_size: int | Auto
    zero_quantized_error_feedback: bool | Auto
    zeropp_loco_param: LoCo | Auto | None
    mics_shard_size: int | Auto
    mics_hierarchical_params_gather: bool | Auto
    memory_efficient_linear: bool | Auto
    pipeline_loading_checkpoint: bool | Auto
    override_module_apply: bool | Auto
    log_trace_cache_warnings: bool | Auto
    enable_sanity_checks: bool | Auto
    leaf_module: LeafModules | Auto | None
    zenflow: dict[str, Any] | Auto | None
    save_muon_momentum_buffer_in_memory: bool | Auto


class Config(TypedDict, total=False):
    """A whole configuration."""

    train_batch_size: int | Auto | None
    train_micro_batch_size_per_gpu: int | Auto | None
    gradient_accumulation_steps: int | Auto | None
    optimizer: Optimizer | Auto | None
    scheduler: Scheduler | Auto | None
    gradient_clipping: float | Auto
    communication_data_type: Literal["fp32", "fp16", "bf16"] | Auto | None
    seq_parallel_communication_data_type: Literal["fp32", "fp16", "bf16"] | Auto
    prescale_gradients: bool | Auto
    gradient_predivide_factor: float | Auto
    gradient_allreduce_op: Literal["mean", "sum"] | Auto
    sparse_gradients: bool | Auto
    disable_allgather: bool | Auto
    fp16: Fp16 | Auto
    bf16: Bf16 | Auto
    amp: Amp | Auto
    torch_autocast: TorchAutocast | Auto
    data_types: DataTypes | Auto
    zero_optimization: Zero | Auto
    zero_allow_untested_optimizer: bool | Auto
    zero_force_ds_cpu_optimizer: bool | Auto
    steps_per_print: int | Auto | None
    wall_clock_breakdown: bool | Auto
    memory_breakdown: bool | Auto
    dump_state: bool | Auto
    log_level: str | Auto | None
    dataloader_drop_last: bool | Auto
    managed_gradient_accumulation: bool | Auto
    disable_python_gc: bool | Auto
    timers: Timers | Auto
    checkpoint: Checkpoint | Auto
    cuda_visible_devices: int | str | Auto | None
    vocabulary_size: int | Auto | None
    use_data_before_expert_parallelism: bool | Auto
    graph_harvesting: bool | Auto
    tensorboard: TensorBoard | Auto
    wandb: Wandb | Auto
    csv_monitor: CSV | Auto
    jsonl: JSONL | Auto
    comet: Comet | Auto
    flops_profiler: FlopsProfiler | Auto
    comms_logger: CommsLogger | Auto
    timeline: Timeline | Auto
    straggler: Straggler | Auto
    eigenvalue: Eigenvalue | Auto
    gradient_noise_scale: GradientNoise | Auto
    activation_checkpointing: ActivationCheckpointing | Auto
    fp8: FP8 | Auto | None
    sparse_attention: SparseAttention | Auto | None
    expert_parallel: ExpertParallel | Auto
    compression_training: CompressionTraining | Auto
    quantize_training: QuantizeTraining | Auto
    data_efficiency: DataEfficiency | Auto
    curriculum_learning: CurriculumLearning | Auto
    progressive_layer_drop: ProgressiveLayerDrop | Auto
    pipeline: Pipeline | Auto
    aio: Aio | Auto
    elasticity: Elasticity | Auto
    hybrid_engine: HybridEngine | Auto
    nebula: Nebula | Auto
    sequence_parallel_size: int | Auto
    sequence_parallel: SequenceParallel | Auto
    tensor_parallel: TensorParallel | Auto
    compile: Compile | Auto
    datastates_ckpt: dict[str, Any] | Auto | None
    autotuning: Autotuning | Auto
