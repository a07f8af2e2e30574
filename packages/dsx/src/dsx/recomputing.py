"""Applies the `activation_checkpointing` section to an engine: it configures `dsx.checkpointing`, makes a pipeline
recompute with it, and warns if the model never calls it.
"""

from __future__ import annotations

from typing import Any

import dsx_activations
from dsx_comm import RankSets
from dsx_core import with_code

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.report import StepReport
from .pipelining import is_pipeline
from .utils.logging import logger

__all__ = ["apply_budget", "apply_section", "section_observers"]


def apply_section(config: Config, model: Any) -> None:
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


def apply_budget(config: Config, model: Any, topology: RankSets) -> Any:
    """Keep a sharded model's activations within the section's `memory_budget`; returns None if there is no budget.

    Raises:
        EngineArgumentError: the model is a pipeline, whose stages hold several micro-batches at the same time.
    """
    budget = config.activation_checkpointing.memory_budget
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


def section_observers(config: Config) -> list[Any]:
    """The observers of steps for the section."""
    section = config.activation_checkpointing
    by_calls = section.model_fields_set and section.memory_budget is None
    return [_NeverCalled()] if by_calls else []


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
