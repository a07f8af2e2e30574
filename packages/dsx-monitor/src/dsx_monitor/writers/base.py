"""The contract between the queue and a writer."""

from __future__ import annotations

from typing import Protocol

from ..events import Event

__all__ = ["Writer"]


class Writer(Protocol):
    """Writes events to one place.

    Calls come in this order, all but the constructor from the queue's thread: any number of `write`, with `flush` in
    between whenever the queue has run empty, then `close` once. After an exception the writer is closed and not used
    again.
    """

    section: str
    """Name of the configuration section, for warnings."""

    remote: bool
    """Whether it talks to a service, which may hang: then it gets a thread of its own."""

    def write(self, events: list[Event]) -> None:
        """Take events over; the last ones may stay in a buffer."""
        ...

    def flush(self) -> None:
        """Put everything where it survives the end of this process."""
        ...

    def close(self) -> None:
        """Flush and let go of all files and connections."""
        ...
