"""The configuration of a replay: the user's, with its batch sizes resolved and without what only observes or writes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .engine import EngineToPlan
from .errors import PlanError

__all__ = ["CLIPPING", "ONE_BIT", "Ready", "clipping_of", "ready", "value_of", "with_values"]

CLIPPING = "gradient_clipping"
_OBSERVING = (
    "tensorboard", "wandb", "csv_monitor", "jsonl", "comet", "flops_profiler", "comms_logger", "timeline", "straggler",
    "eigenvalue", "gradient_noise_scale", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
    "timers", "checkpoint", "nebula", "disable_python_gc", "autotuning", "elasticity", "cuda_visible_devices",
)  # fmt: skip
"""Sections that change nothing about a step, or that have done their work when the batch is resolved."""

_COMPILED = "compiled blocks are planned with fused kernels, and with the memory of blocks that are not compiled"

_AS_GIVEN = ("pipeline", "tensor_parallel")
"""Sections in which a key that is not set means something else than its default: the script's own choice."""

_WATCHING = "notice_data_writes"
"""Unless it is asked for, it is over after the first updates, so it is no part of the recorded one. On a processor it
sums large parameters piece by piece, which takes most of the time of a replay.
"""

_LEFT_OUT = {
    "graph_harvesting": "device graphs are not planned",
    "data_efficiency": "data_efficiency: the plan is for whole samples",
    "curriculum_learning": "curriculum_learning: the plan is for the last, longest samples",
    "progressive_layer_drop": "progressive_layer_drop: the plan is for all layers",
}


ONE_BIT = {"onebitadam": "freeze_step", "onebitlamb": "freeze_step", "zerooneadam": "var_freeze_step"}
"""Optimizers that send one bit for each value, with the argument that says from which step on."""
_COMPRESSED_FROM = 2
"""The step from which a replay compresses. The one that is recorded comes later."""


@dataclass(frozen=True)
class Ready:
    """A configuration to replay.

    Attributes:
        given: the user's keys, as a dictionary.
        config: for `replay.Question`, still with all of the accumulation.
        micro, accumulation: batch sizes.
        stage: of ZeRO.
        layout: sizes of the axes.
        dtype: of the parameters in computation, for the peak rate.
        notes: what was left out.
        compiled: blocks are compiled, so that operators are fused.
    """

    given: dict[str, Any]
    config: dict[str, Any]
    micro: int
    accumulation: int
    stage: int
    layout: dict[str, int]
    dtype: str
    notes: list[str]
    compiled: bool


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def ready(source: Any, world_size: int, engine: EngineToPlan) -> Ready:
    """Read, judge and clean a configuration.

    Raises:
        DsxConfigError: it is wrong.
        PlanError: the ranks do not divide among its axes.
    """
    given = engine.read(source)
    pipe, tensor, sequence = _axes(given)
    if world_size % (pipe * tensor * sequence):
        raise PlanError(
            f"world_size: got {world_size} ranks for pipeline.stages={pipe}, tensor_parallel.autotp_size={tensor} and"
            f" sequence_parallel_size={sequence}, expected a multiple of {pipe * tensor * sequence}"
        )
    data = world_size // (pipe * tensor * sequence)
    config = engine.load(source, world_size=data)
    cleaned = {key: value for key, value in config.to_dict().items() if key not in _OBSERVING}
    notes = [text for key, text in _LEFT_OUT.items() if _is_on(cleaned.pop(key, None))]
    compiled = bool(value_of(cleaned, "compile.enabled"))
    if compiled:
        notes.append(_COMPILED)
    cleaned.pop("compile", None)
    cleaned.pop("train_batch_size", None)
    for key in _AS_GIVEN:
        cleaned.pop(key, None)
        if key in given:
            cleaned[key] = given[key]
    cleaned["steps_per_print"] = 0
    zero = cleaned.get("zero_optimization")
    if isinstance(zero, dict) and value_of(given, f"zero_optimization.{_WATCHING}") is None:
        cleaned["zero_optimization"] = {**zero, _WATCHING: False}
    notes += _compressed_steps(cleaned)
    precision = config.precision
    dtype = _DTYPES.get(str(precision.compute), "float32")
    return Ready(
        given=given,
        config=cleaned,
        micro=config.batch.micro,
        accumulation=config.batch.accumulation,
        stage=config.zero.stage,
        layout={
            "data": data,
            "pipe": pipe,
            "tensor": tensor,
            "sequence": sequence,
            "stage": config.zero.stage,
            "micro_batch": config.batch.micro,
            "accumulation": config.batch.accumulation,
        },
        dtype=dtype,
        notes=notes,
        compiled=compiled,
    )


def _compressed_steps(cleaned: dict[str, Any]) -> list[str]:
    """Let an optimizer with compressed steps compress from its second step on: a job has few exact ones."""
    section = cleaned.get("optimizer")
    kind = str(value_of(cleaned, "optimizer.type"))
    key = ONE_BIT.get(kind.lower())
    if key is None or not isinstance(section, dict) or value_of(cleaned, "optimizer.params.compression") == "off":
        return []
    cleaned["optimizer"] = {**section, "params": {**(section.get("params") or {}), key: _COMPRESSED_FROM}}
    return [f"{kind}: the plan is of a compressed step, as they are behind {key}"]


def value_of(given: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    found: Any = given
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _axes(given: Mapping[str, Any]) -> tuple[int, int, int]:
    def size(path: str) -> int:
        value = value_of(given, path)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1

    return size("pipeline.stages"), size("tensor_parallel.autotp_size"), size("sequence_parallel_size")


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("enabled", True)) and bool(value)
    return bool(value)


def with_values(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the values at these dotted paths; None takes a key away.

    Raises:
        PlanError: a path leads through a value that is no section.
    """
    made = copy.deepcopy(dict(given))
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = made
        for section in sections:
            found = place.setdefault(section, {})
            if not isinstance(found, dict):
                raise PlanError(f"{path}: {section} is {found!r} in the configuration, expected a section")
            place = found
        if value is None:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(value)
    return made


def clipping_of(config: Mapping[str, Any]) -> float:
    """The norm to which a job clips its gradients: 1.0 where its configuration says nothing, 0 where it does not."""
    return float(config.get(CLIPPING, 1.0))
