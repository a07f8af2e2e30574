"""Names of DeepSpeed that several of its modules have, and where their objects are: the groups of `names.MODULES`."""

from __future__ import annotations


def of(place: str, names: str) -> dict[str, str]:
    """A table of names that have the same spelling in the module `place`."""
    return {name: f"{place}:{name}" for name in names.split()}


ENGINE = {
    "DeepSpeedEngine": "dsx_compat.engine:DeepSpeedEngine",
    "DeepSpeedOptimizerCallable": "typing:Callable",
    "DeepSpeedSchedulerCallable": "typing:Callable",
}
CONFIG = {
    "DeepSpeedConfig": "dsx_compat.getters:DeepSpeedConfig",
    "DeepSpeedConfigError": "dsx.errors:DsxConfigError",
}
OPTIMIZER = {"DeepSpeedOptimizer": "dsx_zero:ZeroOptimizer", "ZeROOptimizer": "dsx_zero:ZeroOptimizer"}
LOGGING = of("dsx.utils", "logger log_dist set_log_level_from_string")
Z3_LEAF = of(
    "dsx_zero",
    "set_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
    " unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
)
FRAGMENTS = of(
    "dsx_zero",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param"
    " safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad"
    " safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
    " safe_update_full_grad_vectorized",
)
NVTX = of("dsx.utils", "instrument_w_nvtx")
ON_DEVICE = of("dsx.utils", "OnDevice")
LOADER = of("dsx.data", "RepeatingLoader")
RECURSIVE = of("dsx_compress", "recursive_getattr recursive_setattr")
GROUP_NAMES = (
    "clone_world_group create_expert_and_data_parallel create_expert_data_and_model_parallel"
    " get_broadcast_src_rank get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size"
    " get_expert_broadcast_src_rank get_expert_data_parallel_group get_expert_data_parallel_group_dict"
    " get_expert_data_parallel_rank get_expert_data_parallel_world_size get_expert_model_parallel_world_size"
    " get_expert_parallel_group get_expert_parallel_group_dict get_expert_parallel_rank get_expert_parallel_src_rank"
    " get_expert_parallel_world_size get_local_all_to_all_group get_max_expert_parallel_group get_max_expert_size"
    " get_max_expert_size_name get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size"
    " get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size"
    " get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size"
    " get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank"
    " get_tensor_model_parallel_world_size get_zero_param_intra_parallel_group"
    " get_zero_param_intra_parallel_rank_in_mygroup zero_param_parallel_is_initialized"
)
GROUPS = of("dsx.utils.groups", " ".join(f"{prefix}{name}" for prefix in ("", "_") for name in GROUP_NAMES.split()))
ZERO = {
    **of("dsx_zero", "register_external_parameter unregister_external_parameter TiledLinear TiledLinearReturnBias"),
    "GatheredParameters": "dsx_compat.entry:GatheredParameters",
    "Init": "dsx_compat.entry:Init",
    "MiCS_Init": "dsx_compat.entry:Init",
    "unwrap_model_for_generation": "dsx_zero:unwrap_model_for_generation",
    "DeepSpeedZeRoOffload": "dsx_compat.engine:ParameterOffload",
    **of("dsx_compat.values", "ZeroParamStatus ZeroParamType"),
}
SPARSE = of(
    "dsx_sparse_attn",
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig"
    " BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention BertSparseSelfAttention"
    " SparseAttentionUtils MatMul Softmax",
)
BUILDERS = of(
    "dsx_compat.op_builder",
    "OpBuilder AsyncIOBuilder GDSBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder"
    " FusedLambBuilder FusedLionBuilder QuantizerBuilder TransformerBuilder StochasticTransformerBuilder"
    " FPQuantizerBuilder RandomLTDBuilder UtilsBuilder SparseAttnBuilder ShareMemCommBuilder"
    " CCLCommBuilder PinMemoryBuilder DeepCompileBuilder EvoformerAttnBuilder InferenceBuilder"
    " InferenceCoreBuilder InferenceCutlassBuilder RaggedOpsBuilder RaggedUtilsBuilder"
    " SpatialInferenceBuilder",
)
TRANSFORMER = of("dsx_ops", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig")
PIPE = {**of("dsx_pipe", "LayerSpec TiedLayerSpec"), "PipelineModule": "dsx_compat.grid:PipelineModule"}
TOPOLOGY = {
    **of("dsx_pipe", "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology"),
    "PipelineParallelGrid": "dsx_compat.grid:PipelineParallelGrid",
}
SCHEDULES = of(
    "dsx_pipe.schedule.instructions",
    "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction BufferOpInstruction"
    " OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation"
    " RecvActivation SendGrad RecvGrad",
)
MOE_UTILS = of("dsx_moe", "has_moe_layers") | of(
    "dsx_moe.marks",
    "is_moe_param is_moe_param_group split_params_into_shared_and_expert_params"
    " split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer"
    " configure_moe_param_groups",
)
MONITOR = of("dsx_monitor", "MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor CometMonitor")
FLOPS = of(
    "dsx.profiling.flops_profiler",
    "FlopsProfiler get_model_profile number_to_string flops_to_string macs_to_string params_to_string"
    " duration_to_string bytes_to_string",
)
CHECKPOINTING = of(
    "dsx.checkpointing",
    "checkpoint configure is_configured reset set_num_layers partition_activations_in_checkpoint get_cuda_rng_tracker"
    " model_parallel_cuda_manual_seed non_reentrant_checkpoint",
)
COMM = of(
    "dsx_comm",
    "init_distributed is_initialized is_available get_rank get_world_size get_local_rank get_global_rank"
    " get_world_group get_all_ranks_from_group new_group destroy_process_group initialize_mesh_device configure"
    " log_summary barrier monitored_barrier broadcast broadcast_object_list all_gather all_gather_into_tensor"
    " all_gather_object all_gather_coalesced all_reduce all_reduce_coalesced all_to_all all_to_all_single"
    " allgather_fn reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor gather scatter send recv isend irecv"
    " inference_all_reduce has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced"
    " has_coalescing_manager ReduceOp get_backend",
)
ESTIMATE = {
    stage: of("dsx_zero", f"{name} {name}_all_live {name}_all_cold")
    for stage, name in ((n, f"estimate_zero{n}_model_states_mem_needs") for n in (2, 3))
}
ZERO_TO_FP32 = of(
    "dsx_compat.checkpoint.zero_to_fp32",
    "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict"
    " convert_zero_checkpoint_to_state_dict load_state_dict_from_zero_checkpoint get_model_state_file"
    " get_optim_files main",
)
CHECKPOINT_CONSTANTS = of(
    "dsx_compat.values",
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE GROUP_PADDINGS"
    " SINGLE_PARTITION_OF_FP32_GROUPS PARTITION_COUNT ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES"
    " BUFFER_NAMES DS_VERSION FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS MODEL_FILE_PREFIX LAYER_FILE_PREFIX"
    " ZERO_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX"
    " UNIVERSAL_CHECKPOINT_INFO VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS"
    " PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS"
    " PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS",
)
CHECKPOINT_FILES = of(
    "dsx_compat.checkpoint.parts",
    "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
)
MERGE_STATE = of("dsx_compat.checkpoint.parts", "merge_state")
SUBPARAMS = of("dsx_compat.values", "SubparamShape")
GRADIENTS = {
    **of("dsx_compat.gradients", "clip_grad_norm_ get_grad_zeros get_weight_norm CheckOverflow"),
    **of("dsx_ops", "get_global_norm"),
}
LR_CONSTANTS = (
    "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS"
    " WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE TOTAL_NUM_STEPS"
)
LR = {
    **of("dsx_compat.values", LR_CONSTANTS),
    **of(
        "dsx.lr_schedules",
        "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    ),
    **of(
        "dsx_compat.lr_arguments",
        "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config override_params"
        " override_1cycle_params override_lr_range_test_params override_warmupLR_params",
    ),
    "VALID_LR_SCHEDULES": "dsx_compat.values:VALID_LR_SCHEDULES",
}
ADAM = {"DeepSpeedCPUAdam": "dsx_ops:DeepSpeedCPUAdam", "FusedAdam": "dsx_ops:FusedAdam"}
RUNTIME_UTILS = {
    **GRADIENTS,
    **of("dsx.utils", "see_memory_usage partition_uniform partition_balanced set_random_seed move_to_device"),
    "is_model_parallel_parameter": "dsx_compat.values:is_model_parallel_parameter",
}
ELASTICITY_ERRORS = of("dsx.elasticity", "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize")
ELASTICITY = {**of("dsx.elasticity", "compute_elastic_config elasticity_enabled"), **ELASTICITY_ERRORS}
SCALERS = {"LossScaler": "dsx.loss_scaler:StaticScale", "DynamicLossScaler": "dsx.loss_scaler:DynamicScale"}
