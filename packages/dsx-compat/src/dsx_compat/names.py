"""Tables that map names of DeepSpeed to names of dsx.

`MODULES` gives the names of each module of DeepSpeed, and for each name where the object is (`module:attribute`, or a
module). `COMMANDS` are the modules that people run with `python -m`. Names that dsx does not have are in `unsupported`.
"""

from __future__ import annotations

from . import name_groups as groups
from .name_groups import of

__all__ = ["COMMANDS", "MODULES"]

MODULES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "initialize": "dsx_compat.entry:initialize",
        **of("dsx_compat.slicing", "tp_model_init set_autotp_mode"),
        "init_distributed": "dsx_comm:init_distributed",
        "add_config_arguments": "dsx_compat.arguments:add_config_arguments",
        "add_tuning_arguments": "dsx_compat.lr_arguments:add_tuning_arguments",
        "get_accelerator": "dsx_compat.accelerator:get_accelerator",
        **groups.ENGINE,
        **groups.CONFIG,
        "DeepSpeedOptimizer": groups.OPTIMIZER["DeepSpeedOptimizer"],
        "PipelineEngine": "dsx_compat.engine:PipelineEngine",
        "PipelineModule": groups.PIPE["PipelineModule"],
        **groups.TRANSFORMER,
        **of("dsx.utils", "log_dist logger OnDevice"),
        "checkpointing": "dsx.checkpointing",
        "dist": "deepspeed.comm",
    },
    "deepspeed.accelerator": of(
        "dsx_compat.accelerator", "get_accelerator set_accelerator is_current_accelerator_supported"
    ),
    "deepspeed.accelerator.real_accelerator": of("dsx_compat.accelerator", "get_accelerator set_accelerator"),
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": "dsx_compat.accelerator:Accelerator"},
    "deepspeed.accelerator.cpu_accelerator": {"CPU_Accelerator": "dsx_compat.accelerator:CPUAccelerator"},
    "deepspeed.accelerator.cuda_accelerator": {"CUDA_Accelerator": "dsx_compat.accelerator:CUDAAccelerator"},
    "deepspeed.autotuning": of("dsx.autotuning", "Autotuner"),
    "deepspeed.checkpoint": {
        **groups.CHECKPOINT_CONSTANTS,
        **groups.CHECKPOINT_FILES,
        **groups.MERGE_STATE,
        **groups.SUBPARAMS,
    },
    "deepspeed.checkpoint.constants": groups.CHECKPOINT_CONSTANTS,
    "deepspeed.checkpoint.reshape_utils": groups.MERGE_STATE,
    "deepspeed.checkpoint.universal_checkpoint": groups.SUBPARAMS,
    "deepspeed.checkpoint.utils": {**of("dsx.utils", "clone_tensors_for_torch_save"), **groups.CHECKPOINT_FILES},
    "deepspeed.checkpoint.ds_to_universal": {"main": "dsx_compat.checkpoint.ds_to_universal:main"},
    "deepspeed.elasticity": groups.ELASTICITY,
    "deepspeed.elasticity.config": {
        **groups.ELASTICITY_ERRORS,
        "ElasticityConfig": "dsx_compat.getters:ElasticityConfig",
    },
    "deepspeed.elasticity.elasticity": groups.ELASTICITY,
    "deepspeed.comm": {
        **groups.COMM,
        "ProcessGroup": "torch.distributed:ProcessGroup",
        "TorchBackend": "dsx_compat.values:TorchBackend",
    },
    "deepspeed.comm.comm": groups.COMM,
    "deepspeed.comm.torch": {"TorchBackend": "dsx_compat.values:TorchBackend"},
    "deepspeed.compression": {},
    "deepspeed.compression.compress": of("dsx_compress", "init_compression redundancy_clean student_initialization"),
    "deepspeed.compression.helper": {
        **groups.RECURSIVE,
        **of("dsx_compress", "convert_conv1d_to_linear get_module_name"),
    },
    "deepspeed.compression.scheduler": {"compression_scheduler": "dsx_compress:compression_scheduler"},
    "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": "dsx_compat.values:TORCH_DISTRIBUTED_DEFAULT_PORT"},
    "deepspeed.env_report": {"main": "dsx_compat.commands:ds_report", "cli_main": "dsx_compat.commands:ds_report"},
    "deepspeed.git_version_info": of("dsx_compat.values", "version git_hash git_branch"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.constants": of(
        "dsx_compat.values",
        "PDSH_LAUNCHER PDSH_MAX_FAN_OUT OPENMPI_LAUNCHER MPICH_LAUNCHER IMPI_LAUNCHER SLURM_LAUNCHER MVAPICH_LAUNCHER"
        " MVAPICH_TMP_HOSTFILE",
    ),
    "deepspeed.launcher.runner": {
        "main": "dsx_compat.commands:deepspeed",
        **of("dsx_compat.values", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE EXPORT_ENVS"),
    },
    "deepspeed.module_inject": {},
    "deepspeed.module_inject.layers": of("dsx_compat.slicing", "set_autotp_mode"),
    "deepspeed.moe": {},
    "deepspeed.moe.layer": of("dsx_compat.moe", "MoE"),
    "deepspeed.moe.sharded_moe": {
        **of("dsx_moe.gate", "TopKGate"),
        **of("dsx_compat.moe", "top1gating top2gating topkgating"),
    },
    "deepspeed.moe.experts": of("dsx_moe", "Experts"),
    "deepspeed.moe.utils": groups.MOE_UTILS,
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": of("dsx_monitor", "MonitorMaster"),
    "deepspeed.monitor.config": {
        "DeepSpeedMonitorConfig": "dsx_monitor:MonitorConfig",
        **of("dsx_monitor.config", "TensorBoardConfig WandbConfig CSVConfig CometConfig"),
    },
    "deepspeed.monitor.tensorboard": of("dsx_monitor", "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": of("dsx_monitor", "WandbMonitor"),
    "deepspeed.monitor.csv_monitor": of("dsx_monitor", "csvMonitor"),
    "deepspeed.monitor.comet": of("dsx_monitor", "CometMonitor"),
    "deepspeed.nvme": {},
    "deepspeed.ops": {**groups.TRANSFORMER, "__compatible_ops__": "dsx_compat.op_builder:COMPATIBLE_OPS"},
    "deepspeed.ops.adagrad": of("dsx_ops", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": groups.ADAM,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": groups.ADAM["DeepSpeedCPUAdam"]},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": groups.ADAM["FusedAdam"]},
    "deepspeed.ops.aio": {"AsyncIOBuilder": "dsx_nvme:AsyncIOBuilder"},
    "deepspeed.ops.gds": {"GDSBuilder": "dsx_nvme:GDSBuilder"},
    "deepspeed.ops.lamb": of("dsx_ops", "FusedLamb"),
    "deepspeed.ops.lion": of("dsx_ops", "DeepSpeedCPULion FusedLion"),
    "deepspeed.ops.op_builder": groups.BUILDERS,
    "deepspeed.ops.quantizer": of("dsx_ops", "ds_quantizer"),
    "deepspeed.ops.sparse_attention": groups.SPARSE,
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": of("dsx_sparse_attn", "BertSparseSelfAttention"),
    "deepspeed.ops.sparse_attention.matmul": of("dsx_sparse_attn", "MatMul"),
    "deepspeed.ops.sparse_attention.softmax": of("dsx_sparse_attn", "Softmax"),
    "deepspeed.ops.sparse_attention.sparse_attention_utils": of("dsx_sparse_attn", "SparseAttentionUtils"),
    "deepspeed.ops.sparse_attention.sparse_self_attention": of("dsx_sparse_attn", "SparseSelfAttention"),
    "deepspeed.ops.sparse_attention.sparsity_config": {n: p for n, p in groups.SPARSE.items() if n.endswith("Config")},
    "deepspeed.ops.transformer": groups.TRANSFORMER,
    "deepspeed.pipe": {**groups.PIPE, **groups.TOPOLOGY},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": groups.FLOPS,
    "deepspeed.profiling.flops_profiler.profiler": groups.FLOPS,
    "deepspeed.runtime": {**groups.OPTIMIZER},
    "deepspeed.runtime.activation_checkpointing": {"checkpointing": "dsx.checkpointing"},
    "deepspeed.runtime.activation_checkpointing.checkpointing": groups.CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": groups.OPTIMIZER,
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "dsx_zero:ZeroOptimizer"},
    "deepspeed.runtime.config": {
        **groups.CONFIG,
        **of(
            "dsx_compat.values",
            "ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER ONEBIT_ADAM_OPTIMIZER"
            " ZERO_ONE_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER MUON_OPTIMIZER DEEPSPEED_OPTIMIZERS",
        ),
    },
    "deepspeed.runtime.constants": of("dsx_compat.values", "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE"),
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": of("dsx_data", "CurriculumScheduler"),
    "deepspeed.runtime.data_pipeline.data_routing": {},
    "deepspeed.runtime.data_pipeline.data_routing.helper": of(
        "dsx_data.routing", "convert_to_random_ltd save_without_random_ltd remove_random_ltd"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": of("dsx_data", "RandomLTDScheduler"),
    "deepspeed.runtime.data_pipeline.data_sampling": {},
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": of(
        "dsx_data", "DataAnalyzer DistributedDataAnalyzer"
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {
        "DeepSpeedDataSampler": "dsx_data:CurriculumSampler"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": of(
        "dsx_data.index", "MMapIndexedDataset MMapIndexedDatasetBuilder"
    ),
    "deepspeed.runtime.dataloader": groups.LOADER,
    "deepspeed.runtime.engine": {
        **groups.ENGINE,
        **of("dsx_compat.values", "ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER"),
        **of("dsx_compat.getters", "autocast_if_enabled"),
    },
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": "dsx_zero:ZeroOptimizer"},
    "deepspeed.runtime.fp16.loss_scaler": groups.SCALERS,
    "deepspeed.runtime.fp16.onebit": of("dsx_comm.onebit", "OnebitAdam OnebitLamb ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": of("dsx_comm.onebit", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": of("dsx_comm.onebit", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": of("dsx_comm", "ZeroOneAdam"),
    "deepspeed.runtime.lr_schedules": groups.LR,
    "deepspeed.runtime.pipe": {**groups.PIPE, **groups.TOPOLOGY},
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": "dsx_compat.engine:PipelineEngine"},
    "deepspeed.runtime.pipe.module": {**groups.PIPE, "PipelineError": "dsx_pipe:PipelineError"},
    "deepspeed.runtime.pipe.schedule": groups.SCHEDULES,
    "deepspeed.runtime.pipe.topology": groups.TOPOLOGY,
    "deepspeed.runtime.progressive_layer_drop": of("dsx_data", "ProgressiveLayerDrop"),
    "deepspeed.runtime.eigenvalue": of("dsx_monitor", "Eigenvalue"),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel": "dsx_compat.sequence:initialize_sequence_parallel",
        **of(
            "dsx_comm.parallel_groups",
            "get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size"
            " get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size"
            " get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size",
        ),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **of("dsx_compat.sequence", "TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **of("dsx_activations", "SequenceTiledCompute sequence_tiled_compute TiledFusedLogitsLoss"),
    },
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": of("dsx_compat.sequence", "DistributedAttention"),
    "deepspeed.runtime.sparse_tensor": of("dsx_compat.sparse_tensor", "SparseTensor"),
    "deepspeed.runtime.utils": groups.RUNTIME_UTILS,
    "deepspeed.runtime.zero": groups.ZERO,
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
        **{n: t for n, t in groups.ZERO.items() if not n.startswith(("Tiled", "unwrap", "DeepSpeedZ"))},
        **of("dsx_compat.values", "zero_wrapper_for_fp_tensor_constructor"),
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "dsx_compat.accelerator:get_accelerator",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": "dsx_zero:ZeroOptimizer", **groups.ESTIMATE[2]},
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "dsx_zero:ZeroOptimizer",
        "unwrap_model_for_generation": groups.ZERO["unwrap_model_for_generation"],
        **groups.ESTIMATE[3],
    },
    "deepspeed.runtime.zero.tiling": of("dsx_zero", "TiledLinear TiledLinearReturnBias"),
    "deepspeed.runtime.zero.utils": {"is_zero_param": "dsx_compat.parameters:is_zero_param"},
    "deepspeed.utils": {
        **groups.LOGGING,
        **groups.ON_DEVICE,
        **groups.NVTX,
        **groups.GROUPS,
        **groups.FRAGMENTS,
        **groups.Z3_LEAF,
        **groups.LOADER,
        **groups.RECURSIVE,
        "is_initialized": "dsx_comm:is_initialized",
    },
    "deepspeed.utils.comms_logging": {
        "calc_bw_log": "dsx_compat.figures:calc_bw_log",
        "convert_size": "dsx_comm.bandwidth:size_text",
    },
    "deepspeed.utils.groups": groups.GROUPS,
    "deepspeed.utils.init_on_device": groups.ON_DEVICE,
    "deepspeed.utils.logging": groups.LOGGING,
    "deepspeed.utils.module_utils": groups.RECURSIVE,
    "deepspeed.utils.nvtx": groups.NVTX,
    "deepspeed.utils.tensor_fragment": groups.FRAGMENTS,
    "deepspeed.utils.timer": {
        **of("dsx_monitor", "ThroughputTimer"),
        **of("dsx_compat.timer", "SynchronizedWallClockTimer"),
    },
    "deepspeed.utils.torch": of("dsx_compat.values", "required_torch_version"),
    "deepspeed.utils.z3_leaf_module": groups.Z3_LEAF,
    "deepspeed.utils.zero_to_fp32": groups.ZERO_TO_FP32,
    "deepspeed.utils.zero_to_torch": {"main": "dsx_compat.checkpoint.zero_to_torch:main"},
}
MODULES["deepspeed.zero"] = groups.ZERO

COMMANDS = {
    "deepspeed.launcher.runner": "dsx_compat.commands:deepspeed",
    "deepspeed.env_report": "dsx_compat.commands:ds_report",
    "deepspeed.checkpoint.ds_to_universal": "dsx_compat.checkpoint.ds_to_universal:main",
    "deepspeed.utils.zero_to_fp32": "dsx_compat.checkpoint.zero_to_fp32:main",
    "deepspeed.utils.zero_to_torch": "dsx_compat.checkpoint.zero_to_torch:main",
}
