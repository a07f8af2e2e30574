"""Plans of a job before it runs: memory, messages, time, and what to change.

    from dsx_plan import plan, search

    answer = plan(model, config, world_size=64, machine="H100-SXM", batch=example)
    answer.fits, answer.peak_bytes, answer.step_seconds, answer.tokens_per_second

The engine itself is replayed on one rank, among ranks that are not there, on tensors without contents. A cost model
with a few constants gives what it did a time. Neither a device nor a process group is needed, and none is left behind.

Names are imported on first use, so that the command line answers `--help` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .engine import EngineToPlan
    from .errors import MachineError, NoEngineError, PlanError
    from .layers import layer_costs
    from .lengths import longest
    from .machine import Constants, Machine
    from .planner import plan
    from .plans import Change, PipelinePlan, Plan, StagePlan
    from .reaching import Reach, Reached
    from .searching import Plans, Skipped, search
    from .sizes import largest

_HOME_OF = {
    "Change": "plans",
    "Constants": "machine",
    "EngineToPlan": "engine",
    "Machine": "machine",
    "MachineError": "errors",
    "NoEngineError": "errors",
    "PipelinePlan": "plans",
    "Plan": "plans",
    "PlanError": "errors",
    "Plans": "searching",
    "Reach": "reaching",
    "Reached": "reaching",
    "largest": "sizes",
    "longest": "lengths",
    "Skipped": "searching",
    "StagePlan": "plans",
    "layer_costs": "layers",
    "plan": "planner",
    "search": "searching",
}

__all__ = [
    "Change", "Constants", "EngineToPlan", "Machine", "MachineError", "NoEngineError", "PipelinePlan", "Plan",
    "PlanError", "Plans", "Reach", "Reached", "Skipped", "StagePlan", "largest", "layer_costs", "longest", "plan",
    "search",
]  # fmt: skip


if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name in _HOME_OF:
            return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
