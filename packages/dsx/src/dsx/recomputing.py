"""The section `activation_checkpointing` of an engine: it configures `dsx.checkpointing`, makes a pipeline recompute
with it, and warns if the model never calls it.
"""

from __future__ import annotations

from typing import Any

import dsx_activations
from dsx_comm import RankSets
from dsx_core import with_code

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.report import StepReport
from .engine.request import Request
from .extension import Extension, Stateful, Watch, Watched
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["Recomputing"]


class Recomputing(Extension):
    """The section `activation_checkpointing`; its memory budget has a state."""

    name = "activation_budget"

    def __init__(self) -> None:
        self._budget: Any = None

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """See `_apply_section`."""
        _apply_section(config, request.model)
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Keep the model within its memory budget, or look whether anything is recomputed."""
        section = to.config.activation_checkpointing
        if section.model_fields_set and section.memory_budget is None:
            watch.observers.append(_NeverCalled())
        self._budget = _apply_budget(section.memory_budget, to.module, to.topology)
        if self._budget is not None:
            watch.closing.callback(self._budget.remove)

    def state(self) -> Stateful | None:
        """The state of the recomputation budget; None without a budget."""
        return self._budget


def _apply_section(config: Config, model: Any) -> None:
    """Configure `dsx.checkpointing` as the section says, if there is one. Collective if inputs are divided."""
    section = config.use("activation_checkpointing")
    if not section.model_fields_set:
        return
    if dsx_activations.is_configured():
        logger.info("activation_checkpointing: the configuration replaces what checkpointing.configure was given")
    dsx_activations.configure(None, section)
    pipeline = config.pipeline.model_fields_set
    if is_pipeline(model) and model.recomputation.interval and "use_reentrant" not in pipeline:
        model.set_checkpoint_function(dsx_activations.checkpoint)


def _apply_budget(budget: Any, model: Any, topology: RankSets) -> Any:
    """Keep a sharded model's activations within the section's `memory_budget`; returns None if there is no budget.

    Raises:
        EngineArgumentError: the model is a pipeline, whose stages hold several micro-batches at the same time.
    """
    if budget is None:
        return None
    if is_pipeline(model):
        raise EngineArgumentError(
            "activation_checkpointing.memory_budget: got a PipelineModule, whose stages keep several micro-batches at a"
            " time; use its activation_checkpoint_interval"
        )
    first = topology.rank == 0
    return dsx_activations.apply_memory_budget(
        model, budget, group=topology.data.group, announce=logger.info if first else logger.debug
    )


class _NeverCalled:
    """Warns once, after the first step, if the section had no effect."""

    def __init__(self) -> None:
        self._before, self._judged = dsx_activations.use_count(), False

    def after_step(self, report: StepReport) -> None:
        """Judge the first step."""
        if self._judged:
            return
        self._judged = True
        if dsx_activations.use_count() == self._before:
            text = (
                "activation_checkpointing is configured, and the model never called dsx.checkpointing.checkpoint:"
                " nothing is recomputed because of it. Call it in the model's forward"
            )
            logger.warning(with_code(text, "DSX155"))
