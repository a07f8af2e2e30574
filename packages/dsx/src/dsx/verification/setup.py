"""Builds both sides of a verification: the engine on every rank and, on rank 0, the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dsx_verify.oracle import Loss, Oracle, Recipe
from torch import nn

from ..config import load_config
from ..engine.engine import Engine
from ..engine.request import launched_as
from ..entry import initialize
from ..lr_schedules import build_schedule
from ..optimizers import choose_optimizer


def build(
    model: nn.Module,
    original: nn.Module,
    config: Any,
    loss_fn: Loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    parameters_fn: Callable[[nn.Module], Any] | None,
) -> tuple[Engine, Oracle | None]:
    """The engine over `model`, and on rank 0 the oracle over `original` (a copy of the model from before)."""
    groups = parameters_fn or (lambda module: list(module.parameters()))
    resolved = load_config(config, world_size=launched_as()[1])
    changing = [
        name
        for name in ("data_efficiency", "curriculum_learning", "progressive_layer_drop")
        if getattr(resolved, name).enabled
    ]
    if changing:
        raise ValueError(
            f"verify: {' and '.join(changing)} changes what is computed from step to step, so there is nothing to"
            " compare with; switch it off for the comparison"
        )
    plain = optimizer
    if plain is None and resolved.optimizer is not None:
        choice = choose_optimizer(resolved.optimizer.type, resolved.optimizer.params, reference=True)
        plain = partial(choice.build, model=original) if choice.reads_model else choice.build
    if plain is None:
        raise ValueError(
            "verify: no optimizer to compare; set optimizer.type in the config or pass optimizer=<callable>"
        )
    engine, *_ = initialize(model=model, model_parameters=groups(model), optimizer=optimizer, config=config)
    if engine.global_rank != 0:
        return engine, None
    parts, precision = engine._parts, engine.precision
    original.to(engine.device)
    if precision.params != "fp32":
        original.to(precision.dtype("params"))
    ranks = parts.topology.data.size if resolved.gradient_allreduce_op == "mean" else 1
    section = resolved.scheduler
    recipe = Recipe(
        optimizer=plain,
        schedule=None if section is None else lambda inner: build_schedule(section.type, inner, section.params),
        groups=groups,
        loss=loss_fn,
        cast=parts.inputs.cast,
        autocast=parts.inputs.autocast,
        share=1.0 / (engine.gradient_accumulation_steps() * ranks),
        max_norm=resolved.max_norm or 0.0,
    )
    return engine, Oracle(original, recipe)


def sender(engine: Engine) -> Callable[[torch.Tensor | None, tuple[int, ...], torch.dtype], torch.Tensor]:
    """A function that gives rank 0's tensor to every rank: `(value or None, shape, dtype) -> tensor`."""
    topology, device = engine._parts.topology, engine.device
    if topology.data.size == 1:
        return lambda value, shape, dtype: value  # type: ignore[return-value,misc]
    # Lazy import: a single process needs no collectives.
    import dsx_comm

    source = dsx_comm.get_global_rank(topology.data.group, 0)

    def send(value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=device) if value is None else value.to(dtype).contiguous()
        if buffer.numel():
            dsx_comm.broadcast(buffer, src=source, group=topology.data.group)
        return buffer

    return send
