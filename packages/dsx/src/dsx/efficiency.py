"""Builds parts of an engine from the sections `data_efficiency`, `curriculum_learning` and `progressive_layer_drop`.

This is part of the wiring. Layers are converted before the model is sharded; the parts that control them are built with
the other parts of the engine.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import dsx_data
from torch import nn

from .config import Config
from .data import LoaderOptions
from .engine.efficiency import (
    FixedBatches,
    LayerDropping,
    SeqlenCurriculum,
    TokenBatches,
    TokenDropping,
    takes_any_keyword,
)
from .engine.errors import EngineArgumentError
from .engine.report import Counters
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["Conversion", "build_parts", "convert", "loader_rule", "token_batches"]

LoaderRule = Callable[[Any, LoaderOptions], LoaderOptions]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of a model's layers.

    Attributes:
        layer_drop: the object that skippable layers share (`dsx_data.LayerDrop`); None if there are none.
        token_drop: the same for layers that drop tokens (`dsx_data.TokenDrop`).
        undo: restores the layers' own behaviour.
    """

    layer_drop: Any
    token_drop: Any
    undo: Callable[[], None]


def convert(model: nn.Module, config: Config) -> Conversion:
    """Convert the layers that the configuration names."""
    _check_pipeline(model, config)
    undo: list[Callable[[], Any]] = []
    token_drop = _convert_tokens(model, config, undo)
    layer_drop = _convert_layers(model, config, undo)

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return Conversion(layer_drop, token_drop, undo_all)


def _check_pipeline(model: nn.Module, config: Config) -> None:
    """Refuse settings that do not work in a pipeline, where a rank has only some layers and some stages read no
    batches.
    """
    if not is_pipeline(model):
        return
    efficiency = config.use("data_efficiency")
    sampling, routing = efficiency.data_sampling, efficiency.data_routing
    for asked, key, reason in (
        (
            efficiency.enabled and sampling.enabled and sampling.dynamic_batching.enabled,
            "data_efficiency.data_sampling.dynamic_batching",
            "the stages between the first and the last read no batches, so they do not know their sizes",
        ),
        (
            efficiency.enabled and routing.enabled and routing.random_ltd.enabled,
            "data_efficiency.data_routing.random_ltd",
            "a stage holds some of the layers, and layers are numbered over the whole model",
        ),
        (
            config.use("progressive_layer_drop").enabled and dsx_data.find_layer_drop(model) is None,
            "progressive_layer_drop",
            "a stage holds some of the layers, and layers are numbered over the whole model; convert the layers with"
            " dsx.data.convert_to_layer_drop before PipelineModule takes them",
        ),
    ):
        if asked:
            raise EngineArgumentError(f"{key}: got enabled with a pipeline, expected false: {reason}")


def _convert_tokens(model: nn.Module, config: Config, undo: list[Callable[[], Any]]) -> Any:
    section = config.use("data_efficiency")
    routing = section.data_routing
    if not (section.enabled and routing.enabled and routing.random_ltd.enabled):
        return None
    schedule = dsx_data.RandomLTDScheduler(routing.random_ltd, global_batch_size=config.batch.train)
    drop = dsx_data.TokenDrop.from_config(routing.random_ltd, schedule)
    if not dsx_data.bind_token_drop(model, drop) and hasattr(model, "_no_split_modules"):
        dsx_data.convert_to_random_ltd(model, config=drop)
        undo.append(lambda: dsx_data.remove_random_ltd(model))
    logger.info("random_ltd: layers %s keep %d tokens at first", schedule.layer_ids, schedule.current_seq)
    return drop


def _convert_layers(model: nn.Module, config: Config, undo: list[Callable[[], Any]]) -> Any:
    section = config.use("progressive_layer_drop")
    if not section.enabled:
        return None
    schedule = dsx_data.ProgressiveLayerDrop(section.theta, section.gamma)
    found = dsx_data.find_layer_drop(model)
    if found is not None:
        found.use_schedule(schedule)
        return found
    if {"pld_theta", "progressive_layer_drop"} & set(inspect.signature(model.forward).parameters):
        return dsx_data.LayerDrop(schedule, 0)  # the model drops layers itself
    try:
        made = dsx_data.convert_to_layer_drop(model, schedule=schedule)
    except dsx_data.DataArgumentError as error:
        if takes_any_keyword(model):  # DeepSpeed's contract: the model reads the arguments from its `**kwargs`
            logger.info("progressive_layer_drop: pld_theta is given to %s, which takes **kwargs", type(model).__name__)
            return dsx_data.LayerDrop(schedule, 0)
        raise EngineArgumentError(
            f"progressive_layer_drop: which layers may be skipped is not known ({error}); call"
            " dsx.data.convert_to_layer_drop(model, LayerClass, schedule=...) before dsx.initialize, or give the"
            " model's forward an argument pld_theta and drop there"
        ) from error
    undo.append(lambda: dsx_data.remove_layer_drop(model))
    logger.info("progressive_layer_drop: %d layers, theta falls to %g", made.layers, section.theta)
    return made


