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
    topology, config = parts.topology, parts.config
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
    yield "zero stage", config.zero.stage
    yield "micro batch, accumulation", f"{parts.loader.micro_batch_size}, {parts.accumulation.steps}"
    yield "gradient clipping", config.max_norm or "off"
    yield "loss scale", parts.update.scaler.scale
    if parts.optimizer is not None:
        yield "optimizer", type(parts.optimizer.inner).__name__
        for index, group in enumerate(parts.optimizer.param_groups):
            shown = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            yield f"parameter group {index}", f"{len(group['params'])} tensors, {shown}"
        sizes = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in parts.optimizer.state_bytes().items())
        yield "bytes held (MiB)", sizes
    scheduler = parts.update.schedule.scheduler
    yield "schedule", type(scheduler).__name__ if scheduler is not None else "none"
    watching = [type(each).__name__ for each in (*parts.watch.hooks, *parts.watch.observers)]
    yield "watched by", ", ".join(dict.fromkeys(watching)) or "nobody"
    yield "writers", ", ".join(getattr(parts.watch.monitor, "active", ())) or "none"
