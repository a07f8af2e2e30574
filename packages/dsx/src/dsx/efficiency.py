"""The extensions for the sections `data_efficiency`, `curriculum_learning` and `progressive_layer_drop`.

Layers are converted before the model is sharded; the parts that control them join the engine (`engine/efficiency.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import dsx_data
import dsx_data.errors
import dsx_data.routing
from dsx_comm import RankSets
from torch import nn

from .config import Config
from .data import LoaderOptions
from .engine.efficiency import (
    LayerDropping,
    SeqlenCurriculum,
    TokenBatches,
    TokenDropping,
    takes_any_keyword,
)
from .engine.errors import EngineArgumentError
from .engine.hooks import FixedBatches
from .engine.request import Request
from .extension import Extension, Stateful, Watch, Watched
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["Curriculum", "DataSampling", "LayerDrop", "TokenDrop"]

LoaderRule = Callable[[Any, LoaderOptions], LoaderOptions]
_NUMBERED = "a stage holds some of the layers, and layers are numbered over the whole model"


def _refuse_in_pipeline(model: nn.Module, key: str, reason: str) -> None:
    """Refuse a setting that does not work in a pipeline, where a rank has only some layers and some stages read no
    batches.
    """
    if is_pipeline(model):
        raise EngineArgumentError(f"{key}: got enabled with a pipeline, expected false: {reason}")


class Curriculum(Extension):
    """The section `curriculum_learning`: sequences that grow."""

    name = "curriculum_learning"

    def __init__(self) -> None:
        self._part: SeqlenCurriculum | None = None

    def join(self, watch: Watch, to: Watched) -> None:
        """Cut the batches."""
        section = to.config.use("curriculum_learning")
        if section.enabled:
            scheduler = dsx_data.CurriculumScheduler(section, name="curriculum_learning")
            self._part = watch.add(SeqlenCurriculum(scheduler, dsx_data.truncate_batch, to.module, to.counters))

    def state(self) -> Stateful | None:
        """The schedule."""
        return self._part


class TokenDrop(Extension):
    """The section `data_efficiency.data_routing.random_ltd`: layers that skip some of the tokens."""

    name = "random_ltd"

    def __init__(self) -> None:
        self._drop: Any = None
        self._undo: Callable[[], Any] | None = None
        self._part: TokenDropping | None = None

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Convert the layers of a model that names them; others are converted by the script."""
        section, model = config.use("data_efficiency"), request.model
        routing = section.data_routing
        if not (section.enabled and routing.enabled and routing.random_ltd.enabled):
            return request
        _refuse_in_pipeline(model, "data_efficiency.data_routing.random_ltd", _NUMBERED)
        schedule = dsx_data.RandomLTDScheduler(routing.random_ltd, global_batch_size=config.batch.train)
        self._drop = dsx_data.routing.TokenDrop.from_config(routing.random_ltd, schedule)
        if not dsx_data.routing.bind_token_drop(model, self._drop) and hasattr(model, "_no_split_modules"):
            dsx_data.convert_to_random_ltd(model, config=self._drop)
            self._undo = lambda: dsx_data.routing.remove_random_ltd(model)
        logger.info("random_ltd: layers %s keep %d tokens at first", schedule.layer_ids, schedule.current_seq)
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Advance the schedule after each step."""
        if self._drop is not None:
            self._part = watch.add(TokenDropping(self._drop, dsx_data.routing.bind_token_drop, to.module))
        if self._undo is not None:
            watch.closing.callback(self._undo)

    def state(self) -> Stateful | None:
        """The schedule."""
        return self._part


class LayerDrop(Extension):
    """The section `progressive_layer_drop`: layers that are skipped more and more often."""

    name = "progressive_layer_drop"

    def __init__(self) -> None:
        self._drop: Any = None
        self._undo: Callable[[], Any] | None = None
        self._part: LayerDropping | None = None

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Convert the layers, unless the model drops layers itself."""
        section, model = config.use("progressive_layer_drop"), request.model
        if not section.enabled:
            return request
        found = dsx_data.routing.find_layer_drop(model)
        if found is None:
            way = "convert the layers with dsx.data.convert_to_layer_drop before PipelineModule takes them"
            _refuse_in_pipeline(model, "progressive_layer_drop", f"{_NUMBERED}; {way}")
        schedule = dsx_data.ProgressiveLayerDrop(section.theta, section.gamma)
        if found is not None:
            found.use_schedule(schedule)
        self._drop = found or self._converted(model, schedule)
        return request

    def _converted(self, model: nn.Module, schedule: Any) -> Any:
        if {"pld_theta", "progressive_layer_drop"} & set(inspect.signature(model.forward).parameters):
            return dsx_data.routing.LayerDrop(schedule, 0)  # the model drops layers itself
        try:
            made = dsx_data.convert_to_layer_drop(model, schedule=schedule)
        except dsx_data.errors.DataArgumentError as error:
            if takes_any_keyword(model):  # DeepSpeed's contract: the model reads the arguments from its `**kwargs`
                text = "progressive_layer_drop: pld_theta is given to %s, which takes **kwargs"
                logger.info(text, type(model).__name__)
                return dsx_data.routing.LayerDrop(schedule, 0)
            raise EngineArgumentError(
                f"progressive_layer_drop: which layers may be skipped is not known ({error}); call"
                " dsx.data.convert_to_layer_drop(model, LayerClass, schedule=...) before dsx.initialize, or give the"
                " model's forward an argument pld_theta and drop there"
            ) from error
        self._undo = lambda: dsx_data.routing.remove_layer_drop(model)
        logger.info("progressive_layer_drop: %d layers, theta falls to %g", made.layers, schedule.theta)
        return made

    def join(self, watch: Watch, to: Watched) -> None:
        """Advance the schedule after each step, and give it to a model that takes it as an argument."""
        drop = self._drop
        if drop is not None:
            self._part = watch.add(LayerDropping(drop.schedule, drop if drop.layers else None, to.module))
        if self._undo is not None:
            watch.closing.callback(self._undo)

    def state(self) -> Stateful | None:
        """The step, and the seed of converted layers."""
        return self._part


class DataSampling(Extension):
    """The section `data_efficiency.data_sampling`: which samples a batch has, and how many. With `elasticity`, epochs
    of whole updates.
    """

    name = "data_sampling"

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Refuse batches of unequal size in a pipeline."""
        section = config.use("data_efficiency")
        if section.enabled and section.data_sampling.enabled and section.data_sampling.dynamic_batching.enabled:
            reason = "the stages between the first and the last read no batches, so they do not know their sizes"
            _refuse_in_pipeline(request.model, "data_efficiency.data_sampling.dynamic_batching", reason)
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Choose the samples of the training loader, and weight losses of batches of unequal size."""
        parts = lambda: to.micro_batches() * to.topology.batches[1]  # noqa: E731
        watch.batches = token_batches(to.config, lambda: to.optimizer.param_groups, parts)
        watch.loader_rule = loader_rule(to.config)


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
        dsx_data.batching.plan.lengths_from(section.metrics_path),
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
