"""The `dsx` logger, and lines that only some ranks write.

The logger is a plain `logging.getLogger("dsx")`: there is no handler on the root logger, and an import prints nothing.
The engine calls `enable_console` on rank 0, which adds one stream handler, unless the application has configured
logging itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

logger = logging.getLogger("dsx")
logger.addHandler(logging.NullHandler())

_FORMAT = "[%(asctime)s] [%(levelname)s] [dsx] %(message)s"


class _ConsoleHandler(logging.StreamHandler):
    """Writes to the `sys.stderr` of the moment, so that redirected streams work.

    It writes nothing while the root logger has handlers, which get the lines too: an application that configures
    logging later would see each line twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        self.addFilter(lambda record: not (logger.propagate and logging.getLogger().handlers))

    @property
    def stream(self):  # type: ignore[override]
        return sys.stderr

    @stream.setter
    def stream(self, _value) -> None:
        """Ignore the stream that the base class assigns; this handler looks it up for each line."""


def enable_console(level: int = logging.INFO) -> bool:
    """Show `dsx` lines of at least `level` on stderr; returns True if a handler was added.

    Does nothing if the application handles records already: if the root logger or `dsx` has a handler.
    """
    if logging.getLogger().handlers or any(not isinstance(h, logging.NullHandler) for h in logger.handlers):
        return False
    logger.addHandler(_ConsoleHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    return True


def current_rank() -> int:
    """Global rank of this process: from the process group, otherwise the launcher's `RANK`, otherwise 0. It imports
    nothing.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given global ranks only (default: rank 0; -1 in `ranks`: every rank)."""
    wanted = {0} if ranks is None else set(ranks)
    rank = current_rank()
    if rank in wanted or -1 in wanted:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level(level: int | str) -> None:
    """Set the level of the `dsx` logger by number or name."""
    if isinstance(level, str):
        set_log_level_from_string(level)
    else:
        logger.setLevel(level)


def set_log_level_from_string(name: str) -> None:
    """Set the level of the `dsx` logger by name, in any case: debug, info, warning, error, critical.

    Raises:
        ValueError: the name is none of these.
    """
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    upper = name.upper()
    if upper not in levels:
        raise ValueError(f"log level: got {name!r}, expected one of {', '.join(level.lower() for level in levels)}")
    logger.setLevel(upper)
