"""Attributes that torch.amp.GradScaler sets on an optimizer that handles the scale: `found_inf` and `grad_scale`.

The scaler sees one rank's gradients. All ranks must skip a step together, so that what it found is reduced over the
ranks here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import ReduceOp, all_reduce


def found_overflow(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], group: Any, world_size: int
) -> bool:
    """Whether the scaler found a gradient that is not finite, on any rank (then collective); False without a scaler."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    # torch's scaler leaves the number 0, not a tensor, where no parameter has a gradient on this rank
    flag = torch.as_tensor(found, dtype=torch.float32, device=_device(parameters)).detach().reshape(1).clone()
    if world_size > 1:
        all_reduce(flag, ReduceOp.MAX, group)
    return bool(flag)


def unscale(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Divide this rank's gradients by the scaler's loss scale, which may differ between ranks."""
    scale = getattr(optimizer, "grad_scale", None)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale is not None and gradients:
        torch._foreach_mul_(gradients, 1.0 / float(scale))  # pyright: ignore[reportPrivateImportUsage]


def _device(parameters: list[torch.Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
