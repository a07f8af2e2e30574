"""A device as a process uses it: streams, events, memory, random state, one interface for the CPU and any accelerator.

`Device` asks torch's own device-independent parts (`torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.get_device_module`), so what is written with it runs on CUDA, ROCm, XPU and other accelerators that torch knows,
and on a simulated CUDA device. On the CPU every method has its natural meaning: there is one stream, in order, and an
event is a point in the host's time. So callers need no branch, except where the device makes a real difference.

    device = Device.of(tensor)
    begin = device.mark()
    with device.on(stream):
        ...
    print(device.milliseconds(begin, device.mark()))

This module imports torch; `dsx_core` itself does not. Left out: kernels, collectives, memory-mapped transfers, CUDA
graphs. Those name their hardware where they are.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Device", "Mark", "accelerator_kind"]

Mark = Any
"""A moment on a device: seconds on the host's clock, or an event on the stream that was current."""


@dataclass(frozen=True)
class Device:
    """One device of this process.

    Args:
        kind: torch's name: `cpu`, `cuda`, `xpu`, ...
        index: which one of its kind; 0 on the CPU.
    """

    kind: str
    index: int = 0

    # ------------------------------------------------------------------------------------------------ which device

    @classmethod
    def of(cls, what: torch.Tensor | torch.device | str | int) -> Device:
        """The device of a tensor, or the one that torch means by a name or a number.

        A device without a number is the current one of its kind.

        Raises:
            RuntimeError: torch knows no such device.
        """
        found = what.device if isinstance(what, torch.Tensor) else torch.device(what)
        if found.type in ("cpu", "meta"):
            return cls(found.type)
        index = found.index
        return cls(found.type, torch.get_device_module(found.type).current_device() if index is None else index)

    @classmethod
    def current(cls) -> Device:
        """The accelerator that is current in this thread, or the CPU where torch finds none."""
        kind = accelerator_kind()
        return cls.of(kind) if kind else cls("cpu")

    @classmethod
    def in_use(cls) -> Device | None:
        """The current accelerator if this process has used one already, else None. Never starts to use it.

        For code that looks after what a device holds (memory, random state), which must not make a context on it.
        """
        kind = accelerator_kind()
        return cls.of(kind) if kind and torch.get_device_module(kind).is_initialized() else None

    @staticmethod
    def count() -> int:
        """The number of accelerators that this process sees. Does not start to use them."""
        return torch.accelerator.device_count()

    @property
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`."""
        return torch.device(self.kind, self.index) if self.is_accelerator else torch.device(self.kind)

    @property
    def is_accelerator(self) -> bool:
        """Does it work beside the host, with memory of its own?"""
        return self.kind not in ("cpu", "meta")

    @property
    def name(self) -> str:
        """The product's name, or `cpu`."""
        return self._module.get_device_name(self.index) if self.is_accelerator else self.kind

    @property
    def properties(self) -> Any:
        """The properties of an accelerator (`total_memory` and more)."""
        return self._module.get_device_properties(self.index)

    @cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self.kind)

    def as_current(self) -> AbstractContextManager[Any]:
        """A block in which it is this thread's current device."""
        return self._module.device(self.index) if self.is_accelerator else nullcontext()

    def make_current(self) -> None:
        """Make it this thread's current device; each thread has its own."""
        if self.is_accelerator:
            torch.accelerator.set_device_index(self.index)

    # ------------------------------------------------------------------------------------------ streams and events

    def new_stream(self, *, priority: int = 0) -> torch.Stream | None:
        """A stream of its own; None on the CPU, which has one. Lower numbers are served first."""
        return torch.Stream(self.torch_device, priority=priority) if self.is_accelerator else None

    def stream(self) -> torch.Stream | None:
        """The current stream of *this* device, whatever device is current; None on the CPU."""
        return torch.accelerator.current_stream(self.torch_device) if self.is_accelerator else None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """A block whose work is enqueued on `stream`; None: no change."""
        return nullcontext() if stream is None else stream

    def event(self) -> torch.Event | None:
        """An event behind all work that the current stream has enqueued; None on the CPU, where that work is done."""
        stream = self.stream()
        return None if stream is None else stream.record_event()

    def wait_for(self, event: torch.Event | None) -> None:
        """Let the current stream go on behind `event`. The host does not wait."""
        stream = self.stream()
        if stream is not None and event is not None:
            stream.wait_event(event)

    def wait_for_stream(self, other: torch.Stream | None) -> None:
        """Let the current stream go on behind what `other` has enqueued so far. The host does not wait."""
        stream = self.stream()
        if stream is not None and other is not None:
            stream.wait_stream(other)

    def synchronize(self) -> None:
        """Let the host wait until the device has done all its work."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch_device)

    def mark(self) -> Mark:
        """This moment, for `milliseconds`. The host does not wait."""
        if not self.is_accelerator:
            return time.perf_counter()
        mark = torch.Event(self.torch_device, enable_timing=True)
        mark.record(self.stream())
        return mark

    def passed(self, mark: Mark) -> bool:
        """Has the device come past this mark, so that reading its time makes nobody wait?"""
        return isinstance(mark, float) or mark.query()

    def milliseconds(self, begin: Mark, end: Mark) -> float:
        """The time between two marks. The host waits until the device has passed the second one."""
        if isinstance(begin, float):
            return (end - begin) * 1e3
        end.synchronize()
        return begin.elapsed_time(end)

    def is_capturing(self) -> bool:
        """Is the current stream captured into a graph, so that nothing may wait for it?"""
        asks = getattr(self._module, "is_current_stream_capturing", None) if self.is_accelerator else None
        return asks is not None and asks()

    # ------------------------------------------------------------------------------------------------------ memory

    def allocated(self) -> int:
        """Bytes in tensors on an accelerator; 0 on the CPU, where the allocator does not count."""
        return self._module.memory_allocated(self.index) if self.is_accelerator else 0

    def reserved(self) -> int:
        """Bytes that the allocator of an accelerator holds."""
        return self._module.memory_reserved(self.index) if self.is_accelerator else 0

    def peak_allocated(self) -> int:
        """The most that `allocated` was since `restart_peaks`."""
        return self._module.max_memory_allocated(self.index) if self.is_accelerator else 0

    def peak_reserved(self) -> int:
        """The most that `reserved` was since `restart_peaks`."""
        return self._module.max_memory_reserved(self.index) if self.is_accelerator else 0

    def restart_peaks(self) -> None:
        """Let both peaks begin with what there is now."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats(self.index)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device that nobody uses, and all of them.

        Raises:
            ValueError: the CPU, whose memory is the operating system's to tell.
        """
        if not self.is_accelerator:
            raise ValueError("the memory of the CPU is not torch's: ask psutil.virtual_memory()")
        return self._module.mem_get_info(self.index)

    def empty_cache(self) -> None:
        """Give what the allocator holds and nobody uses back to the device."""
        if self.is_accelerator:
            with self.as_current():
                self._module.empty_cache()

    # ------------------------------------------------------------------------------------------------------ random

    def random_state(self) -> torch.Tensor:
        """The state of this device's default generator, in host memory."""
        return self._module.get_rng_state(self.torch_device) if self.is_accelerator else torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set what `random_state` gave."""
        if self.is_accelerator:
            self._module.set_rng_state(state, self.torch_device)
        else:
            torch.set_rng_state(state)

    def seed(self, seed: int) -> None:
        """Seed this device's default generator, and no other one."""
        if self.is_accelerator:
            with self.as_current():
                self._module.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def __str__(self) -> str:
        return str(self.torch_device)


def accelerator_kind() -> str | None:
    """Torch's name of the accelerators of this machine; None where it finds none. Does not start to use one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type
