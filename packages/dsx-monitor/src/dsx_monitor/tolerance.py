"""The rule for all code that writes figures during training: a failed write gives a warning, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dsx_core import with_code

from .errors import ReportError

__all__ = ["tolerating"]

logger = logging.getLogger("dsx_monitor")


@contextmanager
def tolerating(what: str) -> Iterator[None]:
    """Turn an OSError raised inside (no folder, no rights, a full disk) into one warning that begins with `what`.

    A ReportError (there is nothing to put together) is treated the same way.
    """
    try:
        yield
    except (OSError, ReportError) as error:
        text = with_code("monitor: %s: %s: %s; training goes on without it", "DSX853")
        logger.warning(text, what, type(error).__name__, error)
