"""Log messages of a new engine: the warnings of its configuration, and the choices that were made."""

from __future__ import annotations

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
    if config.use("dump_state"):
        logger.info("configuration in effect:\n%s", config.explain().render())
        logger.info("state of the engine:\n%s", engine.describe())
    unused = config.unused_report()
    if unused:
        logger.warning(with_code(unused, "DSX152"))