def build_parts(model: nn.Module, config: Config, conversion: Conversion, counters: Counters) -> dict[str, Any]:
    """The parts that work on batches and steps, by the name of their section, in the order of their use."""
    parts: dict[str, Any] = {}
    section = config.use("curriculum_learning")
    if section.enabled:
        scheduler = dsx_data.CurriculumScheduler(section, name="curriculum_learning")
        parts["curriculum_learning"] = SeqlenCurriculum(scheduler, dsx_data.truncate_batch, model, counters)
    drop = conversion.layer_drop
    if drop is not None:
        parts["progressive_layer_drop"] = LayerDropping(drop.schedule, drop if drop.layers else None, model)
    if conversion.token_drop is not None:
        parts["random_ltd"] = TokenDropping(conversion.token_drop, dsx_data.bind_token_drop, model)
    return parts


def token_batches(
    config: Config, groups: Callable[[], list[dict[str, Any]]], parts: Callable[[], int]
) -> FixedBatches | TokenBatches:
    """The part that counts the samples of an update, weights its losses and scales its learning rates.

    Args:
        groups: the optimizer's parameter groups.
        parts: micro-batches of an update over all ranks.
    """
    section = config.data_efficiency
    batching = section.data_sampling.dynamic_batching
    if not (section.enabled and section.data_sampling.enabled and batching.enabled):
        return FixedBatches()
    method = batching.lr_scaling_method
    by = batching.loss_weighting
    return TokenBatches(
        config.batch.train, lambda size, base: dsx_data.lr_factor(size, base, method), groups,
        by=by, unit=batching.max_tokens if by == "tokens" else config.batch.micro, parts=parts,
    )  # fmt: skip


def loader_rule(config: Config) -> LoaderRule:
    """A function from dataset and options to the options of the training loader, as the configuration changes them."""
    section = config.data_efficiency
    sampling = section.data_sampling
    if not (section.enabled and sampling.enabled):
        return _whole_updates(config)

    def rule(dataset: Any, options: LoaderOptions) -> LoaderOptions:
        options = dataclasses.replace(
            options, seed=section.seed, num_workers=options.num_workers or sampling.num_workers,
            pin_memory=options.pin_memory or sampling.pin_memory,
        )  # fmt: skip
        if sampling.curriculum_learning.enabled:
            curriculum = sampling.curriculum_learning
            sampler = dsx_data.CurriculumSampler(
                _length(dataset), curriculum.curriculum_metrics, global_batch_size=config.batch.train,
                seed=section.seed, num_epochs=sampling.num_epochs, cluster_path=curriculum.data_cluster_path,
            )  # fmt: skip
            return dataclasses.replace(options, sampler=sampler)
        if sampling.dynamic_batching.enabled:
            return dataclasses.replace(options, budget=_budget(sampling.dynamic_batching))
        return options

    return rule


def _whole_updates(config: Config) -> LoaderRule:
    """With elasticity, epochs consist of complete updates, so that each update has the same samples with any number of
    ranks.
    """

    def rule(dataset: Any, options: LoaderOptions) -> LoaderOptions:
        if not config.elasticity.enabled or options.sampler is not None or options.budget is not None:
            return options
        ordered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset) > 0
        if not (ordered or isinstance(dataset, dsx_data.SharedStream)):
            if options.rank == 0:
                logger.warning(
                    "elasticity: the samples of %s cannot be shared out again: it goes on at the same number of ranks"
                    " only, and the last update of its epochs is smaller; wrap it in dsx.data.SharedStream",
                    type(dataset).__name__,
                )
            return options
        fits = config.batch.train % (options.micro_batch_size * options.world_size) == 0
        return dataclasses.replace(options, global_batch=config.batch.train) if fits else options

    return rule


def _budget(section: Any) -> Any:
    budget = dsx_data.TokenBudget(
        dsx_data.lengths_from(section.metrics_path),
        max_tokens=section.max_tokens,
        min_batch_size=section.min_batch_size,
        max_batch_size=section.max_batch_size,
        order=section.sequence_picking_order,
        too_long="drop",
    )
    if section.verbose:
        plan = budget.plan()
        sizes = [len(plan[i]) for i in range(len(plan))]
        logger.info("dynamic_batching: %d batches of %d to %d samples", len(plan), min(sizes), max(sizes))
    return budget


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__"):
        raise EngineArgumentError(
            "data_efficiency.data_sampling.curriculum_learning: got a dataset without a length, expected a map-style"
            " one; a curriculum draws samples by their number"
        )
    return len(dataset)
