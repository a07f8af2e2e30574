"""Norm with overflow check and scaling of CUDA tensors; one launch per 128 tensors, no waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tables import flat_table, wrote
from . import launch


def squares(module: Any, tensors: list[Tensor]) -> Tensor:
    """fp64 sum of squares per tensor, on their device; the same bits in every run."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    device = launch.one_device(tensors)
    out = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    partials = torch.empty(sum(module.chunks_of(t.numel()) for t in tensors), dtype=torch.float64, device=device)
    module.squares(launch.place(out), flat_table(tensors), out.data_ptr(), partials.data_ptr())
    return out


def scale(module: Any, tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply in place; `factor` may be a number on the device (float32 or float64)."""
    if tensors:
        device = launch.one_device(tensors)
        module.scale(launch.place(tensors[0]), flat_table(tensors), launch.scalar(factor, device))
        wrote(tensors)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients so that their norm is at most `max_norm`, on the device of `norm`. Never waits."""
    factor = max_norm / (norm + 1e-6)
    return torch.where(factor < 1.0, factor, torch.ones_like(factor))  # a NaN changes nothing
