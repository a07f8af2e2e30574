"""DeepSpeed's names of configured values: methods of its engine, and attributes of its `DeepSpeedConfig`.

Two tables give for each name where the value is in a `dsx.config.Config`: a dotted path, or a function of the
configuration. A value is read when it is asked for. Names of features that dsx does not have answer what DeepSpeed
answers when the feature is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import dsx_comm
import torch
from dsx.config import load_config
from dsx.elasticity.api import settings_of
from dsx.precision import dtype

from .settings import client_config
from .values import DEEPSPEED_OPTIMIZERS

__all__ = [
    "CONFIG_ATTRIBUTES",
    "ENGINE_METHODS",
    "DeepSpeedConfig",
    "ElasticityConfig",
    "autocast_if_enabled",
    "value_of",
]

Where = str | Callable[[Any], Any]


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """The context in which an engine with `torch_autocast` computes; without it one that does nothing. For losses that
    a program computes outside of the engine's forward.
    """
    if not engine.torch_autocast_enabled():
        return nullcontext()
    return torch.autocast(device_type=torch.device(engine.device).type, dtype=engine.torch_autocast_dtype())


def value_of(config: Any, where: Where) -> Any:
    """The value at a place of a `dsx.config.Config`; sections without a model in DeepSpeed are dictionaries."""
    return reduce(getattr, where.split("."), config) if isinstance(where, str) else where(config)


def _dictionary(path: str) -> Callable[[Any], dict[str, Any]]:
    return lambda config: value_of(config, path).model_dump(mode="json")


def _device(config: Any) -> str:
    section = config.zero_optimization.offload_optimizer
    return "none" if section is None else str(getattr(section.device, "value", section.device))


def _size(name: str) -> Callable[[Any], int]:
    """A size of `zero_optimization`, of which "auto" is the default."""
    return lambda config: config.zero_optimization.size(name)


def _offload(name: str, otherwise: Any) -> Callable[[Any], Any]:
    return lambda config: getattr(config.zero_optimization.offload_optimizer, name, otherwise)


def _scale_arguments(config: Any) -> dict[str, Any]:
    """The settings of a dynamic loss scale."""
    fp16 = config.fp16
    return {
        "init_scale": 2**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


def _optional_type(path: str) -> Callable[[Any], Any]:
    def read(config: Any) -> Any:
        name = value_of(config, path)
        return None if name is None else dtype(name)

    return read


def _autocast_type(config: Any) -> Any:
    return dtype(config.torch_autocast.dtype) if config.torch_autocast.enabled else None


def _of_section(section: str, name: str) -> Callable[[Any], Any]:
    """An attribute of a section that may be missing; then None."""
    return lambda config: getattr(getattr(config, section), name, None)


def _optimizer_name(config: Any) -> str | None:
    """In lower case if it is one of DeepSpeed's own optimizers."""
    name = None if config.optimizer is None else config.optimizer.type
    return name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name


def _tag(*words: str) -> Callable[[Any], bool]:
    return lambda config: str(config.checkpoint.tag_validation).lower() in words


def _off(value: Any = False) -> Callable[[Any], Any]:
    """The answer of a feature that dsx does not have: a configuration that asks for it is refused."""
    return lambda config: value


def _elastic_over_slices(config: Any) -> bool | None:
    """Whether a node's devices divide into model-parallel groups; None where elasticity is off."""
    elasticity = config.elasticity
    return elasticity.num_gpus_per_node % elasticity.model_parallel_size == 0 if elasticity.enabled else None


def _parameters_of(path: str) -> Callable[[Any], Any]:
    """A section without its key `enabled`; False where it is off."""

    def read(config: Any) -> Any:
        section = value_of(config, path)
        return section.model_dump(mode="json", exclude={"enabled"}) if section.enabled else False

    return read


CONFIG_ATTRIBUTES: dict[str, Where] = {
    "train_batch_size": "batch.train",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "world_size": "batch.world_size",
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_enabled": lambda config: config.zero_optimization.stage > 0,
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "optimizer_name": _optimizer_name,
    "optimizer_params": _of_section("optimizer", "params"),
    "optimizer_legacy_fusion": lambda config: getattr(config.optimizer, "legacy_fusion", False),
    "scheduler_name": _of_section("scheduler", "type"),
    "scheduler_params": _of_section("scheduler", "params"),
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "autotuning_config": "autotuning",
    "buffer_dtype": _optional_type("data_types.buffer_dtype"),
    "param_dtype": _optional_type("data_types.param_dtype"),
    "checkpoint_config": _dictionary("checkpoint"),
    "checkpoint_tag_validation_enabled": _tag("warn", "fail"),
    "checkpoint_tag_validation_fail": _tag("fail"),
    "comms_config": "comms_logger",
    "compile_config": "compile",
    "data_efficiency_config": _dictionary("data_efficiency"),
    "data_efficiency_enabled": "data_efficiency.enabled",
    "expert_parallel_config": "expert_parallel",
    "flops_profiler_config": "flops_profiler",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "monitor_config": "monitor_config",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
    "torch_autocast_dtype": _autocast_type,
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": _off(None),
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "weight_quantization_config": _off(None),
}
"""Attribute of `DeepSpeedConfig` -> place. Keys of the document are attributes under their own names."""

