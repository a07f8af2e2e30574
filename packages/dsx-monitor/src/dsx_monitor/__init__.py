"""Events, writers, timers and profilers for PyTorch training.

Importing this package loads only the table below. Each name is imported on its first use, so that pydantic, torch and
the backends cost nothing before they are needed.
"""

from __future__ import annotations

import importlib

from ._version import __version__

# Type checkers treat this name as true. Importing it from `typing` would cost more time than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .config import MonitorConfig
    from .curvature import Eigenvalue
    from .flops import FlopsProfiler, get_model_profile
    from .memory import memory_breakdown, memory_snapshot
    from .monitor import CometMonitor, MonitorMaster, TensorBoardMonitor, WandbMonitor, csvMonitor
    from .noise import GradientNoise
    from .report import write_report
    from .run import MemoryLog, start_run
    from .straggler import StragglerMonitor
    from .timeline import Timeline, merge_traces
    from .timers import ThroughputTimer, WallClock

_HOMES = {
    "config": ("MonitorConfig",),
    "curvature": ("Eigenvalue",),
    "flops": ("FlopsProfiler", "get_model_profile"),
    "memory": ("memory_breakdown", "memory_snapshot"),
    "monitor": ("CometMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"),
    "noise": ("GradientNoise",),
    "report": ("write_report",),
    "run": ("MemoryLog", "start_run"),
    "straggler": ("StragglerMonitor",),
    "timeline": ("Timeline", "merge_traces"),
    "timers": ("ThroughputTimer", "WallClock"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CometMonitor",
    "Eigenvalue",
    "FlopsProfiler",
    "GradientNoise",
    "MemoryLog",
    "MonitorConfig",
    "MonitorMaster",
    "StragglerMonitor",
    "TensorBoardMonitor",
    "ThroughputTimer",
    "Timeline",
    "WallClock",
    "WandbMonitor",
    "__version__",
    "csvMonitor",
    "get_model_profile",
    "memory_breakdown",
    "memory_snapshot",
    "merge_traces",
    "start_run",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
