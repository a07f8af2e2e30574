"""Names of DeepSpeed that dsx does not have, and what to use instead: single names by module, whole modules, and
members of the engine.

A module of the second table may have some names in `names.MODULES`; the advice is for the others.
"""

from __future__ import annotations

__all__ = ["UNSUPPORTED", "UNSUPPORTED_MEMBERS", "UNSUPPORTED_MODULES", "UNSUPPORTED_PIPELINE_MEMBERS"]

_SERVING = "dsx trains; serve the saved weights with an inference engine such as vLLM"
_SLICING = "set tensor_parallel.autotp_size in the configuration, or slice layers with dsx_pipe.tensor"
_CHUNKS = "call dsx_activations.sequence_attention, whose memory is linear in the length"
_LOSS = "dsx_activations.linear_cross_entropy and token_mean compute the loss of sequence shards"
_LAUNCHER = (
    "the command deepspeed takes --launcher pdsh, openmpi, mpich, impi, mvapich or slurm;"
    " dsx_launch.runners.BUILDERS holds a function for each of them that makes the commands"
)
_COMMS_LOG = (
    "the log is part of the communication package: deepspeed.comm.configure(enabled=True), then"
    " deepspeed.comm.log_summary()"
)
_COMPRESSED = "layers keep their classes: compress.init_compression(model, config) puts the techniques on them"
_READ_CHECKPOINT = (
    "read weights with deepspeed.utils.zero_to_fp32; engine.load_checkpoint loads at any number of ranks, without a"
    " conversion"
)
_SAVES = "dsx writes its own format by engine.save_checkpoint; the section checkpoint of the configuration says how"
_PASSES = "graph passes are not available yet; engine.compile() compiles unit by unit"
_REDUCE = (
    "backward and step reduce the gradients, and engine.allreduce_gradients() does by hand; for other tensors call"
    " deepspeed.comm.all_reduce"
)
_SPARSE_REDUCE = (
    "set sparse_gradients in the configuration, and backward sends the gradients of embeddings sparse; for other"
    " tensors call deepspeed.comm.all_gather"
)

UNSUPPORTED: dict[str, dict[str, str]] = {
    "deepspeed": {
        "init_inference": _SERVING,
        "InferenceEngine": _SERVING,
        "DeepSpeedInferenceConfig": _SERVING,
        "replace_transformer_layer": _SERVING,
        "revert_transformer_layer": _SERVING,
        "DeepSpeedHybridEngine": "generate with deepspeed.zero.unwrap_model_for_generation(engine)",
        "DualPipeVEngine": "use a schedule of dsx_pipe such as 'zbv'",
        "DualPipeVModule": "use a schedule of dsx_pipe such as 'zbv'",
        "DeepSpeedDataLoader": "engine.deepspeed_io(dataset) makes the loader",
        "ADAM_OPTIMIZER": "import it from deepspeed.runtime.config",
        "MUON_OPTIMIZER": "import it from deepspeed.runtime.config",
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint": _READ_CHECKPOINT,
        "ZeROCheckpoint": _READ_CHECKPOINT,
        "get_model_3d_descriptor": _READ_CHECKPOINT,
        "model_3d_desc": _READ_CHECKPOINT,
        "reshape_meg_2d_parallel": _READ_CHECKPOINT,
        "enable_universal_checkpoint": _READ_CHECKPOINT,
        "NeoxCheckpoint": _READ_CHECKPOINT,
    },
    "deepspeed.checkpoint.universal_checkpoint": {
        "enable_universal_checkpoint": _READ_CHECKPOINT,
        "load_hp_checkpoint_state": _READ_CHECKPOINT,
    },
    "deepspeed.utils.comms_logging": {"CommsLogger": _COMMS_LOG},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "CheckpointFunction": "call checkpointing.checkpoint(function, *args)"
    },
    "deepspeed.runtime.dataloader": {"DeepSpeedDataLoader": "engine.deepspeed_io(dataset) makes the loader"},
    "deepspeed.runtime.fp16.loss_scaler": {
        "CreateLossScaler": "set fp16 in the configuration; engine.optimizer.loss_scaler shows the scale"
    },
    "deepspeed.runtime.utils": {
        "DummyOptim": "give initialize no optimizer: then the engine trains nothing",
        "PartitionedTensor": "set activation_checkpointing.partition_activations in the configuration",
        "align_dense_tensors": "deepspeed.utils.safe_get_local_fp32_param reads a rank's part of a parameter",
        "all_gather_dp_groups": "the step gathers the parameters; deepspeed.zero.GatheredParameters does by hand",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "_init_external_params": "deepspeed.zero.register_external_parameter is enough"
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "AutogradComputeMLP": "use TiledMLP with one shard",
    },
    "deepspeed.sequence.layer": {
        "_DimZeroAllToAll": "call dsx_activations.UlyssesAttention, which exchanges heads and tokens by itself",
        "UlyssesAttention": "use deepspeed.sequence.layer.DistributedAttention, or dsx_activations.UlyssesAttention",
    },
    "deepspeed.ops.adam": {"ZenFlowCPUAdam": "ZenFlow is not available; use offload_optimizer with DeepSpeedCPUAdam"},
}

