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

    from .config import CometConfig, CSVConfig, MonitorConfig, TensorBoardConfig, WandbConfig
    from .curvature import Eigenvalue
    from .flops import FlopsProfiler, get_model_profile
    from .memory import memory_breakdown, memory_snapshot
    from .monitor import CometMonitor, JSONLMonitor, MonitorMaster, TensorBoardMonitor, WandbMonitor, csvMonitor
    from .noise import GradientNoise, GradientSquares
    from .report import write_report
    from .run import MemoryLog, start_run
    from .straggler import Straggler, StragglerMonitor, judge_stragglers
    from .timeline import Timeline, merge_traces
    from .timers import ThroughputTimer, WallClock, phase_times
    from .tolerance import tolerating

_HOMES = {
    "clocks": ("TracedClock",),
    "config": (
        "CSVConfig",
        "CometConfig",
        "EigenvalueConfig",
        "FlopsProfilerConfig",
        "GradientNoiseConfig",
        "JSONLConfig",
        "MonitorConfig",
        "StragglerConfig",
        "TensorBoardConfig",
        "TimelineConfig",
        "WandbConfig",
    ),
    "curvature": (
        "CurvatureError",
        "Eigenvalue",
    ),
    "errors": (
        "BackendMissing",
        "MonitorConfigError",
        "ReportError",
    ),
    "flops": (
        "FlopsProfiler",
        "RunFacts",
        "get_model_profile",
    ),
    "memory": (
        "MemorySnapshot",
        "memory_breakdown",
        "memory_in_use",
        "memory_snapshot",
    ),
    "monitor": (
        "CometMonitor",
        "JSONLMonitor",
        "MonitorMaster",
        "TensorBoardMonitor",
        "WandbMonitor",
        "csvMonitor",
    ),
    "noise": ("GradientNoise", "GradientSquares"),
    "report": ("write_report",),
    "run": (
        "MemoryLog",
        "start_run",
    ),
    "straggler": (
        "Straggler",
        "StragglerMonitor",
        "StragglerReport",
        "judge_stragglers",
    ),
    "timeline": (
        "Timeline",
        "merge_traces",
    ),
    "timers": (
        "ThroughputTimer",
        "WallClock",
        "phase_times",
    ),
    "tolerance": ("tolerating",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CSVConfig",
    "CometConfig",
    "CometMonitor",
    "Eigenvalue",
    "FlopsProfiler",
    "GradientNoise",
    "GradientSquares",
    "JSONLMonitor",
    "MemoryLog",
    "MonitorConfig",
    "MonitorMaster",
    "Straggler",
    "StragglerMonitor",
    "TensorBoardConfig",
    "TensorBoardMonitor",
    "ThroughputTimer",
    "Timeline",
    "WallClock",
    "WandbConfig",
    "WandbMonitor",
    "__version__",
    "csvMonitor",
    "get_model_profile",
    "judge_stragglers",
    "memory_breakdown",
    "memory_snapshot",
    "merge_traces",
    "phase_times",
    "start_run",
    "tolerating",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
