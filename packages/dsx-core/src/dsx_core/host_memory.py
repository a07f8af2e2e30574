"""Host memory: how much of it is free, and accesses of native code to it, for whoever watches that memory.

A device writes and reads page-locked host memory on its own, so the host must wait before it touches it. dsx-simcuda, a
CUDA device in software, finds missing waits where PyTorch's operators touch such memory. What native code does with an
address it does not see, unless it is told. Nothing happens where it is not in the process; it is not imported here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def free_host_memory() -> int:
    """Bytes of host memory that programs can still get, what the kernel would give back included. A very large number
    where the system does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 62)


def tell_read(memory: Any, by: str) -> None:
    """Native code is about to read `memory`, a tensor in host memory. `by` names that code in a report."""
    watcher = sys.modules.get("dsx_simcuda")
    if watcher is not None:
        watcher.host_reads(memory, by)


def tell_write(memory: Any, by: str) -> None:
    """Native code is about to write `memory`, a tensor in host memory. `by` names that code in a report."""
    watcher = sys.modules.get("dsx_simcuda")
    if watcher is not None:
        watcher.host_writes(memory, by)
