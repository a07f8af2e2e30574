"""One rule for all that writes figures beside training: what cannot be written costs a warning, never the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ReportError

__all__ = ["tolerating"]

logger = logging.getLogger("dsx_monitor")


@contextmanager
def tolerating(what: str) -> Iterator[None]:
    """Turn an OSError raised inside (no folder, no rights, a full disk) into one warning that begins with `what`.

    A ReportError (nothing was written that could be put together) is treated alike.
    """
    try:
        yield
    except (OSError, ReportError) as error:
        logger.warning("monitor: %s: %s: %s; training goes on without it", what, type(error).__name__, error)
