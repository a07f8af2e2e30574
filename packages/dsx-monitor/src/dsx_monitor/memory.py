"""The memory that this process and its device use, as the operating system counts it.

RSS counts shared pages (libraries, shared-memory transports) in every process that maps them. PSS divides such pages
among these processes, so the PSS of all ranks add up to the memory that the machine really uses. For PSS the kernel
walks over all mappings (about a millisecond per GiB), so do not read it in every step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .processes import accelerator_in_use

__all__ = ["MemorySnapshot", "memory_breakdown", "memory_in_use", "memory_snapshot"]


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes. `pss` is None if the kernel does not give it; device figures are 0 without an accelerator in use."""

    rss: int
    peak_rss: int
    pss: int | None = None
    cuda_allocated: int = 0
    cuda_reserved: int = 0
    cuda_peak: int = 0

    def as_dict(self) -> dict[str, int | None]:
        """Name to bytes."""
        return asdict(self)


def memory_snapshot(*, pss: bool = False) -> MemorySnapshot:
    """Read the current figures; `pss`: also read the proportional share. This never initialises a device."""
    rss, peak = _resident()
    return MemorySnapshot(rss, peak, _proportional() if pss else None, *_device())


def memory_in_use() -> int:
    """Bytes allocated on the CUDA device that this process uses, or its resident bytes if it uses none.

    This is cheap enough for every step.
    """
    allocated = _device()[0]
    if allocated:
        return allocated
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _resident_elsewhere()[0]


def memory_breakdown(states: Mapping[str, int], snapshot: MemorySnapshot) -> dict[str, int]:
    """Bytes per class: the model's states as their owner counts them, and classes for the rest.

    Args:
        states: bytes of each class of state, such as params, master, grads, optimizer, buffers.
        snapshot: the memory at the same moment.

    Returns:
        The classes of `states`; then, on a device, `activations` (allocated above the states at the peak), `cached`
        (reserved but not allocated) and `total` (reserved); on the host `other` (libraries, data, activations) and
        `total`.
    """
    held = sum(states.values())
    if snapshot.cuda_reserved:
        return {
            **states,
            "activations": max(0, snapshot.cuda_peak - held),
            "cached": max(0, snapshot.cuda_reserved - snapshot.cuda_allocated),
            "total": snapshot.cuda_reserved,
        }
    total = snapshot.rss if snapshot.pss is None else snapshot.pss
    return {**states, "other": max(0, total - held), "total": total}


def _resident() -> tuple[int, int]:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            lines = dict(line.split(":", 1) for line in stream if ":" in line)
        return _kib(lines["VmRSS"]), _kib(lines["VmHWM"])
    except (OSError, KeyError):
        return _resident_elsewhere()


def _resident_elsewhere() -> tuple[int, int]:
    """Resident memory and its peak, for systems without /proc: both are the peak, as no other figure is there."""
    import resource  # lazy import: Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def _proportional() -> int | None:
    if not os.path.exists("/proc/self/smaps_rollup"):
        return None
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as stream:
            return next((_kib(line.split(":", 1)[1]) for line in stream if line.startswith("Pss:")), None)
    except OSError:  # containers may forbid it
        return None


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _device() -> tuple[int, int, int]:
    device = accelerator_in_use()
    return (device.allocated(), device.reserved(), device.peak_allocated()) if device else (0, 0, 0)
