"""Events, writers, timers and profilers for PyTorch training.

Importing this package loads nothing but this table; every name arrives on first use, so that neither pydantic nor torch
nor any backend is paid for before it is needed.
"""

from __future__ import annotations

import importlib

from ._version import __version__

# Type checkers take this name for true; importing `typing` for it would cost more than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .config import (
        CometConfig,
        CSVConfig,
        FlopsProfilerConfig,
        JSONLConfig,
        MonitorConfig,
        TensorBoardConfig,
        WandbConfig,
    )
    from .errors import BackendMissing, MonitorConfigError, ReportError
    from .flops import FlopsProfiler, get_model_profile
    from .memory import MemorySnapshot, memory_snapshot
    from .monitor import CometMonitor, JSONLMonitor, MonitorMaster, TensorBoardMonitor, WandbMonitor, csvMonitor
    from .report import write_report
    from .run import MemoryLog, start_run
    from .timers import ThroughputTimer, WallClock

_HOMES = {
    "config": (
        "CSVConfig",
        "CometConfig",
        "FlopsProfilerConfig",
        "JSONLConfig",
        "MonitorConfig",
        "TensorBoardConfig",
        "WandbConfig",
    ),
    "errors": ("BackendMissing", "MonitorConfigError", "ReportError"),
    "flops": ("FlopsProfiler", "get_model_profile"),
    "memory": ("MemorySnapshot", "memory_snapshot"),
    "monitor": ("CometMonitor", "JSONLMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"),
    "report": ("write_report",),
    "run": ("MemoryLog", "start_run"),
    "timers": ("ThroughputTimer", "WallClock"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendMissing",
    "CSVConfig",
    "CometConfig",
    "CometMonitor",
    "FlopsProfiler",
    "FlopsProfilerConfig",
    "JSONLConfig",
    "JSONLMonitor",
    "MemoryLog",
    "MemorySnapshot",
    "MonitorConfig",
    "MonitorConfigError",
    "MonitorMaster",
    "ReportError",
    "TensorBoardConfig",
    "TensorBoardMonitor",
    "ThroughputTimer",
    "WallClock",
    "WandbConfig",
    "WandbMonitor",
    "__version__",
    "csvMonitor",
    "get_model_profile",
    "memory_snapshot",
    "start_run",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
