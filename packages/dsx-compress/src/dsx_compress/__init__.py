"""Quantisation-aware training, pruning, layer reduction and distillation for PyTorch.

    model = init_compression(model, config)             # puts techniques on the layers; weights stay parameters
    scheduler = compression_scheduler(model, config)    # scheduler.step() after every optimizer step
    model = redundancy_clean(model, config)             # a smaller ordinary model

Importing this package loads only this table; every name is loaded on first use, so that pydantic and torch
are imported only when they are needed.
"""

from __future__ import annotations

import importlib

from ._version import __version__

# Type checkers take this name for true; importing `typing` for it would cost more than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .apply import init_compression, is_compressed
    from .cleaning import redundancy_clean
    from .conversion import convert_conv1d_to_linear, get_module_name
    from .distillation import DistillationLoss, Teacher
    from .errors import CompressionError
    from .export import export_model, load_exported
    from .layers import recursive_getattr, recursive_setattr
    from .posttraining import PostTrainingConfig, quantize_post_training
    from .report import compression_report
    from .runtime import load_quantized
    from .scheduler import compression_scheduler
    from .students import student_initialization
    from .torchao import export_torchao, load_torchao, to_torchao

_NAMES_OF_MODULES = {
    "apply": ("init_compression", "is_compressed"),
    "cleaning": ("redundancy_clean",),
    "conversion": ("convert_conv1d_to_linear", "get_module_name"),
    "distillation": ("DistillationLoss", "Teacher"),
    "errors": ("CompressionError",),
    "export": ("export_model", "load_exported"),
    "layers": ("recursive_getattr", "recursive_setattr"),
    "posttraining": ("PostTrainingConfig", "quantize_post_training"),
    "report": ("compression_report",),
    "runtime": ("load_quantized",),
    "scheduler": ("compression_scheduler",),
    "students": ("student_initialization",),
    "torchao": ("export_torchao", "load_torchao", "to_torchao"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names}

__all__ = [
    "CompressionError",
    "DistillationLoss",
    "PostTrainingConfig",
    "Teacher",
    "__version__",
    "compression_report",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "export_model",
    "export_torchao",
    "get_module_name",
    "init_compression",
    "is_compressed",
    "load_exported",
    "load_quantized",
    "load_torchao",
    "quantize_post_training",
    "recursive_getattr",
    "recursive_setattr",
    "redundancy_clean",
    "student_initialization",
    "to_torchao",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
