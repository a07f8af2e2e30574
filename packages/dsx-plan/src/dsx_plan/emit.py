"""A plan's layout as the configuration of another system.

What a system cannot express is refused: a file that trains something else would be worse than none. What its program
has to say itself, because it is no part of a configuration there, stands among the notes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .configs import CLIPPING, clipping_of, value_of, with_values
from .errors import PlanError
from .plans import Plan

__all__ = ["SYSTEMS", "Emitted", "emit"]

_ZERO = "zero_optimization"


@dataclass(frozen=True)
class Emitted:
    """A configuration of another system.

    Attributes:
        text: the file, or the arguments one a line.
        notes: what the program has to say itself.
    """

    text: str
    notes: list[str] = field(default_factory=list)


def emit(plan: Plan, system: str) -> Emitted:
    """The layout of a plan for another system.

    Args:
        plan: any plan.
        system: "deepspeed" (JSON), "accelerate" (YAML, with its DeepSpeed plugin), "torchtitan" or "megatron" (command
            line arguments).

    Raises:
        PlanError: the system is unknown, or has no counterpart of something in the plan.
    """
    if system not in SYSTEMS:
        raise PlanError(f"emit: got {system!r}, expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[system](plan)


def _precision(plan: Plan) -> str:
    return next((name for name in ("bf16", "fp16") if value_of(plan.config, f"{name}.enabled")), "fp32")


def _length(plan: Plan) -> int:
    return plan.tokens // _samples(plan)


def _samples(plan: Plan) -> int:
    layout = plan.layout
    return layout["data"] * layout["micro_batch"] * layout["accumulation"]


def _offloaded(plan: Plan, what: str) -> str:
    """The tier that `offload_optimizer` or `offload_param` names."""
    found = value_of(plan.config, f"{_ZERO}.{what}.device")
    return found if isinstance(found, str) else "none"


def _refuse(plan: Plan, system: str, *axes: str) -> None:
    for axis in axes:
        if plan.layout.get(axis, 1) > 1:
            raise PlanError(
                f"emit: {system} has no counterpart of {axis} = {plan.layout[axis]}; expected a plan without it"
            )


def _deepspeed(plan: Plan) -> Emitted:
    config: dict[str, Any] = copy.deepcopy(plan.config)
    config.pop("train_batch_size", None)  # it follows from the two others and the number of ranks
    config["train_micro_batch_size_per_gpu"] = plan.layout["micro_batch"]
    config["gradient_accumulation_steps"] = plan.layout["accumulation"]
    config.setdefault(_ZERO, {})["stage"] = plan.layout["stage"]
    notes = []
    for path in (*_DSX_ONLY, *(f"{_ZERO}.{key}" for key in config[_ZERO] if key not in _DEEPSPEEDS_ZERO)):
        if value_of(config, path) is not None:
            config = with_values(config, {path: None})
            notes.append(f"DeepSpeed has no {path}: it is left out")
    if plan.layout["pipe"] > 1:
        schedule = value_of(plan.config, "pipeline.schedule") or "1f1b"
        if schedule != "1f1b":
            raise PlanError(f"emit: deepspeed has no counterpart of pipeline.schedule = {schedule}; expected 1f1b")
        config.pop("pipeline", None)
        notes.append(f"the program makes the stages: PipelineModule(..., num_stages={plan.layout['pipe']})")
    if plan.layout.get("sequence", 1) > 1:
        notes.append("the program cuts sequences: UlyssesSPAttentionHF.register_with_transformers, and its mpu")
    if plan.layout["recompute"]:
        notes.append("the program recomputes: model.gradient_checkpointing_enable()")
    return Emitted(json.dumps(config, indent=2) + "\n", notes)


_DSX_ONLY = (
    "tensor_parallel.sequence_parallel", "sequence_parallel", "expert_parallel.overlap_chunks",
    "expert_parallel.devices_per_node",
)  # fmt: skip
"""Sections and keys that DeepSpeed's parser would refuse, or would not read."""
_DEEPSPEEDS_ZERO = frozenset({
    "allgather_bucket_size", "allgather_partitions", "allgather_sequential", "compute_grad_norm",
    "contiguous_gradients", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
    "enable_sanity_checks", "gather_16bit_weights_on_model_save", "ignore_unused_parameters", "leaf_module",
    "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters",
    "max_reuse_distance", "memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size",
    "model_persistence_threshold", "module_granularity_threshold", "offload_optimizer", "offload_param",
    "override_module_apply", "overlap_comm", "param_persistence_threshold", "parameter_alignment",
    "pipeline_loading_checkpoint", "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage", "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params", "sub_group_size", "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
})  # fmt: skip
"""Keys of `zero_optimization` that DeepSpeed 0.19 knows; it refuses others."""


