"""The compiled module for the CPU, and what follows when it is missing: the PyTorch reference serves, with the same
results; a large update on that slow path warns once.
"""

from __future__ import annotations

from typing import Any

import torch

from ._native_loader import NativeLoader

WARN_ABOVE = 1 << 20
SLOW = "DSX651"
"""The code of the warning; docs/reference/errors.md explains it."""

_loader = NativeLoader("dsx_ops._C", abi=6)
module = _loader.module
why_not = _loader.why_not
reference_only = _loader.reference_only


def module_for(tensor: torch.Tensor, what: str, numel: int | None = None) -> Any:
    """The compiled module when `tensor` lies in host memory, else None; a large piece of work without it warns once."""
    if tensor.device.type != "cpu":
        return None
    found = module()
    if found is None:
        warn_slow(tensor.numel() if numel is None else numel, what)
    return found


def fp32_module_for(tensor: torch.Tensor, what: str) -> Any:
    """As `module_for`, for kernels that compute in fp32: None for float64, which is for checking gradients."""
    return None if tensor.dtype is torch.float64 else module_for(tensor, what)


def switched_off() -> bool:
    """Whether `reference_only()` holds right now."""
    return _loader.disabled


threads = torch.get_num_threads
"""The number of threads that a kernel may use: torch's setting."""


def warn_slow(numel: int, what: str) -> None:
    """One RuntimeWarning per process when a large piece of work goes over the PyTorch reference."""
    if numel >= WARN_ABOVE:
        reason = _loader.reason or "no kernel for this combination of dtypes"
        text = f"{what}: {numel} elements over the slow PyTorch path; {reason}"
        _loader.warn_once(f"{text} [{SLOW}] docs: dsx explain {SLOW}")
