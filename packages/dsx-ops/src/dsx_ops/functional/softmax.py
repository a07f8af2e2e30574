"""Softmax over the last dimension of scaled, masked scores, forward and backward.

    s = scale x + mask;  y = exp(s - max s) / sum exp(s - max s);      dx = scale y (dy - sum(dy y))

`mask` is broadcast to x: additive in a float dtype (-inf or a large negative number excludes), or bool with True for positions that take
part, as in torch's scaled_dot_product_attention. A row of which nothing takes part becomes zeros, not NaN. Masks get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..checks import check, name_of
from ..errors import TensorError
from ..spec import FLOATS


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """softmax(scale * x + mask) of x's shape and dtype. `mask`: bool or float, broadcastable to x. Raises `TensorError`."""
    if mask is not None and mask.requires_grad:
        raise TensorError("mask: got one that requires a gradient, which it does not get here; add it to x instead")
    return torch.ops.dsx_ops.masked_softmax(x, mask, scale)


# ---- reference ----------------------------------------------------------------------------------------------------------


def reference_masked_softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The forward in plain PyTorch."""
    scores = x.float() * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, torch.zeros_like(top), top))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, torch.ones_like(total), total)).to(x.dtype)


def reference_softmax_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """The backward in plain PyTorch."""
    g, w = grad.float(), y.float()
    return (scale * w * (g - (g * w).sum(-1, keepdim=True))).to(y.dtype)


# ---- operators ----------------------------------------------------------------------------------------------------------


def _check(x: Tensor, mask: Tensor | None) -> None:
    check(x, "softmax's input")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise TensorError(f"softmax: got shape {tuple(x.shape)}, expected a last dimension of at least one element")
    if mask is None:
        return
    if mask.dtype not in (*FLOATS, torch.bool):
        raise TensorError(
            f"mask: got {name_of(mask.dtype)}, expected bool (True = takes part) or a float dtype (added)"
        )
    if mask.device != x.device:
        raise TensorError(f"mask: got a tensor on {mask.device}, expected {x.device}")
    ahead = x.shape[x.dim() - mask.dim() :] if mask.dim() <= x.dim() else ()
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, ahead)):
        raise TensorError(f"mask: got shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}")


def _run(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    _check(x, mask)
    return reference_masked_softmax(x, mask, scale)


def _check_backward(grad: Tensor, y: Tensor) -> None:
    _check(y, None)
    check(grad, "softmax's gradient", dtypes=(y.dtype,), shape=y.shape, like=y)


def _run_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(grad, y)
    return reference_softmax_backward(grad, y, scale)


def _fake(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    _check(x, mask)
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(grad, y)
    return torch.empty_like(y)


# ---- autograd -----------------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return torch.ops.dsx_ops.softmax_backward(grad.contiguous(), y, ctx.scale), None, None


library.operator(
    "masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor", _run, _fake, setup=_setup, backward=_backward
)
library.operator("softmax_backward(Tensor grad, Tensor y, float scale) -> Tensor", _run_backward, _fake_backward)