def _accelerate(plan: Plan) -> Emitted:
    _refuse(plan, "accelerate", "pipe", "tensor", "sequence")
    hosts = plan.world_size // plan.ranks_per_host
    zero = {
        "gradient_accumulation_steps": plan.layout["accumulation"],
        CLIPPING: clipping_of(plan.config),
        "offload_optimizer_device": _offloaded(plan, "offload_optimizer"),
        "offload_param_device": _offloaded(plan, "offload_param"),
        "zero3_init_flag": plan.layout["stage"] == 3,
        "zero_stage": plan.layout["stage"],
    }
    top = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": zero,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": {"fp32": "no"}.get(_precision(plan), _precision(plan)),
        "num_machines": hosts,
        "num_processes": plan.world_size,
        "use_cpu": False,
    }
    notes = [f"the program's data loader gives batches of {plan.layout['micro_batch']}"]
    if hosts > 1:
        notes.append("every host gives its own machine_rank, and all give main_process_ip and main_process_port")
    if plan.layout["recompute"]:
        notes.append("the program recomputes: model.gradient_checkpointing_enable()")
    return Emitted(_yaml(top), notes)


def _yaml(values: Mapping[str, Any], before: str = "") -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{before}{key}:\n{_yaml(value, before + '  ')}")
        else:
            lines.append(f"{before}{key}: {json.dumps(value)}\n")  # JSON's scalars are YAML's
    return "".join(lines)


def _arguments(values: Mapping[str, Any]) -> str:
    return "".join(f"{name}\n" if value is True else f"{name}={value}\n" for name, value in values.items())


def _torchtitan(plan: Plan) -> Emitted:
    layout, notes = plan.layout, []
    states, weights = _offloaded(plan, "offload_optimizer"), _offloaded(plan, "offload_param")
    if (states, weights) not in (("none", "none"), ("cpu", "cpu")):
        raise PlanError(
            f"emit: torchtitan has no counterpart of optimizer states on {states} with parameters on {weights};"
            " expected both on the device, or both in host memory"
        )
    if _precision(plan) == "fp16":
        raise PlanError("emit: torchtitan has no counterpart of fp16; expected bf16 or fp32")
    sharded = layout["stage"] > 0
    values: dict[str, Any] = {
        "--parallelism.data_parallel_replicate_degree": 1 if sharded else layout["data"],
        "--parallelism.data_parallel_shard_degree": layout["data"] if sharded else 1,
        "--parallelism.fsdp_reshard_after_forward": "always" if layout["stage"] == 3 else "never",
        "--parallelism.tensor_parallel_degree": layout["tensor"],
        "--parallelism.pipeline_parallel_degree": layout["pipe"],
        "--parallelism.context_parallel_degree": layout.get("sequence", 1),
        "--parallelism.expert_parallel_degree": max(1, layout["expert"]),
        "--training.local_batch_size": layout["micro_batch"],
        "--training.global_batch_size": _samples(plan),
        "--training.seq_len": _length(plan),
        "--training.max_norm": clipping_of(plan.config) or "inf",
        "--training.mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[_precision(plan)],
    }
    if value_of(plan.config, "compile.enabled"):
        values["--compile.enable"] = True
    if layout["pipe"] > 1:  # there a local batch is what a pipeline cuts into micro-batches
        values["--training.local_batch_size"] = layout["micro_batch"] * layout["accumulation"]
        values["--parallelism.pipeline_parallel_microbatch_size"] = layout["micro_batch"]
        values["--parallelism.pipeline_parallel_schedule"] = _schedule(plan, "torchtitan")
        values["--training.disable_cuda_graphs"] = True  # its parser refuses stages with them
    if weights == "cpu":
        values["--training.enable_cpu_offload"] = True
    if layout["tensor"] > 1 and not value_of(plan.config, "tensor_parallel.sequence_parallel"):
        values["--parallelism.no-enable_sequence_parallel"] = True
    if layout["stage"] == 1:
        notes.append("torchtitan has no stage 1: gradients are sharded too, as in stage 2, which needs less memory")
    notes.append("the recipe is named before these: --module llama3 --config llama3_8b, for example")
    recompute = f"activation_checkpoint:{'full' if layout['recompute'] else 'none'}"  # a subcommand, so it comes last
    return Emitted(f"{_arguments(values)}{recompute}\n", notes)


