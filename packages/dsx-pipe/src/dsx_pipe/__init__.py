"""Pipeline parallelism with schedules as data, and tensor slicing, for PyTorch."""

from ._version import __version__
from .errors import PartitionError, PipelineError, ScheduleError, StageError, TensorSliceError
from .planner import Candidate, LayerCost, candidates, load_costs, plan, save_costs, stage_times

__all__ = ["__version__"]
