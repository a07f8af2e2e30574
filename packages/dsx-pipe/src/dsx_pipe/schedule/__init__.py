"""Pipeline schedules as data: build, print, parse, validate, simulate, draw.

plan = build("zb-h1", ranks=4, micro_batches=8)
check(plan)
print(simulate(plan, uniform_times(4)).bubble_share)
"""

from .action import Action, Kind
from .build import (
    BUILDERS,
    build,
    gpipe,
    inference,
    inference_over,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from .communication import with_communication
from .draw import save as save_chart
from .draw import svg
from .instructions import DataParallelSchedule, InferenceSchedule, PipeSchedule, TrainSchedule, schedule_of
from .plan import Schedule
from .simulate import Span, StageTimes, Timeline, load_timeline, save_timeline, simulate, uniform_times
from .validate import check, live_activations, problems

__all__ = [
    "BUILDERS", "Action", "DataParallelSchedule", "InferenceSchedule", "Kind", "PipeSchedule", "Schedule", "Span",
    "StageTimes", "Timeline", "TrainSchedule", "build", "check", "gpipe", "inference", "inference_over", "interleaved",
    "live_activations", "load_timeline", "one_f_one_b", "problems", "save_chart",
    "save_timeline", "schedule_of", "simulate", "svg", "uniform_times",
    "with_communication", "zero_bubble_h1", "zero_bubble_v",
]  # fmt: skip
