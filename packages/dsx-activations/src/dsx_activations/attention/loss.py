"""The exact mean over the tokens of all ranks, whatever number each of them has."""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch
from torch.autograd.function import once_differentiable

from ..errors import ActivationArgumentError
from .cutting import place_in

__all__ = ["token_mean"]


def token_mean(total: torch.Tensor, tokens: torch.Tensor | int, group: Any = None) -> torch.Tensor:
    """The mean loss of all tokens of a group, from each rank's sum. Collective.

    If gradients are then averaged over the same group (as DDP, dsx_zero and the engine do), they are exactly those of
    one process with all tokens: the backward weighs a rank's sum with `size / tokens of all ranks`.

    Args:
        total: the sum of the losses of this rank's tokens, one number.
        tokens: how many tokens are in the sum; may be 0.
        group: the ranks over which gradients are averaged: with data-parallel ranks beside the sequence group both of
            them together. None: all ranks, or this process alone.

    Returns:
        The mean, the same on all ranks; 0 if no rank has a token.

    Raises:
        ActivationArgumentError: `total` is not one number.
    """
    if total.numel() != 1 or not total.is_floating_point():
        raise ActivationArgumentError(
            f"token_mean: got a {total.dtype} of shape {tuple(total.shape)}, expected the sum of this rank's losses,"
            ' one floating-point number (cross_entropy or linear_cross_entropy with reduction="sum")'
        )
    return _TokenMean.apply(total.reshape(()), tokens, group)  # type: ignore[no-any-return]


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, tokens: torch.Tensor | int, group: Any) -> torch.Tensor:
        dtype = total.dtype if total.dtype.itemsize >= 4 else torch.float32
        if isinstance(tokens, torch.Tensor):
            count = tokens.detach().to(total.device, torch.float64).reshape(())
        else:
            count = torch.full((), float(tokens), dtype=torch.float64, device=total.device)  # the host does not wait
        both = torch.stack([total.detach().to(torch.float64), count])
        size = place_in(group)[1]
        if size > 1:
            dsx_comm.all_reduce(both, group=group)
        counted = both[1].clamp(min=1)
        ctx.weight, ctx.dtype = (size / counted), total.dtype
        return (both[0] / counted).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * ctx.weight).to(ctx.dtype), None, None
