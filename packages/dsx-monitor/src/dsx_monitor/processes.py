"""The rank of this process and the number of processes, without importing torch."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["current_rank", "current_world_size"]


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


def _process_group() -> Any:
    """`torch.distributed` if it has a default group, otherwise None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None
