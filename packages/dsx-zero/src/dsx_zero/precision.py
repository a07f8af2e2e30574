"""Precision is a record: which dtype each kind of state has, explicit and printable.

The parameters' dtype is the model's own and decided before sharding. The rest follows from it unless it is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ZeroConfigError

__all__ = ["Precision"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Precision:
    """Dtypes of gradients, messages and masters. None means: the parameter's dtype.

    Args:
        gradients: gradients kept between micro-batches (`data_types.grad_accum_dtype`).
        communication: gradients on the wire (`communication_data_type`).
        master: what the optimizer updates; parameters that are at least as wide are their own masters.
        check_overflow: look for non-finite gradients before a step and skip it when there are any. None means: yes for
            parameters of 16 bits, no for wider ones (where a NaN shall show, as in plain PyTorch).
    """

    gradients: torch.dtype | None = None
    communication: torch.dtype | None = None
    master: torch.dtype = torch.float32
    check_overflow: bool | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "communication", "master"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _FLOATS:
                raise ZeroConfigError(f"precision.{name}", f"got {dtype}, expected one of {[str(d) for d in _FLOATS]}")

    def gradient_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of a parameter of dtype `parameter` are accumulated."""
        return self.gradients or parameter

    def wire_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Dtype in which those gradients are sent."""
        return self.communication or parameter

    def checks_overflow(self, parameters: set[torch.dtype]) -> bool:
        """Are non-finite gradients looked for, given the dtypes of the trainable parameters?"""
        if self.check_overflow is not None:
            return self.check_overflow
        return any(dtype.itemsize < 4 for dtype in parameters)
