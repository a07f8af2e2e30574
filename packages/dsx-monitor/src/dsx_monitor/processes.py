"""The rank of this process, the number of processes, and the accelerator that it uses, without importing torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsx_core.device import Device

__all__ = ["accelerator", "accelerator_in_use", "current_rank", "current_world_size"]


def current_rank() -> int:
    """Global rank of this process: from the initialised process group, otherwise the variable RANK, otherwise 0."""
    group = _process_group()
    return group.get_rank() if group is not None else int(os.environ.get("RANK", "0"))


def current_world_size() -> int:
    """Number of processes of the job: from the initialised process group, otherwise the variable WORLD_SIZE, otherwise
    1.
    """
    group = _process_group()
    return group.get_world_size() if group is not None else int(os.environ.get("WORLD_SIZE", "1"))


def accelerator(device: Any) -> Device | None:
    """The accelerator that a `torch.device` or a name means; None for the CPU, without importing torch."""
    if str(device) == "cpu":
        return None
    from dsx_core.device import Device  # lazy import: it brings torch

    found = Device.of(device)
    return found if found.is_accelerator else None


def accelerator_in_use() -> Device | None:
    """The accelerator on which this process holds something. A process that has not loaded torch holds nothing."""
    if "torch" not in sys.modules:
        return None
    from dsx_core.device import Device  # lazy import: it brings torch

    return Device.in_use()


def _process_group() -> Any:
    """`torch.distributed` if it has a default group, otherwise None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None
