"""Recording stand-ins for what only a device has: works of its collectives, streams, events.

They do nothing but note what was asked of them, in one common list, so that a test can say in which order a piece of
code would have used a device: `RecordingWork` for `torch.distributed` works, `FakeCuda` for streams and events of
`torch.cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["FakeCuda", "FakeEvent", "FakeStream", "RecordingWork", "recorded_collectives"]

_COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "all_gather_into_tensor",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "isend", "irecv", "barrier",
)  # fmt: skip


class RecordingWork:
    """What a backend would return; `waits` are the arguments of each wait.

    Args:
        completed: what `is_completed` answers, until `complete` is called.
    """

    def __init__(self, completed: bool = True) -> None:
        self.waits: list[tuple[Any, ...]] = []
        self.completed = completed

    def wait(self, *arguments: Any) -> bool:
        """Note the arguments; a device's work must be waited for without any."""
        self.waits.append(arguments)
        return True

    def is_completed(self) -> bool:
        """Whether the collective counts as done."""
        return self.completed

    def complete(self) -> None:
        """The collective is done from now on."""
        self.completed = True


@contextmanager
def recorded_collectives(completed: bool = True) -> Iterator[list[RecordingWork]]:
    """Inside, the collectives of `torch.distributed` move nothing; each call's work is appended to the list."""
    works: list[RecordingWork] = []

    def issue(*args: Any, **kwargs: Any) -> RecordingWork:
        del args, kwargs
        works.append(RecordingWork(completed))
        return works[-1]

    replaced: dict[str, Any] = {name: issue for name in _COLLECTIVES if hasattr(dist, name)}
    replaced["batch_isend_irecv"] = lambda ops: [issue() for _ in ops]
    replaced["P2POp"] = lambda *args: args  # torch's own knows its isend and irecv
    before = {name: getattr(dist, name) for name in replaced}
    for name, value in replaced.items():
        setattr(dist, name, value)
    try:
        yield works
    finally:
        for name, value in before.items():
            setattr(dist, name, value)


class FakeStream:
    """A stream that notes what it is told to wait for."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        """This stream continues behind all that is on `other` now."""
        self._cuda.note(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        """This stream continues behind the event."""
        self._cuda.note(f"{self.name} waits for event {event.number}")

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Put an event behind what is on this stream."""
        event = event or self._cuda.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for this stream."""
        self._cuda.note(f"host waits for {self.name}")


class FakeEvent:
    """An event that notes where it was recorded and who waits for it."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda, self.number = cuda, number
        self.done = False

    def record(self, stream: FakeStream | None = None) -> None:
        """Put this event behind what is on the stream (the current one by default)."""
        self._cuda.note(f"event {self.number} on {(stream or self._cuda.current).name}")

    def wait(self, stream: FakeStream | None = None) -> None:
        """The stream (the current one by default) continues behind this event."""
        (stream or self._cuda.current).wait_event(self)

    def query(self) -> bool:
        """Whether the device has passed the event: what the test has set `done` to."""
        return self.done

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._cuda.note(f"host waits for event {self.number}")


class FakeCuda:
    """Streams and events without a device; `log` is what was asked of them, in order.

    `with FakeCuda().installed() as cuda:` puts it in the place of `torch.cuda.Stream`, `Event`, `current_stream`,
    `stream`, `synchronize`, `current_device` and `device`. Code must look these up in `torch.cuda` when it runs.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.default = FakeStream(self, "default")
        self.current = self.default
        self._streams = self._events = 0

    def note(self, text: str) -> None:
        """Add a line to the log; a test's jobs may add their own."""
        self.log.append(text)

    def make_stream(self, *args: Any, **kwargs: Any) -> FakeStream:
        """A new stream: "stream 1", "stream 2", ..."""
        del args, kwargs
        self._streams += 1
        return FakeStream(self, f"stream {self._streams}")

    def event(self, *args: Any, **kwargs: Any) -> FakeEvent:
        """A new event, numbered from 1."""
        del args, kwargs
        self._events += 1
        return FakeEvent(self, self._events)

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Stand in for `torch.cuda` inside."""
        replaced: dict[str, Callable[..., Any]] = {
            "Stream": self.make_stream,
            "Event": self.event,
            "current_stream": lambda *args, **kwargs: self.current,
            "default_stream": lambda *args, **kwargs: self.default,
            "stream": self.on,
            "synchronize": lambda *args, **kwargs: self.note("host waits for the device"),
            "current_device": lambda: 0,
            "device": lambda *args, **kwargs: contextlib.nullcontext(),
        }
        before = {name: getattr(torch.cuda, name) for name in replaced}
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
        try:
            yield self
        finally:
            for name, value in before.items():
                setattr(torch.cuda, name, value)
