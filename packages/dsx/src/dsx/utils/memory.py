"""The memory that this process and its device use, as numbers and as one log line.

Device figures are those of torch's caching allocator; host figures are this process' resident set and the machine's
use. Nothing here synchronises a device; the garbage collector runs only in `see_memory_usage`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from .logging import log_dist

_GIB = 2**30


@dataclass(frozen=True)
class MemoryStatus:
    """Bytes in use. Device values are 0 where there is no CUDA device."""

    device_allocated: int
    device_peak: int
    device_reserved: int
    device_reserved_peak: int
    host_resident: int
    host_used: int
    host_percent: float

    def __str__(self) -> str:
        device = (
            f"MA {self.device_allocated / _GIB:.2f} GB, Max_MA {self.device_peak / _GIB:.2f} GB, "
            f"CA {self.device_reserved / _GIB:.2f} GB, Max_CA {self.device_reserved_peak / _GIB:.2f} GB"
        )
        return (
            f"{device}, process {self.host_resident / _GIB:.2f} GB, "
            f"host {self.host_used / _GIB:.2f} GB ({self.host_percent:.1f} %)"
        )


def memory_status() -> MemoryStatus:
    """Read the current figures."""
    import psutil
    from dsx_core.device import Device  # lazy import: it brings torch

    host = psutil.virtual_memory()
    found, device = Device.in_use(), (0, 0, 0, 0)
    if found is not None:
        device = (found.allocated(), found.peak_allocated(), found.reserved(), found.peak_reserved())
    return MemoryStatus(*device, psutil.Process().memory_info().rss, host.total - host.available, host.percent)


def see_memory_usage(message: str, force: bool = False, ranks: tuple[int, ...] = (0,)) -> MemoryStatus | None:
    """Log `message` with the memory in use, and start new peaks on the device.

    Does nothing without `force`, so that calls may stay in production code. Garbage is collected first, so that the
    line does not count memory that is about to be freed.

    Returns:
        The figures that were logged, or None without `force`.
    """
    if not force:
        return None
    from dsx_core.device import Device  # lazy import: it brings torch

    gc.collect()
    status = memory_status()
    log_dist(f"{message}: {status}", ranks)
    device = Device.in_use()
    if device is not None:
        device.restart_peaks()
    return status
