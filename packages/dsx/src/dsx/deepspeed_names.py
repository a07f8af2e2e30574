"""Names of DeepSpeed that stay reachable from `dsx` while dsx-compat, which has them, is installed.

dsx-compat lies above dsx, so nothing here imports it by itself: it is imported when a program asks for a name of the
table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["PLACES", "finder"]

PLACES: dict[str, dict[str, str]] = {
    "dsx": {
        "add_config_arguments": "dsx_compat.arguments:add_config_arguments",
        "add_tuning_arguments": "dsx_compat.lr_arguments:add_tuning_arguments",
        "accelerator": "dsx_compat.accelerator",
        "get_accelerator": "dsx_compat.accelerator:get_accelerator",
    },
    "dsx.ops": {"op_builder": "dsx_compat.op_builder"},
    "dsx.pipe": {"PipelineParallelGrid": "dsx_compat.grid:PipelineParallelGrid"},
    "dsx.Engine": {
        name: f"dsx_compat.switches:EngineSwitches.{name}"
        for name in (
            *("fp16_enabled", "bfloat16_enabled", "dynamic_loss_scale", "get_data_types", "optimizer_name"),
            *("scheduler_name", "steps_per_print", "wall_clock_breakdown", "zero_optimization"),
            *("zero_optimization_partition_gradients", "zero_optimization_partition_weights"),
        )
    },
    "dsx.checkpoint": {
        name: f"dsx_compat.checkpoint.zero_to_fp32:{name}"
        for name in (
            *("get_fp32_state_dict_from_zero_checkpoint", "convert_zero_checkpoint_to_fp32_state_dict"),
            *("convert_zero_checkpoint_to_state_dict", "load_state_dict_from_zero_checkpoint"),
            *("get_model_state_file", "get_optim_files"),
        )
    },
    "dsx.lr_schedules": {
        name: f"dsx_compat.lr_arguments:{name}"
        for name in (
            *("add_tuning_arguments", "parse_arguments", "get_config_from_args", "get_lr_from_config"),
            *("override_params", "override_1cycle_params", "override_lr_range_test_params"),
            "override_warmupLR_params",
        )
    },
}
"""Module of dsx, or its engine -> name in it -> where the object is: `module:attribute`, or a module."""


def finder(module: str) -> Callable[[str], Any]:
    """The function `__getattr__` of a module of dsx, or of its engine: it finds the names of the table.

    It raises an AttributeError for every other name, and without dsx-compat, naming the way to install it.
    """

    def find(name: str) -> Any:
        if name not in PLACES[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, attribute = PLACES[module][name].partition(":")
        try:
            found: Any = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "dsx_compat":
                raise  # a library that it needs is missing
            raise AttributeError(
                f"{module}.{name} is a name of DeepSpeed and needs the package dsx-compat, which is not installed;"
                " run in the checkout of dsx: pip install --no-deps ./packages/dsx-compat"
            ) from error
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        return found

    return find
