"""Recording stand-ins for what only a device has: works of its collectives, streams, events.

They do nothing but note what was asked of them, in one common list, so that a test can say in which order a piece of
code would have used a device: `RecordingWork` for `torch.distributed` works, `FakeCuda` for streams and events of
`torch.cuda`.
"""

from __future__ import annotations

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


Clock = dict[str, int]
"""How far each stream, by name, is known to have come."""


def _merge(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(tick, clock.get(name, 0))


class FakeStream:
    """A stream that notes what it is told to wait for.

    `clock` says what of the other streams is over when its next operation runs (`StreamMemory` follows it).
    """

    def __init__(self, cuda: FakeCuda, name: str, index: int = 0) -> None:
        self._cuda, self.name, self.device = cuda, name, torch.device("cuda", index)
        self.clock: Clock = {name: 0}

    def wait_stream(self, other: FakeStream) -> None:
        """This stream continues behind all that is on `other` now."""
        self._cuda.note(f"{self.name} waits for {other.name}")
        _merge(self.clock, other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        """This stream continues behind the event."""
        self._cuda.note(f"{self.name} waits for event {event.number}")
        _merge(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Put an event behind what is on this stream."""
        event = event or self._cuda.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for this stream."""
        self._cuda.note(f"host waits for {self.name}")
        self._cuda.wait_for(self.clock)


class FakeEvent:
    """An event that notes where it was recorded and who waits for it."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda, self.number = cuda, number
        self.done = False
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        """Put this event behind what is on the stream (the current one by default)."""
        stream = stream or self._cuda.current
        self._cuda.note(f"event {self.number} on {stream.name}")
        self.clock = dict(stream.clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        """The stream (the current one by default) continues behind this event."""
        (stream or self._cuda.current).wait_event(self)

    def query(self) -> bool:
        """Whether the device has passed the event: what the test has set `done` to."""
        return self.done

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._cuda.note(f"host waits for event {self.number}")
        self._cuda.wait_for(self.clock)


class FakeCuda:
    """Streams and events without a device; `log` is what was asked of them, in order.

    `with FakeCuda().installed() as cuda:` puts it in the place of `torch.cuda.Stream`, `Event`, `current_stream`,
    `stream`, `synchronize`, `current_device`, `set_device` and `device`. Code must look these up in `torch.cuda` when
    it runs. There are as many devices as are named; each has a current stream, at first "default" ("default of 1").
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.host = FakeStream(self, "host")
        """The host's own operations; its clock says what of the streams it has waited for."""
        self._device = 0
        self._defaults: dict[int, FakeStream] = {}
        self._current: dict[int, FakeStream] = {}
        self._made: list[FakeStream] = []
        self._events = 0

    @property
    def default(self) -> FakeStream:
        """The default stream of device 0."""
        return self.default_stream(0)

    @property
    def current(self) -> FakeStream:
        """The current stream of the current device."""
        return self.current_stream()

    def note(self, text: str) -> None:
        """Add a line to the log; a test's jobs may add their own."""
        self.log.append(text)

    def launch(self, stream: FakeStream) -> None:
        """Put an operation on a stream. What the host has done and waited for is over before it."""
        _merge(stream.clock, self.host.clock)
        stream.clock[stream.name] += 1

    def wait_for(self, clock: Clock) -> None:
        """The host goes on only behind this."""
        _merge(self.host.clock, clock)

    def default_stream(self, device: Any = None) -> FakeStream:
        """The default stream of a device, the current one if None."""
        index = self._index(device)
        if index not in self._defaults:
            self._defaults[index] = FakeStream(self, f"default of {index}" if index else "default", index)
        return self._defaults[index]

    def current_stream(self, device: Any = None) -> FakeStream:
        """The current stream of a device, the current one if None."""
        return self._current.get(self._index(device)) or self.default_stream(device)

    def make_stream(self, device: Any = None, **kwargs: Any) -> FakeStream:
        """A new stream: "stream 1", "stream 2", ..."""
        del kwargs
        self._made.append(FakeStream(self, f"stream {len(self._made) + 1}", self._index(device)))
        return self._made[-1]

    def event(self, *args: Any, **kwargs: Any) -> FakeEvent:
        """A new event, numbered from 1."""
        del args, kwargs
        self._events += 1
        return FakeEvent(self, self._events)

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream the current one of its device, and its device the current one."""
        before, device = dict(self._current), self._device
        if stream is not None:
            self._device = self._index(stream.device)
            self._current[self._device] = stream
        try:
            yield
        finally:
            self._current, self._device = before, device

    @contextmanager
    def at(self, device: Any) -> Iterator[None]:
        """Make a device the current one."""
        before = self._device
        self.set_device(device)
        try:
            yield
        finally:
            self._device = before

    def set_device(self, device: Any) -> None:
        """Make a device the current one from now on."""
        self._device = self._index(device)

    def synchronize(self, device: Any = None) -> None:
        """The host waits for everything."""
        del device
        self.note("host waits for the device")
        for stream in (*self._defaults.values(), *self._made):
            self.wait_for(stream.clock)

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self._device if index is None else index

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Stand in for `torch.cuda` inside, and for what `dsx_core.device.Device` asks `torch.accelerator`."""
        replaced: dict[str, Callable[..., Any]] = {
            "Stream": self.make_stream,
            "Event": self.event,
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "stream": self.on,
            "synchronize": self.synchronize,
            "current_device": lambda: self._device,
            "set_device": self.set_device,
            "device": self.at,
        }
        independent: dict[str, Callable[..., Any]] = {
            "current_stream": self.current_stream,
            "current_device_index": lambda: self._device,
            "set_device_index": self.set_device,
            "synchronize": self.synchronize,
        }
        places = [(torch.cuda, name, value) for name, value in replaced.items()]
        places += [(torch.accelerator, name, value) for name, value in independent.items()]
        before = [(module, name, getattr(module, name)) for module, name, _ in places]
        for module, name, value in places:
            setattr(module, name, value)
        try:
            yield self
        finally:
            for module, name, value in before:
                setattr(module, name, value)
