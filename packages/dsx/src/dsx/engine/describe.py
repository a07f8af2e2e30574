"""Describes the parts of an engine as text (`dump_state`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .parts import EngineParts

_MIB = 2**20


def describe(parts: EngineParts) -> str:
    """One line per part: ranks, model, optimizer, memory of the states, observers."""
    rows = list(_rows(parts))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)


def _rows(parts: EngineParts) -> Iterator[tuple[str, Any]]:
    topology, settings = parts.topology, parts.settings
    yield (
        "rank",
        f"{topology.rank} of {topology.world_size}, data parallel {topology.batches[0]} of {topology.batches[1]}",
    )
    parameters = list(parts.module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    yield (
        "model",
        f"{type(parts.module).__name__}, {sum(p.numel() for p in parameters):,} parameters, {trained:,} trained",
    )
    yield "zero stage", settings.zero_stage
    yield "micro batch, accumulation", f"{settings.micro_batch_size}, {parts.accumulation.steps}"
    yield "gradient clipping", settings.gradient_clipping or "off"
    yield "loss scale", parts.scaler.scale
    if parts.optimizer is not None:
        yield "optimizer", settings.optimizer_name
        for index, group in enumerate(parts.optimizer.param_groups):
            shown = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            yield f"parameter group {index}", f"{len(group['params'])} tensors, {shown}"
        sizes = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in parts.optimizer.state_bytes().items())
        yield "bytes held (MiB)", sizes
    yield "schedule", type(parts.lr_scheduler).__name__ if parts.lr_scheduler is not None else "none"
    watching = [type(each).__name__ for each in (*parts.hooks, *parts.observers)]
    yield "watched by", ", ".join(dict.fromkeys(watching)) or "nobody"
    yield "writers", ", ".join(getattr(parts.monitor, "active", ())) or "none"
