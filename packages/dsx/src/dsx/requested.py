"""The optimizer and the schedule of an engine: those that the caller gives, or those that the configuration names."""

from __future__ import annotations

from typing import Any

import torch
from dsx_comm import RankSets
from dsx_core import with_code
from torch import nn

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.request import Request
from .engine.stepper import ScheduleDriver
from .lr_schedules import build_schedule
from .optimizers import OptimizerChoice, choose_optimizer
from .utils.logging import logger

__all__ = ["check_parameters", "chosen_optimizer", "made_optimizer", "made_schedule"]


def chosen_optimizer(config: Config, request: Request) -> OptimizerChoice | None:
    """The optimizer that the configuration names, checked before there is a process group; None if the caller gives one
    or none is named.
    """
    section, precision = config.use("optimizer"), config.use("precision")
    if request.optimizer is not None and precision.master != "fp32" and precision.optimizer_state == "fp32":
        logger.warning(
            "the optimizer given to initialize decides the dtype of its states: torch's keep them in the masters' %s",
            precision.master,
        )
    if section is None:
        return None
    if request.optimizer is not None:
        text = "the optimizer given to initialize replaces optimizer.type %s of the config"
        logger.warning(with_code(text, "DSX153"), section.type)
        return None
    return choose_optimizer(section.type, section.params, masters=precision.master, states=precision.optimizer_state)


def check_parameters(request: Request, choice: OptimizerChoice | None) -> None:
    """Refuse to make an optimizer over no parameters, before anything is changed. Where none is made, an empty list is
    what clients give for inference.
    """
    given = request.optimizer
    makes_one = choice is not None or (given is not None and not isinstance(given, torch.optim.Optimizer))
    if makes_one and request.model_parameters is not None and not request.model_parameters:
        raise EngineArgumentError(
            "initialize(model_parameters=...): got no parameters, expected those that the optimizer trains; leave it"
            " out to train all parameters of the model (an iterator gives its parameters once only). To train none,"
            " give no optimizer and name none in the configuration"
        )


def made_optimizer(model: nn.Module, request: Request, topology: RankSets, choice: OptimizerChoice | None) -> Any:
    """The optimizer over the model's full parameters: that of the configuration, the caller's, or None."""
    parameters = list(model.parameters()) if request.model_parameters is None else request.model_parameters
    if choice is not None:
        if choice.communicates:
            return choice.build(parameters, process_group=topology.data.group)
        return choice.build(parameters, model=model) if choice.reads_model else choice.build(parameters)
    given: Any = request.optimizer
    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    made = given(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise EngineArgumentError(
            f"initialize(optimizer=<callable>): it returned {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    return made


def made_schedule(config: Config, request: Request, optimizer: Any) -> ScheduleDriver:
    """The driver of the schedule: the caller's, otherwise that of the configuration.

    Args:
        optimizer: what it schedules; None: this engine does not train.
    """
    section, given = config.use("scheduler"), request.lr_scheduler
    if section is None and given is None:
        return ScheduleDriver(None)
    if optimizer is None:
        text = "the learning-rate scheduler is not used: this engine has no optimizer"
        logger.warning(with_code(text, "DSX154"))
        return ScheduleDriver(None)
    # torch's schedulers need a torch.optim.Optimizer; the inner optimizer has the same parameter groups.
    target = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.inner
    if section is not None and given is None:
        return ScheduleDriver(build_schedule(section.type, target, section.params))
    # A class is a callable that makes one.
    made = callable(getattr(given, "step", None)) and not isinstance(given, type)
    return ScheduleDriver(given if made else given(target))  # pyright: ignore[reportArgumentType]
