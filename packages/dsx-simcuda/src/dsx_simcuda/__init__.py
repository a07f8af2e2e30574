"""A CUDA device in software for torch's CPU build: every device path runs, races are found, host waits are counted.

Importing this package does nothing. `install()`, before torch is imported, puts the simulated device in the place of
CUDA; `python -m dsx_simcuda train.py` does so for a program that knows nothing of it.
"""

from __future__ import annotations

from ._version import __version__
from .building import TESTED, build
from .errors import BuildFailed, ImportedTooLate, RefusedHere, SimcudaError
from .findings import HostSync, Report, Seen, host_syncs, reports, watch, write
from .frames import Frame
from .installing import get_option, install, is_installed, set_option, synchronize
from .options import MODES, Options

__all__ = [
    "BuildFailed",
    "Frame",
    "HostSync",
    "ImportedTooLate",
    "MODES",
    "Options",
    "RefusedHere",
    "Report",
    "Seen",
    "SimcudaError",
    "TESTED",
    "__version__",
    "build",
    "get_option",
    "host_syncs",
    "install",
    "is_installed",
    "reports",
    "set_option",
    "synchronize",
    "watch",
    "write",
]
