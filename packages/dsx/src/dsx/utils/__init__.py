"""Small tools around training: logging by rank, memory lines, profiler ranges, construction on a device.

Functions that read or write sharded state (`safe_get_full_fp32_param` and others) and leaf modules belong to
`dsx_zero`. They are imported from there on first use, so that logging alone loads neither dsx_zero nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .logging import enable_console, log_dist, logger, set_log_level, set_log_level_from_string

if TYPE_CHECKING:
    from .memory import MemoryStatus, memory_status, see_memory_usage
    from .on_device import OnDevice
    from .partition import partition_balanced, partition_uniform
    from .ranges import instrument_w_nvtx
    from .tensors import clone_tensors_for_torch_save, move_to_device, set_random_seed

_HERE = {
    "MemoryStatus": "memory",
    "memory_status": "memory",
    "see_memory_usage": "memory",
    "OnDevice": "on_device",
    "clone_tensors_for_torch_save": "tensors",
    "instrument_w_nvtx": "ranges",
    "move_to_device": "tensors",
    "set_random_seed": "tensors",
    "partition_balanced": "partition",
    "partition_uniform": "partition",
}

__all__ = [
    "MemoryStatus",
    "OnDevice",
    "clone_tensors_for_torch_save",
    "enable_console",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "memory_status",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "see_memory_usage",
    "set_log_level",
    "set_log_level_from_string",
    "set_random_seed",
    "safe_get_full_fp32_param",
    "safe_set_full_fp32_param",
    "safe_get_full_optimizer_state",
    "safe_set_full_optimizer_state",
    "safe_get_full_grad",
    "safe_set_full_grad",
    "safe_get_local_fp32_param",
    "safe_set_local_fp32_param",
    "safe_get_local_optimizer_state",
    "safe_set_local_optimizer_state",
    "safe_get_local_grad",
    "safe_set_local_grad",
    "safe_update_full_grad_vectorized",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
    "RepeatingLoader",
]
_FROM_ZERO = tuple(name for name in __all__ if name.startswith("safe_") or "z3_leaf_" in name)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HERE:
        return getattr(importlib.import_module(f"{__name__}.{_HERE[name]}"), name)
    if name in _FROM_ZERO:
        # Lazy import: dsx_zero loads torch, which a user of the logger need not pay for.
        import dsx_zero

        return getattr(dsx_zero, name)
    if name == "RepeatingLoader":
        from .. import data

        return data.RepeatingLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
