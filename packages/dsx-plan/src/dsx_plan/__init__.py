"""What a job needs and how fast it is, before it runs: memory, messages, time, and what to change.

    from dsx_plan import plan, search

    answer = plan(model, config, world_size=64, machine="H100-SXM", batch=example)
    answer.fits, answer.peak_bytes, answer.step_seconds, answer.tokens_per_second

The engine itself is replayed on one rank, among ranks that are not there, on tensors without contents. A cost model
with five constants gives what it did a time. Neither a device nor a process group is needed, and none is left behind.
"""

from ._version import __version__ as __version__
from .engine import EngineToPlan
from .errors import MachineError, NoEngineError, PlanError
from .machine import Constants, Machine
from .plan import Change, PipelinePlan, Plan, StagePlan
from .planner import plan
from .search import Plans, Skipped, search

__all__ = [
    "Change", "Constants", "EngineToPlan", "Machine", "MachineError", "NoEngineError", "PipelinePlan", "Plan",
    "PlanError", "Plans", "Skipped", "StagePlan", "plan", "search",
]  # fmt: skip
