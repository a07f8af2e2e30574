"""Names of DeepSpeed that dsx does not have, and what to use instead: single names by module, and whole modules.

A module of the second table may have some names in `names.MODULES`; the advice is for the others.
"""

from __future__ import annotations

__all__ = ["UNSUPPORTED", "UNSUPPORTED_MODULES"]

_SERVING = "dsx trains; serve the saved weights with an inference engine such as vLLM"
_SLICING = "set tensor_parallel.autotp_size in the configuration, or slice layers with dsx_pipe.tensor"
_SEQUENCE = "sequence parallelism is not available yet"

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
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "CheckpointFunction": "call checkpointing.checkpoint(function, *args)"
    },
    "deepspeed.runtime.dataloader": {"DeepSpeedDataLoader": "engine.deepspeed_io(dataset) makes the loader"},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPAttentionHF": _SEQUENCE,
        "UlyssesSPDataLoaderAdapter": _SEQUENCE,
        "AutogradComputeMLP": "use TiledMLP with one shard",
    },
    "deepspeed.ops.adam": {"ZenFlowCPUAdam": "ZenFlow is not available; use offload_optimizer with DeepSpeedCPUAdam"},
    "deepspeed.utils.timer": {
        "SynchronizedWallClockTimer": "use dsx_monitor.WallClock, or wall_clock_breakdown in the configuration"
    },
}

UNSUPPORTED_MODULES: dict[str, str] = {
    "deepspeed.compile": "graph passes are not available yet; engine.compile() compiles unit by unit",
    "deepspeed.inference": _SERVING,
    "deepspeed.linear": "use peft, whose adapters train at every ZeRO stage",
    "deepspeed.model_implementations": _SERVING,
    "deepspeed.module_inject": f"{_SERVING}; for training, {_SLICING}",
    "deepspeed.ops.deepspeed4science": "use torch.nn.functional.scaled_dot_product_attention with a bias",
    "deepspeed.ops.fp_quantizer": "use dsx_ops.quantize_fp8",
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "set data_efficiency.data_sampling.dynamic_batching in the configuration and give initialize training_data"
    ),
    "deepspeed.runtime.domino": "use dsx_pipe.tensor",
    "deepspeed.runtime.hybrid_engine": "generate with deepspeed.zero.unwrap_model_for_generation(engine)",
    "deepspeed.runtime.rollout": "generate with deepspeed.zero.unwrap_model_for_generation(engine)",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": _SEQUENCE,
    "deepspeed.runtime.superoffload": "set offload_optimizer.device in the configuration",
    "deepspeed.runtime.zenflow": "ZenFlow is not available; set offload_optimizer.device in the configuration",
    "deepspeed.sequence": _SEQUENCE,
}
