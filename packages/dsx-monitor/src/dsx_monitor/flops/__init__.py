"""Counting the floating-point operations, time and parameters of each module of a model.

Operations are counted where PyTorch dispatches them, below modules and functional calls. So einsum, attention on any
device, custom modules and recomputation are counted by what really runs; hooks on modules only tell to which module an
operation belongs. Backward is counted as it runs, not assumed to be twice the forward pass. Unknown operations that do
arithmetic are listed by name. No hook stays on the model afterwards.

Left out: operations inside kernels that PyTorch does not dispatch. A custom operator is counted by the formula that was
registered for it with `torch.utils.flop_counter.register_flop_formula`; without one its name is listed.
"""

from .facts import RunFacts
from .profile import get_model_profile
from .profiler import FlopsProfiler, ProfilerError
from .ranks import RankFigures, RankTotals
from .units import (
    bytes_to_string,
    count_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "ProfilerError",
    "RankFigures",
    "RankTotals",
    "RunFacts",
    "bytes_to_string",
    "count_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
