"""Pipeline parallelism with schedules as data, and tensor slicing, for PyTorch.

    plan = dsx_pipe.build("zb-h1", ranks=2, micro_batches=8)
    pipe = dsx_pipe.Pipeline(stage_module, plan, loss_fn=loss_fn)
    loss = pipe.step(inputs, labels)

`schedule/` makes, checks, simulates and draws schedules; `runtime/` executes them; `module.py` and `models.py` divide
models into stages; `planner.py` chooses a schedule; `tensor/` slices layers over ranks. This package does not depend on
ZeRO or an engine.
"""

from ._version import __version__
from .errors import PartitionError, PipelineError, ScheduleError, StageError, TensorSliceError
from .grid import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology, RankGrid
from .layers import LayerSpec, TiedLayerSpec
from .measure import measure_layers
from .module import PipelineModule
from .partition import partition_balanced, partition_uniform, split_by_weights
from .planner import Candidate, LayerCost, candidates, load_costs, plan, save_costs, stage_times
from .runtime import Pipeline, StageCallbacks, StepReport
from .schedule import (
    Action,
    DataParallelSchedule,
    InferenceSchedule,
    Kind,
    PipeSchedule,
    Schedule,
    Span,
    StageTimes,
    Timeline,
    TrainSchedule,
    build,
    check,
    gpipe,
    inference,
    interleaved,
    live_activations,
    load_timeline,
    one_f_one_b,
    problems,
    save_chart,
    save_timeline,
    schedule_of,
    simulate,
    svg,
    uniform_times,
    with_communication,
    zero_bubble_h1,
    zero_bubble_v,
)

__all__ = [
    "Action",
    "Candidate",
    "DataParallelSchedule",
    "InferenceSchedule",
    "Kind",
    "LayerCost",
    "LayerSpec",
    "PartitionError",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipeSchedule",
    "Pipeline",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "RankGrid",
    "Schedule",
    "ScheduleError",
    "Span",
    "StageCallbacks",
    "StageError",
    "StageTimes",
    "StepReport",
    "TensorSliceError",
    "TiedLayerSpec",
    "Timeline",
    "TrainSchedule",
    "__version__",
    "build",
    "candidates",
    "check",
    "gpipe",
    "inference",
    "interleaved",
    "live_activations",
    "load_costs",
    "load_timeline",
    "measure_layers",
    "one_f_one_b",
    "partition_balanced",
    "partition_uniform",
    "plan",
    "problems",
    "save_chart",
    "save_costs",
    "save_timeline",
    "schedule_of",
    "simulate",
    "split_by_weights",
    "stage_times",
    "svg",
    "uniform_times",
    "with_communication",
    "zero_bubble_h1",
    "zero_bubble_v",
]