_TITANS_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
"""Names of torch.distributed.pipelining, which torchtitan takes."""


def _schedule(plan: Plan, system: str) -> str:
    """The name that PyTorch has for a plan's schedule."""
    given = value_of(plan.config, "pipeline.schedule") or "1f1b"
    if given not in _TITANS_SCHEDULES:
        raise PlanError(
            f"emit: {system} has no counterpart of pipeline.schedule = {given}; expected one of"
            f" {', '.join(_TITANS_SCHEDULES)}"
        )
    return _TITANS_SCHEDULES[given]


def _megatron(plan: Plan) -> Emitted:
    layout, notes = plan.layout, []
    if _offloaded(plan, "offload_param") != "none":
        raise PlanError("emit: megatron has no counterpart of parameters in host memory; expected a plan without it")
    values: dict[str, Any] = {
        "--tensor-model-parallel-size": layout["tensor"],
        "--pipeline-model-parallel-size": layout["pipe"],
        "--context-parallel-size": layout.get("sequence", 1),
        "--micro-batch-size": layout["micro_batch"],
        "--global-batch-size": _samples(plan),
        "--seq-length": _length(plan),
        "--clip-grad": clipping_of(plan.config),
    }
    if layout["expert"]:
        values["--expert-model-parallel-size"] = layout["expert"]
    if value_of(plan.config, "tensor_parallel.sequence_parallel") and layout["tensor"] > 1:
        values["--sequence-parallel"] = True
    if layout["pipe"] > 1:
        values |= _megatrons_stages(plan)
    if _precision(plan) != "fp32":
        values[f"--{_precision(plan)}"] = True
    if layout["stage"] in (1, 2):
        values |= {"--use-distributed-optimizer": True, "--overlap-grad-reduce": True, "--overlap-param-gather": True}
    if layout["stage"] == 2:
        notes.append("megatron's distributed optimizer keeps whole gradients: this needs the memory of stage 1")
    if layout["stage"] == 3:
        strategy = {"--data-parallel-sharding-strategy": "optim_grads_params"}
        values |= {"--use-distributed-optimizer": True, "--use-megatron-fsdp": True, **strategy}
    if _offloaded(plan, "offload_optimizer") == "cpu":
        values["--optimizer-cpu-offload"] = True
    if layout["recompute"]:
        values |= {
            "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1,
        }  # fmt: skip
    if layout.get("sequence", 1) > 1:
        notes.append("megatron cuts sequences with rings by default; --cp-comm-type a2a exchanges heads, as Ulysses")
    notes.append("the model's sizes are arguments too: --num-layers, --hidden-size, --num-attention-heads, ...")
    return Emitted(_arguments(values), notes)


def _megatrons_stages(plan: Plan) -> dict[str, Any]:
    schedule = value_of(plan.config, "pipeline.schedule") or "1f1b"
    if schedule not in ("1f1b", "interleaved"):
        raise PlanError(
            f"emit: megatron has no counterpart of pipeline.schedule = {schedule}; expected 1f1b or interleaved"
        )
    chunks = value_of(plan.config, "pipeline.chunks") or 1
    return {"--num-virtual-stages-per-pipeline-rank": chunks} if schedule == "interleaved" and chunks > 1 else {}


SYSTEMS: dict[str, Callable[[Plan], Emitted]] = {
    "torchtitan": _torchtitan, "megatron": _megatron, "deepspeed": _deepspeed, "accelerate": _accelerate,
}  # fmt: skip