UNSUPPORTED_MODULES: dict[str, str] = {
    "deepspeed.sequence.auto_sp": "set sequence_parallel_size in the configuration; the model needs no graph",
    "deepspeed.sequence.cross_entropy": _LOSS,
    "deepspeed.sequence.fpdt_layer": _CHUNKS,
    "deepspeed.compile": _PASSES,
    "deepspeed.checkpoint.deepspeed_checkpoint": _READ_CHECKPOINT,
    "deepspeed.checkpoint.zero_checkpoint": _READ_CHECKPOINT,
    "deepspeed.compression.basic_layer": _COMPRESSED,
    "deepspeed.inference": _SERVING,
    "deepspeed.launcher.multinode_runner": _LAUNCHER,
    "deepspeed.linear": "use peft, whose adapters train at every ZeRO stage",
    "deepspeed.model_implementations": _SERVING,
    "deepspeed.module_inject.layers": (
        f"for training, {_SLICING}; engine.save_checkpoint stores slices as parts of whole tensors, which"
        " deepspeed.utils.zero_to_fp32 reads"
    ),
    "deepspeed.module_inject": f"{_SERVING}; for training, {_SLICING}",
    "deepspeed.ops.deepspeed4science": "use torch.nn.functional.scaled_dot_product_attention with a bias",
    "deepspeed.ops.fp_quantizer": "use dsx_ops.quantize_fp8",
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "set data_efficiency.data_sampling.dynamic_batching in the configuration and give initialize training_data"
    ),
    "deepspeed.nebula": _SAVES,
    "deepspeed.runtime.checkpoint_engine": _SAVES,
    "deepspeed.runtime.comm": "deepspeed.comm has the collectives; the engine makes the others itself",
    "deepspeed.runtime.compiler": "use torch.compile, or engine.compile()",
    "deepspeed.runtime.pipe.p2p": "the pipeline sends its messages itself; deepspeed.comm.send and recv are for others",
    "deepspeed.runtime.quantize": "set compression_training in the configuration",
    "deepspeed.runtime.swap_tensor": "set offload_optimizer.device: nvme in the configuration, or use dsx_nvme",
    "deepspeed.runtime.weight_quantizer": "use compression.compress.init_compression, or dsx_ops.quantize",
    "deepspeed.runtime.domino": "use dsx_pipe.tensor",
    "deepspeed.runtime.hybrid_engine": "generate with deepspeed.zero.unwrap_model_for_generation(engine)",
    "deepspeed.runtime.rollout": "generate with deepspeed.zero.unwrap_model_for_generation(engine)",
    "deepspeed.runtime.superoffload": "set offload_optimizer.device in the configuration",
    "deepspeed.runtime.zenflow": "ZenFlow is not available; set offload_optimizer.device in the configuration",
}

UNSUPPORTED_MEMBERS: dict[str, str] = {
    **dict.fromkeys(
        ("allreduce_and_copy", "allreduce_bucket", "allreduce_no_retain", "buffered_allreduce_fallback"), _REDUCE
    ),
    **dict.fromkeys(
        ("sparse_all_gather", "sparse_allreduce", "sparse_allreduce_bucket", "sparse_allreduce_no_retain"),
        _SPARSE_REDUCE,
    ),
    **dict.fromkeys(
        (
            "get_autosp_backend",
            "get_autotp_backend",
            "get_compile_time",
            "get_deepcompile_backend",
            "get_deepspeed_compile_backend",
            "register_compile_pass",
        ),
        _PASSES,
    ),
    "_broadcast_model": "initialize sends rank 0's parameters to all ranks by itself",
    "clip_fp32_gradients": "set gradient_clipping in the configuration: step() clips once the gradients are whole",
    "get_optimizer_configuration": "read engine.optimizer_name() and engine.optimizer_params()",
    "load_moe_state_dict": "engine.load_checkpoint(folder) loads the experts too",
    "print_forward_breakdown": "set wall_clock_breakdown or timeline in the configuration",
    "random_ltd_initialize": "initialize does it, for the layers in data_efficiency.data_routing.random_ltd",
}
"""Member of DeepSpeed's engine -> what to use instead."""

_PARTITION = (
    'partition_method="time" with layer_times, one number per layer, places the boundaries; "parameters", "uniform" and'
    ' "type:REGEX" count by themselves'
)
UNSUPPORTED_PIPELINE_MEMBERS: dict[str, str] = {
    "_partition_layers": _PARTITION,
    "_count_layer_params": _PARTITION,
    "_set_bounds": _PARTITION,
}
"""Member of DeepSpeed's `PipelineModule` that programs replace -> what to use instead."""
