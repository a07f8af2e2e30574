"""The CPU as an accelerator: there is one device per process, work is done when a call returns, and the memory of the
process counts as the device's memory.

Memory peaks are those of the operating system until one is reset. After that they are the largest values that calls of
these methods have seen.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from .base import Accelerator, AcceleratorError


class HostEvent:
    """A point in time on the host, with the methods of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the present time."""
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Returns True: all work before the event is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once, as the work has been done."""

    def synchronize(self) -> None:
        """Return at once, as the work has been done."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to `end_event`. Raises `AcceleratorError` unless both were recorded."""
        if self._seconds is None or end_event._seconds is None:
            raise AcceleratorError("elapsed_time: got an event that was not recorded; call record() on both first")
        return (end_event._seconds - self._seconds) * 1e3


class CPUAccelerator(Accelerator):
    """The CPU as the device of training, without streams: its events are times of the host."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self._seen: int | None = None  # the peak since a reset; None: use the peak of the operating system
        self._ranges: list[record_function] = []

    def device_name(self, device_index: int | None = None) -> str:
        """`cpu`, for any index: all ranks of a host share it."""
        return "cpu"

    def set_device(self, device_index: int) -> None:
        """Does nothing: every process has one device."""

    def current_device(self) -> int:
        """The local rank, which differs between the ranks of a host."""
        return int(os.environ.get("LOCAL_RANK") or 0)

    def device_count(self) -> int:
        """The number of ranks for this host: LOCAL_WORLD_SIZE or LOCAL_SIZE if a launcher has set it, otherwise the
        number of NUMA nodes with cores.
        """
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            if int(os.environ.get(name) or 0) > 0:
                return int(os.environ[name])
        return max(1, _numa_nodes())

    def synchronize(self, device_index: int | None = None) -> None:
        """Return at once: work is done when its call returns."""

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    # ---- random numbers ---------------------------------------------------------------------------------------------

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # ---- streams and events -----------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """torch's stream of the CPU: there is one, and work in it is done when its call returns."""
        return torch.cpu.Stream

    @property
    def Event(self) -> Any:
        return HostEvent

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cpu.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cpu.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cpu.current_stream()

    # ---- memory -----------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Does nothing: torch keeps no unused host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of the process that are in memory (resident set)."""
        import psutil  # lazy import: most scripts ask for no memory

        found = psutil.Process().memory_info().rss
        if self._seen is not None:
            self._seen = max(self._seen, found)
        return found

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        now = self.memory_allocated()
        if self._seen is not None:
            return self._seen
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(now, peak if sys.platform == "darwin" else peak * 1024)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self._seen = 0
        self.memory_allocated()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> Mapping[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        import psutil  # lazy import: most scripts ask for no memory

        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        import psutil  # lazy import: most scripts ask for no memory

        return psutil.virtual_memory().available

    # ---- dtypes and tensors -----------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Whether the processor computes in float16. If it does not, torch converts numbers, which is slow."""
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Returns `tensor` itself: without a device, page-locked memory has no use."""
        return tensor

    # ---- graphs and profiling ---------------------------------------------------------------------------------------

    def create_graph(self) -> Any:
        raise AcceleratorError("graphs: the CPU records none, and skipping the work would be wrong; call it directly")

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return self.create_graph()

    def replay_graph(self, graph: Any) -> None:
        self.create_graph()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """A range of torch.profiler; domain and category are put before its name."""
        entered = record_function(":".join(part for part in (domain, category, msg) if part))
        entered.__enter__()
        self._ranges.append(entered)

    def range_pop(self, domain: str | None = None) -> None:
        if not self._ranges:
            raise AcceleratorError("range_pop: got no range to end, expected a range_push before it")
        self._ranges.pop().__exit__(None, None, None)

    # ---- environment ------------------------------------------------------------------------------------------------

    def communication_backend_version(self) -> str:
        """The version of torch, which contains gloo."""
        return torch.__version__

    def is_triton_supported(self) -> bool:
        return False

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        """The same variables as for CUDA, so that a CPU job can be kept off the GPUs."""
        return ["CUDA_VISIBLE_DEVICES"]


def _numa_nodes() -> int:
    """The number of NUMA nodes with cores; 0 if the kernel does not tell."""
    folder = "/sys/devices/system/node"
    try:
        nodes = [n for n in os.listdir(folder) if n.startswith("node") and n[4:].isdigit()]
    except OSError:
        return 0
    return sum(1 for node in nodes if _cores(os.path.join(folder, node, "cpulist")))


def _cores(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