_ZERO = [
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "parameter_alignment",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "sub_group_size",
]
_ZERO_SIZES = [
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
]
_FLOPS = ["detailed", "enabled", "module_depth", "output_file", "profile_step", "recompute_fwd_factor", "top_modules"]
_EIGENVALUE = [
    "enabled",
    "gas_boundary_resolution",
    "layer_name",
    "layer_num",
    "max_iter",
    "stability",
    "tol",
    "verbose",
]
_SAME = [
    "dataloader_drop_last",
    "dump_state",
    "gradient_predivide_factor",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
]
_OF_CONFIG = [
    "aio_config",
    "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail",
    "data_efficiency_config",
    "data_efficiency_enabled",
    "load_universal_checkpoint",
    "optimizer_legacy_fusion",
    "optimizer_params",
    "scheduler_params",
    "tensor_parallel_config",
    "torch_autocast_dtype",
    "torch_autocast_enabled",
    "torch_autocast_lower_precision_safe_modules",
    "use_node_local_storage",
]

ENGINE_METHODS: dict[str, Where] = {
    **{f"zero_{name}": f"zero_optimization.{name}" for name in _ZERO},
    **{f"zero_{name}": _size(f"stage3_{name}") for name in _ZERO_SIZES},
    **{f"flops_profiler_{name}": f"flops_profiler.{name}" for name in _FLOPS},
    **{f"eigenvalue_{name}": f"eigenvalue.{name}" for name in _EIGENVALUE},
    **{name: name for name in _SAME},
    **{name: CONFIG_ATTRIBUTES[name] for name in _OF_CONFIG},
    "amp_enabled": "amp.enabled",
    "amp_params": _parameters_of("amp"),
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_metric_path": "autotuning.metric_path",
    "autotuning_model_info_path": "autotuning.model_info_path",
    "autotuning_profile_model_info": "autotuning.profiles",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "checkpoint_writer_enabled": lambda config: config.checkpoint.writer is not None,
    "compile_autosp": _off(),
    "compile_autotp": _off(),
    "compile_zero_optimization_stage": _off(),
    "cpuadam_cores_perc": _offload("cpuadam_cores_perc", 0.9),
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": _parameters_of("curriculum_learning"),
    "curriculum_learning_config": _dictionary("data_efficiency.data_sampling.curriculum_learning"),
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "data_sampling_config": _dictionary("data_efficiency.data_sampling"),
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "is_elastic_model_parallel_supported": _elastic_over_slices,
    "dynamic_loss_scale_args": _scale_arguments,
    "graph_harvesting": "graph_harvesting",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "initial_dynamic_scale": lambda config: 2**config.fp16.initial_scale_power,
    "is_deepcompile_active": _off(),
    "is_deepcompile_enabled": _off(),
    "is_first_weights_partition_group": lambda config: config.zero_optimization.stage == 3,
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_gamma": "progressive_layer_drop.gamma",
    "pld_params": _parameters_of("progressive_layer_drop"),
    "pld_theta": "progressive_layer_drop.theta",
    "postscale_gradients": lambda config: not config.prescale_gradients,
    "random_ltd_config": _dictionary("data_efficiency.data_routing.random_ltd"),
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "sparse_gradients_enabled": "sparse_gradients",
    "super_offload": _off(),
    "swap_tensor_config": _off(None),
    "uses_parallelization_pass_only": _off(),
    "zenflow_config": _off(None),
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_cpu_offload": lambda config: _device(config) == "cpu",
    "zero_grad_hooks": "zero_optimization.grad_hooks",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_nvme_offload_optimizer": lambda config: _device(config) == "nvme",
    "zero_partial_offload": _offload("ratio", 1.0),
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": _size("reduce_bucket_size"),
    "zero_use_cpu_optimizer": lambda config: _device(config) in ("cpu", "nvme"),
}
"""Method of DeepSpeed's engine, without arguments -> place."""


class ElasticityConfig:
    """The section `elasticity`, read and checked, under DeepSpeed's names of its values.

    Args:
        param_dict: the section.

    Raises:
        ElasticityConfigError: a value of the wrong kind, or a key that must be there is not.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        settings = settings_of(param_dict)
        self.enabled = bool(param_dict.get("enabled", False))
        self.max_acceptable_batch_size = settings.max_batch
        self.micro_batches = list(settings.micro_batches)
        self.min_gpus, self.max_gpus = settings.min_devices, settings.max_devices
        self.model_parallel_size, self.num_gpus_per_node = settings.model_parallel, settings.devices_per_node
        self.prefer_larger_batch_size, self.version = settings.prefer_larger, settings.version
        self.min_time = int(param_dict.get("min_time", 0))
        self.ignore_non_elastic_batch_info = bool(param_dict.get("ignore_non_elastic_batch_info", False))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


class DeepSpeedConfig:
    """A configuration, read and checked, with all batch sizes, for the current number of data-parallel ranks.

    That number comes from `mpu`, else from the process group, else from the environment variable WORLD_SIZE. Each key
    of the document is an attribute, and so are the names in `CONFIG_ATTRIBUTES`. A value that is assigned to an
    attribute changes this object only, not the training of an engine that is made from it.

    Attributes:
        loaded: the `dsx.config.Config`.

    Args:
        config: as for `deepspeed.initialize`.
        mpu: tells how many ranks get different batches.
        mesh_device: not used: `mpu` or the groups in use tell the number of ranks.

    Raises:
        DsxConfigError: with every problem found.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None:
            ranks = mpu.get_data_parallel_world_size()
        elif dsx_comm.is_initialized():
            ranks = dsx_comm.parallel_groups.get_data_parallel_world_size()
        else:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.loaded = load_config(client_config(config), world_size=ranks)

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("loaded")
        if config is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return value_of(config, CONFIG_ATTRIBUTES.get(name, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loaded.source})"
