"""dsx: an engine, launcher and checkpoints around ZeRO training for PyTorch.

`import dsx` loads only the tables below; every public name is imported on its first use (`__getattr__`). So a script
that only needs the launcher loads neither torch nor pydantic, and the import has no effect on the process (no device
query, no environment variables, no files).

The parts are separate packages and are re-exported here: `dsx.zero` is `dsx_zero`, `dsx.comm` is `dsx_comm`, and so on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from dsx_plan import Plan, plan

    from . import (
        autotuning,
        checkpoint,
        checkpointing,
        comm,
        compress,
        config,
        data,
        elasticity,
        lr_schedules,
        moe,
        monitor,
        nvme,
        ops,
        pipe,
        planning,
        utils,
        zero,
    )
    from .comm import init_distributed
    from .config.typed import Bf16, Config, Fp16, OffloadOptimizer, OffloadParam, Optimizer, Scheduler, Zero
    from .data import RepeatingLoader
    from .engine import Engine, StepReport
    from .entry import initialize
    from .errors import DsxConfigError
    from .extension import Extension
    from .float8 import fp8
    from .pipe import PipelineModule, tp_model_init
    from .verification import VerifyError, VerifyReport, verify

_ATTRIBUTES = {
    "initialize": "entry",
    "Bf16": "config.typed",
    "Config": "config.typed",
    "Fp16": "config.typed",
    "OffloadOptimizer": "config.typed",
    "OffloadParam": "config.typed",
    "Optimizer": "config.typed",
    "Scheduler": "config.typed",
    "Zero": "config.typed",
    "Engine": "engine",
    "Extension": "extension",
    "StepReport": "engine",
    "init_distributed": "comm",
    "DsxConfigError": "errors",
    "RepeatingLoader": "data",
    "fp8": "float8",
    "PipelineModule": "pipe",
    "tp_model_init": "pipe",
    "plan": "planning",
    "Plan": "planning",
    "verify": "verification",
    "VerifyReport": "verification",
    "VerifyError": "verification",
}
_MODULES = (
    "autotuning",
    "checkpoint",
    "checkpointing",
    "comm",
    "compress",
    "config",
    "data",
    "elasticity",
    "lr_schedules",
    "moe",
    "pipe",
    "planning",
    "monitor",
    "nvme",
    "ops",
    "utils",
    "zero",
)

_NOT_YET = {
    "init_inference": "no plan: dsx trains; use an inference engine for serving",
    "linear": "no plan: dsx-compress quantises weights, and peft has LoRA layers (decision 0020)",
}

__all__ = [
    "Bf16",
    "Config",
    "DsxConfigError",
    "Engine",
    "Extension",
    "Fp16",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "PipelineModule",
    "Plan",
    "RepeatingLoader",
    "Scheduler",
    "StepReport",
    "VerifyError",
    "VerifyReport",
    "Zero",
    "__version__",
    "autotuning",
    "checkpoint",
    "checkpointing",
    "comm",
    "compress",
    "config",
    "data",
    "elasticity",
    "fp8",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "moe",
    "pipe",
    "plan",
    "planning",
    "monitor",
    "nvme",
    "ops",
    "tp_model_init",
    "utils",
    "verify",
    "zero",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(importlib.import_module(f"{__name__}.{_ATTRIBUTES[name]}"), name)
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _NOT_YET:
            raise AttributeError(f"dsx.{name} is not available yet; it comes with {_NOT_YET[name]}")
        return importlib.import_module(f"{__name__}.deepspeed_names").finder(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
