"""Pipeline parallelism with schedules as data, and tensor slicing, for PyTorch.

    plan = dsx_pipe.build("zb-h1", ranks=2, micro_batches=8)
    pipe = dsx_pipe.Pipeline(stage_module, plan, loss_fn=loss_fn)
    loss = pipe.step(inputs, labels)

`schedule/` makes, checks, simulates and draws schedules; `runtime/` executes them; `module.py` and `models.py` divide
models into stages; `planner.py` chooses a schedule; `tensor/` slices layers over ranks. This package does not depend on
ZeRO or an engine.
"""

from ._version import __version__
from .errors import PipelineError, StageError
from .grid import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology, RankGrid
from .layers import LayerSpec, TiedLayerSpec
from .measure import measure_layers
from .module import PipelineModule
from .partition import partition_balanced, partition_uniform
from .planner import Candidate, candidates, plan, save_costs
from .runtime import Pipeline, StageCallbacks
from .schedule import (
    DataParallelSchedule,
    InferenceSchedule,
    PipeSchedule,
    Schedule,
    StageTimes,
    Timeline,
    TrainSchedule,
    build,
    check,
    gpipe,
    inference,
    interleaved,
    live_activations,
    problems,
    save_chart,
    save_timeline,
    schedule_of,
    simulate,
    svg,
    uniform_times,
    with_communication,
)

__all__ = [
    "Candidate",
    "DataParallelSchedule",
    "InferenceSchedule",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipeSchedule",
    "Pipeline",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "RankGrid",
    "Schedule",
    "StageCallbacks",
    "StageError",
    "StageTimes",
    "TiedLayerSpec",
    "Timeline",
    "TrainSchedule",
    "__version__",
    "save_costs",
    "save_timeline",
    "build",
    "candidates",
    "check",
    "gpipe",
    "inference",
    "interleaved",
    "live_activations",
    "measure_layers",
    "partition_balanced",
    "partition_uniform",
    "plan",
    "problems",
    "save_chart",
    "schedule_of",
    "simulate",
    "svg",
    "uniform_times",
    "with_communication",
]
