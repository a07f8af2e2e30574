"""What a configuration may ask for and dsx does not do: refused with what will bring it, or accepted with one warning.

Two tables of data and two pure functions over a validated configuration.

* ``NOT_YET``: features that will exist. Asking for one is an error; a block that is switched off, or a key at its
  default, asks for nothing.
* ``MEANINGLESS``: knobs of another implementation. They are accepted, because published files carry them, and one
  warning names all that the file sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx_moe import config as expert_section
from dsx_zero import config as zero_section

from ..errors import Problem

__all__ = ["MEANINGLESS", "NOT_YET", "asks_for", "meaningless", "not_yet"]

NOT_YET: dict[str, str] = {
    "activation_checkpointing": "activation checkpointing in depth (dsx-zero); torch.utils.checkpoint works today",
    "autotuning": "the autotuner of dsx",
    "checkpoint.use_node_local_storage": "checkpoints without a shared file system",
    "compile.deepcompile": "graph passes; torch.compile of blocks works today",
    "datastates_ckpt": "asynchronous checkpoints",
    "disable_python_gc": "control of the garbage collector",
    "elasticity": "elastic batch sizes (dsx)",
    "graph_harvesting": "device graphs",
    "hybrid_engine": "generation inside the training engine; no date",
    "managed_gradient_accumulation": "manual accumulation; set_gradient_accumulation_boundary works today",
    "nebula": "checkpoints through a cloud service; no date",
    "sparse_gradients": "sparse reduction of embedding gradients (dsx-comm)",
    "torch_autocast.lower_precision_safe_modules": "a data type of reduction per module",
    **{f"zero_optimization.{name}": brings for name, brings in zero_section.NOT_YET.items()},
}

OPTIMIZERS_NOT_YET: dict[str, str] = {
    "Muon": "optimizers over whole matrices (dsx-ops)",
    "MuAdam": "optimizers of the package mup; pass the optimizer object instead",
    "MuAdamW": "optimizers of the package mup; pass the optimizer object instead",
    "MuSGD": "optimizers of the package mup; pass the optimizer object instead",
}

_APEX = "an argument of apex; torch.amp has no such switch"
_ALWAYS = "dsx always does it"

MEANINGLESS: dict[str, str] = {
    "aio": "nothing in training reads it yet; it comes with offload to disk (dsx-nvme)",
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
    "compile": "it configures compile.deepcompile, which does not exist yet",
    "cuda_visible_devices": "choose devices with `dsx launch --include` or the variable CUDA_VISIBLE_DEVICES",
    "data_efficiency.data_routing.random_ltd.global_batch_size": "the engine knows it",
    "data_efficiency.data_routing.random_ltd.micro_batch_size": "the engine knows it",
    "disable_allgather": "nothing reads it upstream either",
    **{f"expert_parallel.{name}": reason for name, reason in expert_section.MEANINGLESS.items()},
    "flops_profiler.recompute_fwd_factor": "recomputation is counted as it runs",
    "optimizer.legacy_fusion": "there is one fp16 path",
    "seq_parallel_communication_data_type": "there is no sequence parallelism to reduce for",
    "timers.throughput.synchronized": "the clock is read between steps; the device is never waited for",
    "vocabulary_size": "nothing reads it upstream either",
    "zero_allow_untested_optimizer": (
        "any optimizer that can work on slices may be used, the others are refused by name"
    ),
    "zero_force_ds_cpu_optimizer": "any torch optimizer may be used",
    **{f"zero_optimization.{name}": reason for name, reason in zero_section.NO_EFFECT.items()},
}


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
    if getattr(value, "device", None) == "none":
        return False
    parts = {name: getattr(value, name) for name in fields}
    nested = [part for part in parts.values() if _has_switch(part)]
    if nested:
        return any(asks_for(part, None) for part in nested)
    if default is None:
        return True
    return any(part != getattr(default, name) for name, part in parts.items())


def not_yet(root: Any, where: Any) -> Iterator[Problem]:
    """Yield one problem per feature that ``root`` asks for and that does not exist yet."""
    for path, brings in NOT_YET.items():
        found = _find(root, path)
        if found is None:
            continue
        value, default = found
        if not asks_for(value, default):
            continue
        for full, shown in _culprits(path, value, default):
            yield Problem(
                "not-available", full, f"not available yet: {full}", got=shown, where=where(full),
                fix=f"remove it or switch it off; it comes with {brings}",
            )  # fmt: skip


def meaningless(paths: Mapping[str, Any]) -> list[str]:
    """Return ``path: reason`` for every key of ``MEANINGLESS`` among the paths that a configuration sets."""
    found = []
    for path, reason in MEANINGLESS.items():
        if path in paths or any(other.startswith(path + ".") for other in paths):
            found.append(f"{path}: {reason}")
    return found


def _has_switch(value: Any) -> bool:
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        return False
    return "enabled" in fields or any(_has_switch(getattr(value, name)) for name in fields)


def _find(root: Any, path: str) -> tuple[Any, Any] | None:
    """Return value and default at a dotted path, or None where a section or key does not exist."""
    *sections, name = path.split(".")
    owner = root
    for part in sections:
        owner = getattr(owner, part, None)
    fields = getattr(type(owner), "model_fields", {})
    if name not in fields:
        return None
    field = fields[name]
    return getattr(owner, name), None if field.is_required() else field.get_default(call_default_factory=True)


def _culprits(path: str, value: Any, default: Any) -> Iterator[tuple[str, str]]:
    """Yield path and text of what asks: the block for a switched-on block, the single keys for a block without
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
