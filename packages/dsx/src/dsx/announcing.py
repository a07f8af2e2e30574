"""Log messages of a new engine: the warnings of its configuration, and the choices that were made."""

from __future__ import annotations

import dsx_comm
import torch
from dsx_core import with_code

from .config import Config
from .engine.engine import Engine
from .engine.request import launched_as
from .optimizers import OptimizerChoice
from .utils.logging import enable_console, logger, set_log_level_from_string

__all__ = ["announce", "set_up_logging"]


def set_up_logging(config: Config) -> None:
    """Set the level of the log, and tell the warnings of the configuration on rank 0."""
    if launched_as()[0] == 0:
        enable_console()
        for warning in config.warnings:
            logger.warning(warning)
    if config.use("log_level"):
        set_log_level_from_string(config.log_level)


def announce(engine: Engine, config: Config, choice: OptimizerChoice | None) -> None:
    """Log the decisions once, on rank 0."""
    if engine.global_rank != 0:
        return
    logger.info("%r: %s", engine, config.precision.describe())
    if choice is not None:
        logger.info("optimizer %s: %s", choice.name, choice.reason)
    if told := _transport(engine.device):
        logger.info("transport: %s", told)
    if config.use("dump_state"):
        logger.info("configuration in effect:\n%s", config.explain().render())
        logger.info("state of the engine:\n%s", engine.describe())
    unused = config.unused_report()
    if unused:
        logger.warning(with_code(unused, "DSX152"))


def _transport(device: torch.device) -> str | None:
    """The way ranks on CPUs reach each other, with the reason where it is not shared memory. None on another device, or
    for one rank.
    """
    if device.type != "cpu" or not dsx_comm.is_initialized() or dsx_comm.get_world_size() == 1:
        return None
    if (backend := dsx_comm.get_backend()) != "gloo":
        return "shared memory of this host" if backend == "dsx" else backend
    if torch.distributed.get_backend() != "dsx":
        return (
            "gloo, with which the program has made its process group; dsx.init_distributed() in its place takes shared"
            " memory where all ranks are on one host"
        )
    why = dsx_comm.native_status()["reason"] or "not all ranks are on one host, or it gives them no shared memory"
    return f"gloo, which is slower than shared memory: {why}"
