"""torch.cuda.Stream and Event over torch's device-neutral ones (the CPU build has dummies in their place)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import native


def index_of(device: Any = None) -> int:
    """The device number meant by None, an int, a string or a torch.device. Raises `ValueError` for another kind."""
    if device is None:
        return native.lib.sim_get_device()
    if isinstance(device, int):
        return native.lib.sim_get_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return native.lib.sim_get_device() if device.index is None else device.index


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kw: Any) -> Stream:
        """A stream of the pool of the given priority (negative: high), or the one that `stream_id` names."""
        if "stream_id" in kw:
            return super().__new__(cls, stream_id=kw["stream_id"], device_index=kw["device_index"], device_type=1)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.stream_id

    @property
    def priority(self) -> int:
        """0, or -1 for a stream of high priority."""
        return -1 if self.stream_id > 32 else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, -1

    def record_event(self, event: Event | None = None) -> Event:
        """Records the event, or a new one, here."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, other: torch.Stream) -> None:
        """Lets this stream wait for all that was launched on the other."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Any) -> None:
        """Lets this stream wait for the event."""
        event.wait(self)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class Event(torch.Event):
    """torch.cuda.Event."""

    _timed: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        """An event of the current device; one that another process can open is not simulated."""
        if interprocess:
            raise NotImplementedError("simcuda: events between processes are not simulated")
        made = super().__new__(cls, device="cuda", enable_timing=enable_timing)
        made._timed = enable_timing
        return made

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two recorded events that have happened; both were made with enable_timing."""
        if not (self._timed and getattr(end, "_timed", True)):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        milliseconds = ctypes.c_double()
        failed = native.lib.sim_elapsed(self.event_id, end.event_id, ctypes.byref(milliseconds)).decode()
        if failed:
            raise RuntimeError(failed)
        return milliseconds.value

    def record(self, stream: Any = None) -> None:
        """Records the event on the stream, or on the current one."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        """Lets the stream, or the current one, wait for the event."""
        super().wait(current_stream() if stream is None else stream)

    def ipc_handle(self) -> bytes:
        """Not simulated."""
        raise NotImplementedError("simcuda: events between processes are not simulated")


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream()."""
    index = index_of(device)
    return Stream(stream_id=native.lib.sim_current_stream(index), device_index=index)


def default_stream(device: Any = None) -> Stream:
    """torch.cuda.default_stream()."""
    return Stream(stream_id=0, device_index=index_of(device))


def set_stream(stream: torch.Stream | None) -> None:
    """torch.cuda.set_stream()."""
    if stream is None:
        return
    native.lib.sim_set_device(stream.device.index)
    torch._C._accelerator_setStream(stream)


def name_stream(stream: torch.Stream, name: str) -> None:
    """Gives a stream the name that reports and timelines show."""
    native.lib.sim_name_stream(stream.device.index, stream.stream_id, name.encode())


class StreamContext:
    """`with torch.cuda.stream(s)`: the stream and its device are current inside."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is None:
            return None
        self.device = native.lib.sim_get_device()
        self.before = current_stream(self.stream.device)
        native.lib.sim_set_device(self.stream.device.index)
        torch._C._accelerator_setStream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is None:
            return
        torch._C._accelerator_setStream(self.before)
        native.lib.sim_set_device(self.device)
