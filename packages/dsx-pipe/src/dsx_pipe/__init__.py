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
from .planner import plan
from .runtime import Pipeline
from .schedule import (
    DataParallelSchedule,
    InferenceSchedule,
    PipeSchedule,
    Schedule,
    TrainSchedule,
    build,
    check,
    live_activations,
    simulate,
    uniform_times,
    with_communication,
)

__all__ = [
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
    "StageError",
    "TiedLayerSpec",
    "TrainSchedule",
    "__version__",
    "build",
    "check",
    "live_activations",
    "measure_layers",
    "partition_balanced",
    "partition_uniform",
    "plan",
    "simulate",
    "uniform_times",
    "with_communication",
]
