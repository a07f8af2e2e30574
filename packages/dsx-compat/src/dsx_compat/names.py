"""Tables that map names of DeepSpeed to names of dsx.

`MODULES` gives the names of each module of DeepSpeed, and for each name where the object is (`module:attribute`, or a
module). `COMMANDS` are the modules that people run with `python -m`. Names that dsx does not have are in `unsupported`.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "MODULES"]


def _of(place: str, names: str) -> dict[str, str]:
    """A table of names that have the same spelling in the module `place`."""
    return {name: f"{place}:{name}" for name in names.split()}


_ENGINE = {
    "DeepSpeedEngine": "dsx_compat.engine:DeepSpeedEngine",
    "DeepSpeedOptimizerCallable": "typing:Callable",
    "DeepSpeedSchedulerCallable": "typing:Callable",
}
_CONFIG = {
    "DeepSpeedConfig": "dsx_compat.getters:DeepSpeedConfig",
    "DeepSpeedConfigError": "dsx.errors:DsxConfigError",
}
_OPTIMIZER = {"DeepSpeedOptimizer": "dsx_zero:ZeroOptimizer", "ZeROOptimizer": "dsx_zero:ZeroOptimizer"}
_LOGGING = _of("dsx.utils", "logger log_dist set_log_level_from_string")
_Z3_LEAF = _of(
    "dsx_zero",
    "set_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
    " unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
)
_FRAGMENTS = _of(
    "dsx_zero",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param"
    " safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad"
    " safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
    " safe_update_full_grad_vectorized",
)
_NVTX = _of("dsx.utils", "instrument_w_nvtx")
_ON_DEVICE = _of("dsx.utils", "OnDevice")
_LOADER = _of("dsx.data", "RepeatingLoader")
_RECURSIVE = _of("dsx_compress", "recursive_getattr recursive_setattr")
_GROUP_NAMES = (
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
_GROUPS = _of("dsx.utils.groups", " ".join(f"{prefix}{name}" for prefix in ("", "_") for name in _GROUP_NAMES.split()))
_ZERO = {
    **_of("dsx_zero", "register_external_parameter unregister_external_parameter TiledLinear TiledLinearReturnBias"),
    "GatheredParameters": "dsx_compat.entry:GatheredParameters",
    "Init": "dsx_compat.entry:Init",
    "MiCS_Init": "dsx_compat.entry:Init",
    "unwrap_model_for_generation": "dsx_zero:unwrap_model_for_generation",
    "DeepSpeedZeRoOffload": "dsx_compat.engine:ParameterOffload",
    **_of("dsx_compat.values", "ZeroParamStatus ZeroParamType"),
}
_SPARSE = _of(
    "dsx_sparse_attn",
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig"
    " BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention BertSparseSelfAttention"
    " SparseAttentionUtils MatMul Softmax",
)
_BUILDERS = _of(
    "dsx_compat.op_builder",
    "OpBuilder AsyncIOBuilder GDSBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder"
    " FusedLambBuilder FusedLionBuilder QuantizerBuilder TransformerBuilder StochasticTransformerBuilder"
    " FPQuantizerBuilder RandomLTDBuilder UtilsBuilder SparseAttnBuilder ShareMemCommBuilder"
    " CCLCommBuilder PinMemoryBuilder DeepCompileBuilder EvoformerAttnBuilder InferenceBuilder"
    " InferenceCoreBuilder InferenceCutlassBuilder RaggedOpsBuilder RaggedUtilsBuilder"
    " SpatialInferenceBuilder",
)
_TRANSFORMER = _of("dsx_ops", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig")
_PIPE = {**_of("dsx_pipe", "LayerSpec TiedLayerSpec"), "PipelineModule": "dsx_compat.grid:PipelineModule"}
_TOPOLOGY = {
    **_of("dsx_pipe", "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology"),
    "PipelineParallelGrid": "dsx_compat.grid:PipelineParallelGrid",
}
_SCHEDULES = _of(
    "dsx_pipe.schedule.instructions",
    "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction BufferOpInstruction"
    " OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation"
    " RecvActivation SendGrad RecvGrad",
)
_MOE_UTILS = _of("dsx_moe", "has_moe_layers") | _of(
    "dsx_moe.marks",
    "is_moe_param is_moe_param_group split_params_into_shared_and_expert_params"
    " split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer"
    " configure_moe_param_groups",
)
_MONITOR = _of("dsx_monitor", "MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor CometMonitor")
_FLOPS = _of(
    "dsx.profiling.flops_profiler",
    "FlopsProfiler get_model_profile number_to_string flops_to_string macs_to_string params_to_string"
    " duration_to_string bytes_to_string",
)
_CHECKPOINTING = _of(
    "dsx.checkpointing",
    "checkpoint configure is_configured reset set_num_layers partition_activations_in_checkpoint get_cuda_rng_tracker"
    " model_parallel_cuda_manual_seed non_reentrant_checkpoint",
)
_COMM = _of(
    "dsx_comm",
    "init_distributed is_initialized is_available get_rank get_world_size get_local_rank get_global_rank"
    " get_world_group get_all_ranks_from_group new_group destroy_process_group initialize_mesh_device configure"
    " log_summary barrier monitored_barrier broadcast broadcast_object_list all_gather all_gather_into_tensor"
    " all_gather_object all_gather_coalesced all_reduce all_reduce_coalesced all_to_all all_to_all_single"
    " allgather_fn reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor gather scatter send recv isend irecv"
    " inference_all_reduce has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced"
    " has_coalescing_manager ReduceOp get_backend",
)
_ESTIMATE = {
    stage: _of("dsx_zero", f"{name} {name}_all_live {name}_all_cold")
    for stage, name in ((n, f"estimate_zero{n}_model_states_mem_needs") for n in (2, 3))
}
_ZERO_TO_FP32 = _of(
    "dsx_compat.checkpoint.zero_to_fp32",
    "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict"
    " convert_zero_checkpoint_to_state_dict load_state_dict_from_zero_checkpoint get_model_state_file"
    " get_optim_files main",
)
_CHECKPOINT_CONSTANTS = _of(
    "dsx_compat.values",
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE GROUP_PADDINGS"
    " SINGLE_PARTITION_OF_FP32_GROUPS PARTITION_COUNT ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES"
    " BUFFER_NAMES DS_VERSION FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS MODEL_FILE_PREFIX LAYER_FILE_PREFIX"
    " ZERO_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX"
    " UNIVERSAL_CHECKPOINT_INFO VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS"
    " PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS"
    " PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS",
)
_CHECKPOINT_FILES = _of(
    "dsx_compat.checkpoint.parts",
    "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
)
_MERGE_STATE = _of("dsx_compat.checkpoint.parts", "merge_state")
_SUBPARAMS = _of("dsx_compat.values", "SubparamShape")
_GRADIENTS = {
    **_of("dsx_compat.gradients", "clip_grad_norm_ get_grad_zeros get_weight_norm CheckOverflow"),
    **_of("dsx_ops", "get_global_norm"),
}
_LR_CONSTANTS = (
    "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS"
    " WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE TOTAL_NUM_STEPS"
)
_LR = {
    **_of("dsx_compat.values", _LR_CONSTANTS),
    **_of(
        "dsx.lr_schedules",
        "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    ),
    **_of(
        "dsx_compat.lr_arguments",
        "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config override_params"
        " override_1cycle_params override_lr_range_test_params override_warmupLR_params",
    ),
    "VALID_LR_SCHEDULES": "dsx_compat.values:VALID_LR_SCHEDULES",
}
_ADAM = {"DeepSpeedCPUAdam": "dsx_ops:DeepSpeedCPUAdam", "FusedAdam": "dsx_ops:FusedAdam"}
_RUNTIME_UTILS = {
    **_GRADIENTS,
    **_of("dsx.utils", "see_memory_usage partition_uniform partition_balanced set_random_seed move_to_device"),
    "is_model_parallel_parameter": "dsx_compat.values:is_model_parallel_parameter",
}
_ELASTICITY_ERRORS = _of("dsx.elasticity", "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize")
_ELASTICITY = {**_of("dsx.elasticity", "compute_elastic_config elasticity_enabled"), **_ELASTICITY_ERRORS}
_SCALERS = {"LossScaler": "dsx.loss_scaler:StaticScale", "DynamicLossScaler": "dsx.loss_scaler:DynamicScale"}

MODULES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "initialize": "dsx_compat.entry:initialize",
        **_of("dsx_compat.slicing", "tp_model_init set_autotp_mode"),
        "init_distributed": "dsx_comm:init_distributed",
        "add_config_arguments": "dsx_compat.arguments:add_config_arguments",
        "add_tuning_arguments": "dsx_compat.lr_arguments:add_tuning_arguments",
        "get_accelerator": "dsx_compat.accelerator:get_accelerator",
        **_ENGINE,
        **_CONFIG,
        "DeepSpeedOptimizer": _OPTIMIZER["DeepSpeedOptimizer"],
        "PipelineEngine": "dsx_compat.engine:PipelineEngine",
        "PipelineModule": _PIPE["PipelineModule"],
        **_TRANSFORMER,
        **_of("dsx.utils", "log_dist logger OnDevice"),
        "checkpointing": "dsx.checkpointing",
        "dist": "deepspeed.comm",
    },
    "deepspeed.accelerator": _of(
        "dsx_compat.accelerator", "get_accelerator set_accelerator is_current_accelerator_supported"
    ),
    "deepspeed.accelerator.real_accelerator": _of("dsx_compat.accelerator", "get_accelerator set_accelerator"),
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": "dsx_compat.accelerator:Accelerator"},
    "deepspeed.accelerator.cpu_accelerator": {"CPU_Accelerator": "dsx_compat.accelerator:CPUAccelerator"},
    "deepspeed.accelerator.cuda_accelerator": {"CUDA_Accelerator": "dsx_compat.accelerator:CUDAAccelerator"},
    "deepspeed.autotuning": _of("dsx.autotuning", "Autotuner"),
    "deepspeed.checkpoint": {**_CHECKPOINT_CONSTANTS, **_CHECKPOINT_FILES, **_MERGE_STATE, **_SUBPARAMS},
    "deepspeed.checkpoint.constants": _CHECKPOINT_CONSTANTS,
    "deepspeed.checkpoint.reshape_utils": _MERGE_STATE,
    "deepspeed.checkpoint.universal_checkpoint": _SUBPARAMS,
    "deepspeed.checkpoint.utils": {**_of("dsx.utils", "clone_tensors_for_torch_save"), **_CHECKPOINT_FILES},
    "deepspeed.checkpoint.ds_to_universal": {"main": "dsx_compat.checkpoint.ds_to_universal:main"},
    "deepspeed.elasticity": _ELASTICITY,
    "deepspeed.elasticity.config": {
        **_ELASTICITY_ERRORS,
        "ElasticityConfig": "dsx_compat.getters:ElasticityConfig",
    },
    "deepspeed.elasticity.elasticity": _ELASTICITY,
    "deepspeed.comm": {
        **_COMM,
        "ProcessGroup": "torch.distributed:ProcessGroup",
        "TorchBackend": "dsx_compat.values:TorchBackend",
    },
    "deepspeed.comm.comm": _COMM,
    "deepspeed.comm.torch": {"TorchBackend": "dsx_compat.values:TorchBackend"},
    "deepspeed.compression": {},
    "deepspeed.compression.compress": _of("dsx_compress", "init_compression redundancy_clean student_initialization"),
    "deepspeed.compression.helper": {**_RECURSIVE, **_of("dsx_compress", "convert_conv1d_to_linear get_module_name")},
    "deepspeed.compression.scheduler": {"compression_scheduler": "dsx_compress:compression_scheduler"},
    "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": "dsx_compat.values:TORCH_DISTRIBUTED_DEFAULT_PORT"},
    "deepspeed.env_report": {"main": "dsx_compat.commands:ds_report", "cli_main": "dsx_compat.commands:ds_report"},
    "deepspeed.git_version_info": _of("dsx_compat.values", "version git_hash git_branch"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.constants": _of(
        "dsx_compat.values",
        "PDSH_LAUNCHER PDSH_MAX_FAN_OUT OPENMPI_LAUNCHER MPICH_LAUNCHER IMPI_LAUNCHER SLURM_LAUNCHER MVAPICH_LAUNCHER"
        " MVAPICH_TMP_HOSTFILE",
    ),
    "deepspeed.launcher.runner": {
        "main": "dsx_compat.commands:deepspeed",
        **_of("dsx_compat.values", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE EXPORT_ENVS"),
    },
    "deepspeed.module_inject": {},
    "deepspeed.module_inject.layers": _of("dsx_compat.slicing", "set_autotp_mode"),
    "deepspeed.moe": {},
    "deepspeed.moe.layer": _of("dsx_compat.moe", "MoE"),
    "deepspeed.moe.sharded_moe": {
        **_of("dsx_moe.gate", "TopKGate"),
        **_of("dsx_compat.moe", "top1gating top2gating topkgating"),
    },
    "deepspeed.moe.experts": _of("dsx_moe", "Experts"),
    "deepspeed.moe.utils": _MOE_UTILS,
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": _of("dsx_monitor", "MonitorMaster"),
    "deepspeed.monitor.config": {
        "DeepSpeedMonitorConfig": "dsx_monitor:MonitorConfig",
        **_of("dsx_monitor.config", "TensorBoardConfig WandbConfig CSVConfig CometConfig"),
    },
    "deepspeed.monitor.tensorboard": _of("dsx_monitor", "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": _of("dsx_monitor", "WandbMonitor"),
    "deepspeed.monitor.csv_monitor": _of("dsx_monitor", "csvMonitor"),
    "deepspeed.monitor.comet": _of("dsx_monitor", "CometMonitor"),
    "deepspeed.nvme": {},
    "deepspeed.ops": {**_TRANSFORMER, "__compatible_ops__": "dsx_compat.op_builder:COMPATIBLE_OPS"},
    "deepspeed.ops.adagrad": _of("dsx_ops", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": _ADAM["DeepSpeedCPUAdam"]},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": _ADAM["FusedAdam"]},
    "deepspeed.ops.aio": {"AsyncIOBuilder": "dsx_nvme:AsyncIOBuilder"},
    "deepspeed.ops.gds": {"GDSBuilder": "dsx_nvme:GDSBuilder"},
    "deepspeed.ops.lamb": _of("dsx_ops", "FusedLamb"),
    "deepspeed.ops.lion": _of("dsx_ops", "DeepSpeedCPULion FusedLion"),
    "deepspeed.ops.op_builder": _BUILDERS,
    "deepspeed.ops.quantizer": _of("dsx_ops", "ds_quantizer"),
    "deepspeed.ops.sparse_attention": _SPARSE,
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": _of("dsx_sparse_attn", "BertSparseSelfAttention"),
    "deepspeed.ops.sparse_attention.matmul": _of("dsx_sparse_attn", "MatMul"),
    "deepspeed.ops.sparse_attention.softmax": _of("dsx_sparse_attn", "Softmax"),
    "deepspeed.ops.sparse_attention.sparse_attention_utils": _of("dsx_sparse_attn", "SparseAttentionUtils"),
    "deepspeed.ops.sparse_attention.sparse_self_attention": _of("dsx_sparse_attn", "SparseSelfAttention"),
    "deepspeed.ops.sparse_attention.sparsity_config": {n: p for n, p in _SPARSE.items() if n.endswith("Config")},
    "deepspeed.ops.transformer": _TRANSFORMER,
    "deepspeed.pipe": {**_PIPE, **_TOPOLOGY},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _FLOPS,
    "deepspeed.profiling.flops_profiler.profiler": _FLOPS,
    "deepspeed.runtime": {**_OPTIMIZER},
    "deepspeed.runtime.activation_checkpointing": {"checkpointing": "dsx.checkpointing"},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": _OPTIMIZER,
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "dsx_zero:ZeroOptimizer"},
    "deepspeed.runtime.config": {
        **_CONFIG,
        **_of(
            "dsx_compat.values",
            "ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER ONEBIT_ADAM_OPTIMIZER"
            " ZERO_ONE_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER MUON_OPTIMIZER DEEPSPEED_OPTIMIZERS",
        ),
    },
    "deepspeed.runtime.constants": _of("dsx_compat.values", "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE"),
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": _of("dsx_data", "CurriculumScheduler"),
    "deepspeed.runtime.data_pipeline.data_routing": {},
    "deepspeed.runtime.data_pipeline.data_routing.helper": _of(
        "dsx_data.routing", "convert_to_random_ltd save_without_random_ltd remove_random_ltd"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": _of("dsx_data", "RandomLTDScheduler"),
    "deepspeed.runtime.data_pipeline.data_sampling": {},
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": _of(
        "dsx_data", "DataAnalyzer DistributedDataAnalyzer"
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {
        "DeepSpeedDataSampler": "dsx_data:CurriculumSampler"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": _of(
        "dsx_data.index", "MMapIndexedDataset MMapIndexedDatasetBuilder"
    ),
    "deepspeed.runtime.dataloader": _LOADER,
    "deepspeed.runtime.engine": {
        **_ENGINE,
        **_of("dsx_compat.values", "ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER"),
        **_of("dsx_compat.getters", "autocast_if_enabled"),
    },
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": "dsx_zero:ZeroOptimizer"},
    "deepspeed.runtime.fp16.loss_scaler": _SCALERS,
    "deepspeed.runtime.fp16.onebit": _of("dsx_comm.onebit", "OnebitAdam OnebitLamb ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": _of("dsx_comm.onebit", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": _of("dsx_comm.onebit", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": _of("dsx_comm", "ZeroOneAdam"),
    "deepspeed.runtime.lr_schedules": _LR,
    "deepspeed.runtime.pipe": {**_PIPE, **_TOPOLOGY},
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": "dsx_compat.engine:PipelineEngine"},
    "deepspeed.runtime.pipe.module": {**_PIPE, "PipelineError": "dsx_pipe:PipelineError"},
    "deepspeed.runtime.pipe.schedule": _SCHEDULES,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.progressive_layer_drop": _of("dsx_data", "ProgressiveLayerDrop"),
    "deepspeed.runtime.eigenvalue": _of("dsx_monitor", "Eigenvalue"),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel": "dsx_compat.sequence:initialize_sequence_parallel",
        **_of(
            "dsx_comm.parallel_groups",
            "get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size"
            " get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size"
            " get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size",
        ),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **_of("dsx_compat.sequence", "TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **_of("dsx_activations", "SequenceTiledCompute sequence_tiled_compute TiledFusedLogitsLoss"),
    },
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": _of("dsx_compat.sequence", "DistributedAttention"),
    "deepspeed.runtime.sparse_tensor": _of("dsx_compat.sparse_tensor", "SparseTensor"),
    "deepspeed.runtime.utils": _RUNTIME_UTILS,
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {
        "DeepSpeedZeroConfig": "dsx_zero.config:ZeroConfig",
        "ZeroStageEnum": "dsx_compat.values:ZeroStageEnum",
    },
    "deepspeed.runtime.zero.mics": {"MiCS_Init": "dsx_compat.entry:Init"},
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": "dsx_compat.values:OffloadDeviceEnum",
        "OffloadStateTypeEnum": "dsx_zero:OffloadStateTypeEnum",
    },
    "deepspeed.runtime.zero.parameter_offload": {"DeepSpeedZeRoOffload": "dsx_compat.engine:ParameterOffload"},
    "deepspeed.runtime.zero.partition_parameters": {
        **{n: t for n, t in _ZERO.items() if not n.startswith(("Tiled", "unwrap", "DeepSpeedZ"))},
        **_of("dsx_compat.values", "zero_wrapper_for_fp_tensor_constructor"),
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "dsx_compat.accelerator:get_accelerator",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": "dsx_zero:ZeroOptimizer", **_ESTIMATE[2]},
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "dsx_zero:ZeroOptimizer",
        "unwrap_model_for_generation": _ZERO["unwrap_model_for_generation"],
        **_ESTIMATE[3],
    },
    "deepspeed.runtime.zero.tiling": _of("dsx_zero", "TiledLinear TiledLinearReturnBias"),
    "deepspeed.runtime.zero.utils": {"is_zero_param": "dsx_compat.parameters:is_zero_param"},
    "deepspeed.utils": {
        **_LOGGING,
        **_ON_DEVICE,
        **_NVTX,
        **_GROUPS,
        **_FRAGMENTS,
        **_Z3_LEAF,
        **_LOADER,
        **_RECURSIVE,
        "is_initialized": "dsx_comm:is_initialized",
    },
    "deepspeed.utils.comms_logging": {
        "calc_bw_log": "dsx_compat.figures:calc_bw_log",
        "convert_size": "dsx_comm.bandwidth:size_text",
    },
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.init_on_device": _ON_DEVICE,
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.module_utils": _RECURSIVE,
    "deepspeed.utils.nvtx": _NVTX,
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.timer": {
        **_of("dsx_monitor", "ThroughputTimer"),
        **_of("dsx_compat.timer", "SynchronizedWallClockTimer"),
    },
    "deepspeed.utils.torch": _of("dsx_compat.values", "required_torch_version"),
    "deepspeed.utils.z3_leaf_module": _Z3_LEAF,
    "deepspeed.utils.zero_to_fp32": _ZERO_TO_FP32,
    "deepspeed.utils.zero_to_torch": {"main": "dsx_compat.checkpoint.zero_to_torch:main"},
}
MODULES["deepspeed.zero"] = _ZERO

COMMANDS = {
    "deepspeed.launcher.runner": "dsx_compat.commands:deepspeed",
    "deepspeed.env_report": "dsx_compat.commands:ds_report",
    "deepspeed.checkpoint.ds_to_universal": "dsx_compat.checkpoint.ds_to_universal:main",
    "deepspeed.utils.zero_to_fp32": "dsx_compat.checkpoint.zero_to_fp32:main",
    "deepspeed.utils.zero_to_torch": "dsx_compat.checkpoint.zero_to_torch:main",
}
