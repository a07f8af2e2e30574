"""The compression of an engine (`compression_training`, `quantize_training`): techniques on the model, and their
scheduler.

A model that the caller has prepared with `init_compression` is used unchanged; any other
model is prepared here, before it is moved, cast and sharded. `quantize_training` is the same quantisation of weights,
for all layers: the forward pass uses the quantised weight, and the optimizer's master keeps its precision, in every
precision mode and ZeRO stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import dsx_comm
import dsx_zero
import torch
from dsx_comm import RankSets
from torch import nn
from torch.nn.utils import parametrize

from .config import Config
from .engine.compressing import CompressionSession, StagedSchedule
from .engine.errors import EngineArgumentError
from .engine.request import Request
from .extension import Extension, Stateful, Watch, Watched, mean_over_ranks
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["Compression", "build_scheduler", "compressed"]


class Compression(Extension):
    """The sections `compression_training` and `quantize_training`."""

    name = "compression"

    def __init__(self) -> None:
        self._state: Stateful | None = None

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """See `compressed`."""
        return compressed(request, config)

    def join(self, watch: Watch, to: Watched) -> None:
        """Advance the techniques' schedule after each step."""
        scheduler = build_scheduler(
            to.module, to.config, stage=to.config.zero.stage, mean=mean_over_ranks(to.topology),
            loss_scale=to.loss_scale,
        )  # fmt: skip
        if scheduler is None:
            return
        watch.observers.append(CompressionSession(scheduler, lambda: watch.eigenvalues()))
        self._state = StagedSchedule(scheduler, _objects_of_all_ranks) if is_pipeline(to.module) else scheduler

    def state(self) -> Stateful | None:
        """The schedule."""
        return self._state


def _objects_of_all_ranks(mine: Any) -> list[Any]:
    found = [None] * dsx_comm.get_world_size()
    dsx_comm.all_gather_object(found, mine)
    return found


def _asked(config: Config) -> Any:
    """One section for both `compression_training` and `quantize_training`. Both are marked as used."""
    section, moq = config.use("compression_training"), config.use("quantize_training")
    return moq.as_compression() if moq.enabled else section


def compressed(request: Request, config: Config) -> Request:
    """The request after its model got the configured techniques; learnable scores are added to its parameters.

    Raises:
        CompressionError: a pattern matches nothing, a shape does not fit, or a similar mistake.
        EngineArgumentError: the learnable scores cannot be added to the caller's optimizer.
    """
    asked, model = _asked(config), request.model
    if not asked.methods():
        _note_layer_reduction(asked)
        if any(map(parametrize.is_parametrized, model.modules())) and _package().is_compressed(model):
            logger.warning(
                "the model was prepared by init_compression, but the configuration has no compression_training: the"
                " engine advances no schedule; add the section, or step a CompressionScheduler yourself"
            )
        return request
    compress = _package()
    dsx_zero.release_model(model)  # an earlier engine may have partitioned it
    if compress.is_compressed(model):
        return request
    _note_layer_reduction(asked)
    known = {id(p) for p in model.parameters()}
    off = asked.layer_reduction.model_copy(update={"enabled": False})
    compress.init_compression(model, asked.model_copy(update={"layer_reduction": off}), mpu=request.mpu)
    return _with_scores(request, [p for p in model.parameters() if id(p) not in known])


def _package() -> ModuleType:
    import dsx_compress  # lazy import: most programs compress nothing

    return dsx_compress


def _note_layer_reduction(asked: Any) -> None:
    if asked.layer_reduction.enabled:
        logger.info(
            "compression_training.layer_reduction: the student's layers are copied by dsx.compress.init_compression"
            "(model, config, teacher_model=...) before dsx.initialize, not by the engine"
        )


def _with_scores(request: Request, scores: list[nn.Parameter]) -> Request:
    if not scores:
        return request
    if isinstance(request.optimizer, torch.optim.Optimizer):
        raise EngineArgumentError(
            f"initialize(optimizer=...): the optimizer was built before compression made {len(scores)} learnable"
            " scores, so it would not train them; call dsx.compress.init_compression(model, config) before building"
            " it, or pass a callable that builds it"
        )
    given = request.model_parameters
    if given is None:
        return request
    if all(isinstance(entry, torch.Tensor) for entry in given):
        return dataclasses.replace(request, model_parameters=[*given, *scores])
    if all(isinstance(entry, dict) for entry in given):
        return dataclasses.replace(request, model_parameters=[*given, {"params": scores, "weight_decay": 0.0}])
    raise EngineArgumentError(
        f"initialize(model_parameters=...): compression made {len(scores)} learnable scores that cannot be added to"
        " named parameters; call dsx.compress.init_compression(model, config) first and pass model.named_parameters()"
        " then"
    )


def build_scheduler(
    model: nn.Module,
    config: Config,
    *,
    stage: int,
    mean: Callable[[Any], Any] | None,
    loss_scale: Callable[[], float],
) -> Any:
    """The scheduler of a sharded model's techniques; None if the configuration asks for none.

    Args:
        stage: the ZeRO stage; at stage 3 masks are made from gathered weights.
        mean: averages a tensor over the data-parallel ranks in place; None with one rank.
        loss_scale: the scale that losses have now.

    Raises:
        CompressionError: the model was prepared with other methods than the configuration has.
    """
    asked = _asked(config)
    if not asked.methods():
        return None
    gather = (lambda parameters: dsx_zero.GatheredParameters(parameters)) if stage == 3 else None
    return _package().compression_scheduler(model, asked, gather=gather, mean=mean, loss_scale=loss_scale)
