"""Softmax over the last dimension of scaled, masked scores, forward and backward.

    s = scale x + mask;  y = exp(s - max s) / sum exp(s - max s);      dx = scale y (dy - sum(dy y))

`mask` is broadcast to x: additive in a float dtype (-inf or a large negative number excludes), or bool with True for
positions that take part, as in torch's scaled_dot_product_attention. A row of which nothing takes part becomes zeros,
not NaN. Masks get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library, native
from ..checks import WITH_FLOAT64, arithmetic_of, check, rows_of, vector_dtypes
from ..errors import TensorError
from ..spec import name_of
from ..tables import DTYPE_CODES, addresses


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """softmax(scale * x + mask) of x's shape and dtype. `mask`: bool or float, broadcastable to x. Raises
    `TensorError`.
    """
    if mask is not None and mask.requires_grad:
        raise TensorError("mask: got one that requires a gradient, which it does not get here; add it to x instead")
    return torch.ops.dsx_ops.masked_softmax(x, mask, scale)


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_masked_softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The forward in plain PyTorch."""
    wide = arithmetic_of(x)
    scores = x.to(wide) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.to(wide)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, torch.zeros_like(top), top))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, torch.ones_like(total), total)).to(x.dtype)


def reference_softmax_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """The backward in plain PyTorch."""
    g, w = grad.to(arithmetic_of(y)), y.to(arithmetic_of(y))
    return (scale * w * (g - (g * w).sum(-1, keepdim=True))).to(y.dtype)


# ---- operators -------------------------------------------------------------------------------------------------------


def _check(x: Tensor, mask: Tensor | None) -> None:
    check(x, "softmax's input", dtypes=WITH_FLOAT64)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise TensorError(f"softmax: got shape {tuple(x.shape)}, expected a last dimension of at least one element")
    if mask is None:
        return
    if mask.dtype not in (*vector_dtypes(x), torch.bool):
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
    module = native.fp32_module_for(x, "softmax")
    if module is None:
        return reference_masked_softmax(x, mask, scale)
    out = torch.empty_like(x)
    starts, step, mask = (None, 0, None) if mask is None else _layout(mask, x)
    kind = 0 if mask is None else _MASK_KINDS[mask.dtype]
    given = addresses(x, out, mask, starts)
    module.softmax(given, DTYPE_CODES[x.dtype], *rows_of(x), scale, kind, step, native.threads())
    return out


_MASK_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}  # MaskKind in kernels.h


def _layout(mask: Tensor, x: Tensor) -> tuple[Tensor, int, Tensor]:
    """For every row of x the index of its first mask element (int64), the step along the row, and the mask with such a
    step.
    """
    if mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) != 1:
        mask = mask.contiguous()
    wide = mask.expand(x.shape)
    starts = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape[:-1], wide.stride()[:-1]):
        starts = starts.unsqueeze(-1) + torch.arange(size) * stride
    return starts.contiguous(), wide.stride(-1), mask


def _check_backward(grad: Tensor, y: Tensor) -> None:
    _check(y, None)
    check(grad, "softmax's gradient", dtypes=(y.dtype,), shape=y.shape, like=y)


def _run_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(grad, y)
    module = native.fp32_module_for(y, "softmax")
    if module is None:
        return reference_softmax_backward(grad, y, scale)
    out = torch.empty_like(y)
    module.softmax_backward(*addresses(grad, y, out), DTYPE_CODES[y.dtype], *rows_of(y), scale, native.threads())
    return out


def _fake(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    _check(x, mask)
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(grad, y)
    return torch.empty_like(y)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return torch.ops.dsx_ops.softmax_backward(grad.contiguous(), y, ctx.scale), None, None


library.operator(
    "masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor", _run, _fake, setup=_setup, backward=_backward
)
library.operator(
    "softmax_backward(Tensor grad, Tensor y, float scale) -> Tensor", _run_backward, _fake_backward, gradient=True
)
