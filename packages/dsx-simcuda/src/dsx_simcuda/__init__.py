"""A CUDA device in software for torch's CPU build: every device path runs, races are found, host waits are counted.

Importing this package does nothing. `install()`, before torch is imported, puts the simulated device in the place of
CUDA; `python -m dsx_simcuda train.py` does so for a program that knows nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .advice import name_tensors
from .building import TESTED, build
from .errors import BuildFailed, ImportedTooLate, RefusedHere, SimcudaError
from .findings import HostSync, Report, Seen, host_syncs, reports, watch
from .frames import Frame
from .host_memory import host_reads, host_writes
from .installing import get_option, install, is_installed, set_option, synchronize
from .operation import Operation
from .options import MODES, Options
from .timeline import write

if TYPE_CHECKING:
    import torch

__all__ = [
    "BuildFailed",
    "Frame",
    "HostSync",
    "ImportedTooLate",
    "MODES",
    "Operation",
    "Options",
    "RefusedHere",
    "Report",
    "Seen",
    "SimcudaError",
    "TESTED",
    "__version__",
    "build",
    "get_option",
    "host_reads",
    "host_syncs",
    "host_writes",
    "install",
    "is_installed",
    "name_stream",
    "name_tensors",
    "reports",
    "set_option",
    "synchronize",
    "watch",
    "write",
]


def name_stream(stream: torch.cuda.Stream, name: str) -> None:
    """Gives a stream the name that reports and timelines show."""
    from .streams import name_stream as give  # it needs torch

    give(stream, name)
