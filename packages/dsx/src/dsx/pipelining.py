"""Where `dsx_pipe` meets the engine: a `PipelineModule` given to `dsx.initialize`.

The module says who is where (its grid is the `mpu`), which schedule runs and which weights stages share. This file hands
that to the engine and lends the runtime what it needs of `dsx_zero` and `dsx_comm`.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .engine.engine import Engine
from .engine.errors import EngineArgumentError
from .engine.parts import EngineParts
from .engine.pipeline import PipelineEngine, PipelineParts, shared_weight_ranks
from .engine.request import Request
from .utils.logging import logger

__all__ = ["build", "is_pipeline", "rank_sets", "with_grid"]


def is_pipeline(model: nn.Module) -> bool:
    """Whether a model is divided into stages. (Only who has imported `dsx_pipe` can have made one.)"""
    pipe = sys.modules.get("dsx_pipe")
    return pipe is not None and isinstance(model, pipe.PipelineModule)


def with_grid(request: Request) -> Request:
    """The request, with the grid of a `PipelineModule` as its `mpu`.

    Raises:
        EngineArgumentError: another `mpu` was given.
    """
    if not is_pipeline(request.model):
        return request
    grid: Any = request.model.mpu()  # type: ignore[operator]
    if request.mpu is not None and request.mpu is not grid:
        raise EngineArgumentError(
            f"initialize(mpu=...): got a {type(request.mpu).__name__} beside a PipelineModule, expected none: the grid of the "
            "module is the mpu. Give the topology to PipelineModule"
        )
    return dataclasses.replace(request, mpu=grid)


def prepare(model: nn.Module, zero: ModuleType) -> None:
    """Make each layer of a stage a unit of ZeRO: gathered, reduced and freed by itself."""
    for child in model.children():
        if next(child.parameters(), None) is not None and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            zero.set_z3_leaf_module(child, True)


def rank_sets(model: nn.Module, comm: ModuleType) -> Any:
    """What `dsx_zero.shard(ranks_of=...)` takes for this model; None where nothing is special."""
    if not is_pipeline(model):
        return None
    sets, ties = comm.RankSets.current(), tuple(model.ties.ties)  # type: ignore[union-attr]
    return shared_weight_ranks(sets, ties) if ties else sets


def build(parts: EngineParts, zero: ModuleType, comm: ModuleType) -> Engine:
    """The engine for these parts: `PipelineEngine` for a pipeline, else `Engine`."""
    model = parts.module
    if not is_pipeline(model):
        return Engine(parts)
    pipe, stage = sys.modules["dsx_pipe"], parts.settings.zero_stage
    # Whether a stage's parameters are gathered for the weights' own backward is known to no hook.
    split = stage < 3
    data = comm.RankSets.current().data

    def runtime(parts: EngineParts, micro_batches: int, callbacks: Any) -> Any:
        module: Any = parts.module
        schedule = module.schedule
        if not isinstance(schedule, str) and schedule.micro_batches != micro_batches:
            raise EngineArgumentError(
                f"gradient_accumulation_steps: got {micro_batches}, and the PipelineModule's schedule has "
                f"{schedule.micro_batches} micro-batches; make them equal, or give the schedule by name"
            )
        made = pipe.Pipeline(
            list(module.stage_modules),  # not the module, which would add up `.grad` of shared weights by itself
            schedule,
            module.pipe_group,
            loss_fn=module.loss_fn,
            dynamic_shape=module.dynamic_shape,
            micro_batches=micro_batches,
            device=next((p.device for p in module.parameters()), torch.device("cpu")),
            nonfinite="ignore" if parts.config.precision.check_overflow else "raise",
            split_backward=split,
            callbacks=callbacks,
        )
        if made.schedule.splits_backward and not split:
            logger.warning(
                "pipeline schedule %s at ZeRO stage 3: each backward is done whole, because the parameters are not gathered for a "
                "backward of the weights alone; use stage 2 to have them apart",
                made.schedule.name,
            )
        return made

    def mean_over_data(loss: torch.Tensor) -> torch.Tensor:
        if data.size > 1:
            comm.all_reduce(loss, op=comm.ReduceOp.AVG, group=data.group)
        return loss

    return PipelineEngine(
        parts,
        PipelineParts(
            build=runtime,
            callbacks=pipe.StageCallbacks,
            ties=tuple(model.ties.ties),  # type: ignore[union-attr]
            sum_over=lambda tensor, group: comm.all_reduce(tensor, group=group),
            mean_over_data=mean_over_data,
            read_gradient=partial(zero.safe_get_full_grad, optimizer=parts.shards),
            write_gradient=partial(zero.safe_set_full_grad, optimizer=parts.shards),
        ),
    )
