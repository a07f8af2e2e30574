"""What `dsx.initialize` and `resume` import sooner or later, in one import.

The launcher of an elastic job loads it before it forks ranks (entry point of the group `dsx_launch.warm`).
"""

import dsx_checkpoint.behind
import dsx_compress.config
import dsx_moe
import dsx_monitor
import dsx_nvme
import dsx_ops
import dsx_pipe

from . import entry, lr_schedules, optimizers, wiring
from .config import load
from .elasticity import membership, peers, runtime
from .engine import preemption

__all__ = [
    "dsx_checkpoint", "dsx_compress", "dsx_moe", "dsx_monitor", "dsx_nvme", "dsx_ops", "dsx_pipe", "entry", "load",
    "lr_schedules", "membership", "optimizers", "peers", "preemption", "runtime", "wiring",
]  # fmt: skip
