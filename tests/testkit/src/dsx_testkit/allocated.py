"""The most host memory that PyTorch's allocator has given out at one time, counted in all threads.

By itself PyTorch counts only in threads that a profiler watches. What a thread of Gloo gives back would then count for
ever, and what it takes would not count at all. A switch of the allocator (`caffe2_report_cpu_memory_usage`) makes it
count everywhere; nothing of Python sets it, so it is set where it lies.

Left out: memory that does not come from this allocator (libraries' own buffers, mapped files).
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Allocated", "count_allocations", "most_allocated"]


@dataclass
class Allocated:
    """Bytes in use, of what was allocated since `count_allocations`.

    Attributes:
        most: the greatest number inside the block.
        first: when the block began.
    """

    most: int = 0
    first: int = 0


def count_allocations() -> None:
    """From now on count what this process allocates, in all its threads."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True


@contextmanager
def most_allocated() -> Iterator[Allocated]:
    """Note how much is in use in the block, where `count_allocations` was called before.

    Nothing but the calling thread's changes end up in the record, each with the sum over all threads: a peak between
    two of them that another thread has caused alone is not seen.
    """
    found = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1)  # so that there is an entry, and the first one is known
        yield found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    entries = [event for event in events if event.get("name") == "[memory]"]
    totals = [event["args"]["Total Allocated"] for event in sorted(entries, key=lambda event: float(event["ts"]))]
    first = min(entries, key=lambda event: float(event["ts"]))["args"]
    found.first = first["Total Allocated"] - first["Bytes"]
    found.most = max(totals)
