"""A writer that is built in the background, so that a service that does not answer cannot delay the start of training.

The writer is built in its own thread. The caller waits at most two seconds for it, in which most mistakes show (a
missing package, a missing login). Then training goes on, and events wait in the queue until the writer is ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..events import Event
from .base import Writer

__all__ = ["StartingWriter"]

logger = logging.getLogger("dsx_monitor")

_SECONDS = 2.0


class StartingWriter:
    """Passes calls to the writer that `build(config)` makes. Calls come from the queue's thread and wait for the
    writer.

    Args:
        section: name of the configuration section.
        build: makes the writer; may take any time.
        config: the section.

    Raises:
        BaseException: the exception of `build`, if it comes within that time; otherwise the next call raises it.
    """

    remote = True

    def __init__(self, section: str, build: Callable[[Any], Writer], config: Any) -> None:
        self.section = section
        self._done = threading.Event()
        self._writer: Writer | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._build, args=(build, config), name=f"dsx-monitor-{section}", daemon=True).start()
        if not self._done.wait(_SECONDS):
            logger.info("monitor: %s has not started within %.0f s; training goes on meanwhile", section, _SECONDS)
        elif self._error is not None:
            raise self._error

    def _build(self, build: Callable[[Any], Writer], config: Any) -> None:
        try:
            self._writer = build(config)
        except BaseException as error:  # noqa: BLE001  raised again where the writer is used
            self._error = error
        finally:
            self._done.set()

    def _started(self) -> Writer:
        self._done.wait()
        if self._writer is None:
            raise RuntimeError(f"it did not start: {type(self._error).__name__}: {self._error}") from self._error
        return self._writer

    def write(self, events: list[Event]) -> None:
        """See `Writer`."""
        self._started().write(events)

    def flush(self) -> None:
        """See `Writer`."""
        self._started().flush()

    def close(self) -> None:
        """See `Writer`."""
        self._started().close()
