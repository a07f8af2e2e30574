"""Counters, rates, loss scale and the caller's state of a DeepSpeed checkpoint, in the forms of dsx."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..encode import encode
from ..errors import CheckpointArgumentError
from .source import numbers_of_group
from .unpickling import Opaque

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["client_state", "training_state"]


class Part(Protocol):
    """The files that the data-parallel ranks of one model-parallel rank have saved (`deepspeed.py`)."""

    head: dict[str, Any]
    optim: list[Any]


_RESERVED = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "num_experts",
        "mp_rank",
        "expert_parallel",
        "universal_checkpoint_info",
    ]
)


def training_state(part: Part, common: Any) -> dict[str, Any]:
    """Counters, groups, schedule and loss scale, in the form of `TrainingState`.

    Args:
        common: the part of the optimizer that is not tensors, in a universal checkpoint.
    """
    head = part.head
    steps, config = _count(head, "global_steps"), head.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    optim = part.optim[0] if part.optim else common if isinstance(common, dict) else {}
    base = optim.get("base_optimizer_state") or optim.get("optimizer_state_dict") or head.get("optimizer") or optim
    if isinstance(base, dict):  # of stage 0 in 16 bits
        base = {**base, **(inner if isinstance(inner := base.get("optimizer_state_dict"), dict) else {})}
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    schedule = head.get("lr_scheduler")
    return {
        "counters": {
            "global_steps": steps, "global_samples": _count(head, "global_samples"),
            "skipped_steps": _count(head, "skipped_steps"),
            "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
        },
        "param_groups": [numbers_of_group(group) for group in groups if isinstance(group, dict)],
        "precision": {},
        "lr_scheduler": schedule if isinstance(schedule, dict) and _encodable(schedule) else {},
        "loss_scaler": _loss_scale(optim.get("loss_scaler", base)),
        "data": {},
        "config": config if isinstance(config, dict) and _encodable(config) else {},
        "versions": {"deepspeed": str(head.get("ds_version", ""))},
    }  # fmt: skip


def _count(head: dict[str, Any], key: str) -> int:
    value = head.get(key, 0)
    return value if type(value) is int and value >= 0 else 0


def _loss_scale(saved: Any) -> dict[str, Any]:
    """The scale of fp16; other precisions have one of 1 that never changes."""
    found = saved if isinstance(saved, dict) and saved.get("dynamic_loss_scale") else {}
    value: Callable[..., Any] = saved.value if isinstance(saved, Opaque) else found.get
    scale, iteration = value("cur_scale"), value("cur_iter")
    if not isinstance(scale, (int, float)) or not isinstance(iteration, int):
        return {"kind": "none"}
    return {
        "kind": "dynamic", "scale": float(scale), "hysteresis_left": value("cur_hysteresis", 1), "step": iteration,
        "last_overflow": value("last_overflow_iter", -1),
    }  # fmt: skip


def client_state(head: dict[str, Any]) -> dict[str, Any]:
    """The plain values of the caller's state."""
    found = {key: value for key, value in head.items() if isinstance(key, str) and key not in _RESERVED}
    lost = [key for key, value in found.items() if not _encodable(value)]
    if lost:
        logger.warning("import: left out of the caller's state, because it needs code to be read: %s", ", ".join(lost))
    return {key: value for key, value in found.items() if key not in lost}


def _encodable(value: Any) -> bool:
    try:
        encode(value, "state", {})
    except CheckpointArgumentError:
        return False
    return True
