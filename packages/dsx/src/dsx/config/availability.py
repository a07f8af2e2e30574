"""Keys that dsx knows but does not implement. Some are refused with an explanation, others accepted with one warning.

Two tables for the sections of dsx itself, and two pure functions over a validated configuration. The sections of other
packages have their own tables (``sections.judged``).

* ``REFUSED``: features that dsx will not have, with an alternative. Asking for one is an error; a block that is
  switched off, or a key at its default, does not ask for a feature.
* ``MEANINGLESS``: settings of another implementation. They are accepted, because published files have them, and one
  warning names those that the file sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Problem
from .sections import judged

__all__ = ["MEANINGLESS", "REFUSED", "asks_for", "meaningless", "not_yet"]

REFUSED: dict[str, str] = {
    "compile.deepcompile": (
        "dsx gathers around compiled blocks and has no passes over their graphs; set compile.enabled to compile blocks"
    ),
    "datastates_ckpt": (
        "dsx has one writer of checkpoints, which loads without third-party code; use engine.save_checkpoint"
    ),
    "graph_harvesting": (
        "whole steps are not captured as device graphs; compile blocks with compile.kwargs"
        ' {"mode": "reduce-overhead"}, which captures each'
    ),
    "hybrid_engine": (
        "dsx has no generation engine; gather the weights once for many forwards with"
        " dsx.zero.unwrap_model_for_generation(model)"
    ),
    "nebula": "the service is gone; save_checkpoint writes to any folder",
    "torch_autocast.lower_precision_safe_modules": (
        "gradients are reduced in one data type; set communication_data_type, and keep modules out of autocast with"
        " torch.autocast(enabled=False) in their forward"
    ),
}
"""Features that dsx will not have: path -> why, and what to do instead (decision 0020)."""

_APEX = "it is an argument of apex; torch.amp has no such switch"
_ALWAYS = "dsx always does it"
_GRAPH_PASS = "it belongs to compile.deepcompile, which dsx does not have"

MEANINGLESS: dict[str, str] = {
    "amp.cast_model_outputs": _APEX,
    "amp.cast_model_type": _APEX,
    "amp.keep_batchnorm_fp32": _APEX,
    "amp.master_weights": _APEX,
    "amp.max_loss_scale": "the scale has no upper bound here",
    "amp.num_losses": _APEX,
    "amp.patch_torch_functions": _APEX,
    "amp.verbosity": _APEX,
    "bf16.immediate_grad_update": _ALWAYS,
    "checkpoint.checkpoint_serialization": "checkpoints hold no pickled objects",
    "checkpoint.load_universal": "every checkpoint loads at every world size and stage",
    "checkpoint.parallel_write.pipeline_stage": "every rank writes its own byte ranges, at every stage of a pipeline",
    "checkpoint.writer": "there is one writer; each rank writes its own byte ranges",
    **{
        f"compile.{name}": _GRAPH_PASS
        for name in (
            "free_activation",
            "offload_activation",
            "offload_opt_states",
            "offload_parameters",
            "double_buffer",
            "symmetric_memory",
            "passes",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
        )
    },
    "cuda_visible_devices": "choose devices with `dsx launch --include` or the variable CUDA_VISIBLE_DEVICES",
    "disable_allgather": "DeepSpeed does not read it either",
    "optimizer.legacy_fusion": "there is one fp16 path",
    "seq_parallel_communication_data_type": (
        "gradients are reduced over data- and sequence-parallel ranks together, in communication_data_type"
    ),
    "timers.throughput.synchronized": "the clock is read between steps; the device is never waited for",
    "vocabulary_size": "DeepSpeed does not read it either",
    "zero_allow_untested_optimizer": (
        "every optimizer that can work on slices may be used; the others are refused by name"
    ),
    "zero_force_ds_cpu_optimizer": "any torch optimizer may be used",
}
"""Settings of dsx's own sections that change nothing here: path -> why."""


def asks_for(value: Any, default: Any) -> bool:
    """Return whether a validated value asks for its feature.

    A section with ``enabled`` asks when that is true; a section without it when any part of it asks; a plain value
    when it differs from its default.
    """
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        if isinstance(value, Mapping) and value:
            return any(asks_for(item, None) for item in value.values())
        return value != default
    if "enabled" in fields:
        return value.enabled
    parts = {name: getattr(value, name) for name in fields}
    nested = [part for part in parts.values() if _has_switch(part)]
    if nested:
        return any(asks_for(part, None) for part in nested)
    if default is None:
        return True
    return any(part != getattr(default, name) for name, part in parts.items())


def not_yet(root: Any, where: Any) -> Iterator[Problem]:
    """Yield one problem per feature that ``root`` asks for and that does not exist (yet, or ever)."""
    for path, reason in judged(type(root), "NOT_YET").items():
        for full, shown in _asked(root, path):
            yield Problem(
                "not-available", full, f"not available yet: {full}", got=shown, where=where(full),
                fix=f"remove it or switch it off: {reason}",
            )  # fmt: skip
    for path, reason in REFUSED.items():
        for full, shown in _asked(root, path):
            yield Problem(
                "not-available", full, f"not supported: {full}", got=shown, where=where(full),
                fix=f"remove it or switch it off; {reason}",
            )  # fmt: skip


def _asked(root: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the values that ask for the feature at a path."""
    found = _find(root, path)
    if found is not None and asks_for(*found):
        yield from _culprits(path, *found)


# Values that ask for what dsx does in any case. Accelerate and the Trainer write the first by themselves.
_ALREADY_SO = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def meaningless(paths: Mapping[str, Any], without_effect: Mapping[str, str]) -> list[str]:
    """Return ``path: reason`` for every key without effect among the paths that a configuration sets, except where the
    value asks for what dsx does in any case.
    """
    found = []
    on_disk = any(path.startswith("zero_optimization.offload_") and value == "nvme" for path, value in paths.items())
    if not on_disk and any(path.startswith("aio.") for path in paths):
        found.append("aio: read where offload_optimizer or offload_param has the device nvme, which is not so here")
    for path, reason in without_effect.items():
        if path in _ALREADY_SO and paths.get(path) == _ALREADY_SO[path]:
            continue
        if path in paths or any(other.startswith(path + ".") for other in paths):
            found.append(f"{path}: {reason}")
    return found


def _has_switch(value: Any) -> bool:
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        return False
    return "enabled" in fields or any(_has_switch(getattr(value, name)) for name in fields)


def _find(root: Any, path: str) -> tuple[Any, Any] | None:
    """Return value and default at a dotted path; None if a section or key does not exist, or if a section on the way
    has the device none, which switches it off.
    """
    *sections, name = path.split(".")
    owner = root
    for part in sections:
        owner = getattr(owner, part, None)
        if getattr(owner, "device", None) == "none":
            return None
    fields = getattr(type(owner), "model_fields", {})
    if name not in fields:
        return None
    field = fields[name]
    return getattr(owner, name), None if field.is_required() else field.get_default(call_default_factory=True)


def _culprits(path: str, value: Any, default: Any) -> Iterator[tuple[str, str]]:
    """Yield path and text of the values that ask: a switched-on block itself, or the single keys of a block without a
    switch.
    """
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        yield path, _text(value)
    elif "enabled" in fields:
        yield path, "enabled: true"
    elif default is None or _has_switch(value):
        yield path, f"device: {value.device}" if hasattr(value, "device") else "a block that asks for it"
    else:
        for name in fields:
            if getattr(value, name) != getattr(default, name):
                yield f"{path}.{name}", _text(getattr(value, name))


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )
