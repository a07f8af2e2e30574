"""The protocol between the queue and a writer."""

from __future__ import annotations

from typing import Protocol

from ..events import Event

__all__ = ["Writer"]


class Writer(Protocol):
    """Writes events to one place.

    The queue's thread makes all calls except the constructor: any number of `write`, a `flush` whenever the queue has
    run empty, and at the end one `close`. After an exception the writer is closed and not used again.
    """

    section: str
    """Name of the configuration section, for warnings."""

    remote: bool
    """Whether it talks to a service. A service may hang, so such a writer gets its own thread."""

    def write(self, events: list[Event]) -> None:
        """Write events; the last ones may stay in a buffer."""
        ...

    def flush(self) -> None:
        """Write out everything, so that it survives the end of this process."""
        ...

    def close(self) -> None:
        """Flush, and close all files and connections."""
        ...
