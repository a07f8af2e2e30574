"""The expert parallelism of an engine: conversion before sharding, and an observer of steps.

The groups of experts are those of `dsx_comm.parallel_groups`; the sharding finds them by
attributes of the parameters. This module also tells checkpoints which part of a tensor a rank's experts are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dsx_comm
import dsx_moe
import dsx_moe.errors
import dsx_moe.groups
import dsx_moe.state
import dsx_zero
from dsx_comm import RankSets
from torch import nn

from .config import Config
from .engine.observers import Event
from .engine.report import StepReport
from .engine.request import Request
from .extension import Extension, Watch, Watched
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["Experts", "with_experts"]


def with_experts(model: nn.Module, config: Config) -> None:
    """Convert the experts of a model to expert parallelism if the configuration asks for it, in place (collective).

    Raises:
        ConversionError: the model has no experts that can be converted, or their number cannot be divided.
        MoEConfigError: sizes do not fit, or layers were built with the ranks in another order.
    """
    section, data_first = config.use("expert_parallel"), config.use("use_data_before_expert_parallelism")
    if section.enabled:
        dsx_zero.release_model(model)  # an earlier engine may have partitioned it
        from dsx_moe.config import apply_config  # lazy import: it needs pydantic

        convert = partial(apply_config, model, section, use_data_before_expert_parallelism=data_first)
        replaced = _convert_stages(convert) if is_pipeline(model) else convert()
        logger.info("expert_parallel: %d modules (%s ...)", len(replaced), replaced[0] if replaced else "none new")
    dsx_moe.groups.check_groups(model)
    layers = dsx_moe.name_layers(model)
    for layer in layers.values():
        layer.set_deepspeed_parallelism(use_data_before_expert_parallel_=data_first)
    if data_first and not section.enabled and not any(layer.ep_size > 1 for layer in layers.values()):
        logger.warning("use_data_before_expert_parallelism has no effect: no experts are spread over several ranks")


def _convert_stages(convert: Callable[..., list[str]]) -> list[str]:
    """Convert the experts of this rank's stages, which may have none. Collective over all ranks.

    Raises:
        ConversionError: no stage has experts.
    """
    with dsx_zero.telling():
        replaced = convert(may_lack=True)
    dsx_zero.agree("expert_parallel", {})
    by_rank: list[Any] = [None] * dsx_comm.get_world_size()
    dsx_comm.all_gather_object(by_rank, bool(replaced))
    if not any(by_rank):
        raise dsx_moe.errors.ConversionError(
            "expert_parallel: no module of any stage has the form of experts; give moe_layer_pattern to name them, or"
            " leave the section out"
        )
    return replaced


class ExpertSession:
    """An observer, and a source of events.

    Args:
        model: a model with experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def after_step(self, report: StepReport) -> None:
        """Adjust the routers' biases to balance the load, unless the step was skipped (collective)."""
        if report.applied:
            dsx_moe.update_router_bias(self._model)

    def events(self, report: StepReport) -> list[Event]:
        """The load, the share of dropped tokens and the loss of each layer on this rank."""
        return dsx_moe.moe_events(self._model, report.global_samples)


class Experts(Extension):
    """The section `expert_parallel`, and the experts that a model has without it."""

    name = "expert_parallel"

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """See `with_experts`."""
        with_experts(request.model, config)
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Balance the routers after each step, and tell checkpoints which part of a tensor this rank's experts are."""
        if not dsx_moe.state.has_expert_layers(to.module):
            return
        from dsx_checkpoint import Place  # lazy imports: few programs have experts
        from dsx_checkpoint.boxes import Box

        session = ExpertSession(to.module)
        watch.observers.append(session)
        if to.first:
            watch.sources.append(session.events)
        watch.places = {
            name: Place(part.name, part.shape, Box(part.offset, part.size))
            for name, part in dsx_moe.state.expert_slices(to.module).items()
        }
