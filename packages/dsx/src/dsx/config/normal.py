"""The steps before validation: second names of keys, short forms, and ``"auto"``.

``"auto"`` leaves the decision to dsx. The key is removed, so that the value is the documented default or is computed
from other keys, and the path is kept for the report. For a required value without a default, validation reports an
error. Some keys have a value that is called "auto" (`MEANS_AUTO`); they keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsx_zero import config as zero_section

from ..errors import Problem

__all__ = ["SECOND_NAMES", "SECTIONS_THAT_MAY_BE_NULL", "Normalised", "normalise"]

# second name -> the name the documentation uses
SECOND_NAMES: dict[str, str] = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    "aio.num_threads": "aio.intra_op_parallelism",
    "elasticity.prefer_larger_batch": "elasticity.prefer_large_batch",
    **{
        f"zero_optimization.{second}": f"zero_optimization.{first}"
        for second, first in zero_section.SECOND_NAMES.items()
    },
}

SECTIONS_THAT_MAY_BE_NULL = frozenset(
    {
        "activation_checkpointing", "aio", "amp", "bf16", "checkpoint", "comet", "comms_logger",
        "compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
        "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16", "hybrid_engine", "nebula", "pipeline",
        "progressive_layer_drop", "quantize_training", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
        "wandb", "zero_optimization",
    }
)  # fmt: skip

MEANS_AUTO = frozenset(
    {
        *(f"expert_parallel.{name}" for name in ("combine_impl", "row_weighting_impl", "score_apply", "score_func")),
        *(f"expert_parallel.{name}" for name in ("routed_scaling_factor", "top_k")),
    }
)
"""Paths at which "auto" is a value like any other."""

_TEXT_BOOLEANS = {"true": True, "false": False}


@dataclass
class Normalised:
    """A document ready for validation.

    Attributes:
        data: the values, changed in place.
        auto: dotted paths that were ``"auto"``.
        notes: sentences about values that were read differently from how they were written.
        problems: values that could not be read.
        moved: documented name -> name in the document, for messages that point into the file.
    """

    data: dict[str, Any]
    auto: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)


def normalise(data: dict[str, Any], sections: Iterable[str] = ()) -> Normalised:
    """Apply all steps to ``data`` (which is changed).

    Args:
        sections: names of sections of extensions; they may be null, too.
    """
    result = Normalised(data)
    if isinstance(data.get("$schema"), str):
        del data["$schema"]  # which schema an editor checks the file against
    for name in sorted({*SECTIONS_THAT_MAY_BE_NULL, *sections} & set(data)):
        if data[name] is None:
            del data[name]
    for second, first in SECOND_NAMES.items():
        _rename(result, second, first)
    _short_forms(result)
    _take_out_auto(result, data, "")
    return result


def _rename(result: Normalised, second: str, first: str) -> None:
    *sections, old = second.split(".")
    new = first.rsplit(".", 1)[-1]
    owner: Any = result.data
    for part in sections:
        owner = owner.get(part) if isinstance(owner, dict) else None
    if not isinstance(owner, dict) or old not in owner:
        return
    value = owner.pop(old)
    if new in owner and owner[new] != value:
        result.problems.append(
            Problem(
                "conflict", second, f"{second} and {first} are two names of one key and have different values",
                got=f"{value!r} and {owner[new]!r}", expected="one of the two", fix=f"keep {first}",
            )
        )  # fmt: skip
        return
    owner[new] = value
    result.moved[first] = second


def _short_forms(result: Normalised) -> None:
    zero = result.data.get("zero_optimization")
    if isinstance(zero, bool):
        result.data["zero_optimization"] = {"stage": int(zero)}
        result.notes.append(f"zero_optimization: {str(zero).lower()} is read as stage {int(zero)}")
    aio = result.data.get("aio")
    if isinstance(aio, dict):
        # The tuner that writes this block prints booleans as text.
        for key in ("single_submit", "overlap_events"):
            if isinstance(aio.get(key), str):
                aio[key] = _TEXT_BOOLEANS.get(aio[key].lower(), aio[key])


def _take_out_auto(result: Normalised, owner: dict[str, Any], prefix: str) -> None:
    for key in list(owner):
        path = f"{prefix}{key}"
        if owner[key] == "auto" and path not in MEANS_AUTO:
            del owner[key]
            result.auto.append(path)
        elif isinstance(owner[key], dict):
            _take_out_auto(result, owner[key], path + ".")
    scheduler = result.data.get("scheduler")
    if not prefix and "scheduler.params.warmup_max_lr" in result.auto and isinstance(scheduler, dict):
        # For this key the optimizer's own rate is better than the default.
        scheduler.setdefault("params", {})["warmup_max_lr"] = None
