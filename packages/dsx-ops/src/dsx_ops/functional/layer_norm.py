"""Layer norm over the last dimension, alone or after a residual addition, forward and backward.

    mean = sum(x) / n;  rstd = 1 / sqrt(sum((x - mean)^2) / n + eps);  xhat = (x - mean) rstd;  y = xhat weight + bias
    g = dy weight;  dx = rstd (g - sum(g)/n - xhat sum(g xhat)/n);  dweight = sum_rows dy xhat;  dbias = sum_rows dy

Backward needs `xhat`: from the input (kept with its mean and rstd), or, `from_output`, from the output as (y - bias) /
weight, so that the input need not be kept (`normalize_invertible`; weights of 0 then give no gradient through their
column). Not here: RMS norm, normalised shapes of more than one dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library, native
from ..checks import WITH_FLOAT64, arithmetic_of, check, vector_dtypes
from ..errors import TensorError
from ..tables import DTYPE_CODES, addresses


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, from_output: bool = False) -> Tensor:
    """y of x's shape and dtype. `weight`, `bias`: [x.shape[-1]], of one dtype. `from_output`: keep y, not x, for
    backward. Raises `TensorError`.
    """
    return torch.ops.dsx_ops.layer_norm(x, weight, bias, eps, from_output)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual) in one pass; the sum is rounded to x's dtype first. `x` and `residual`
    have one shape [..., n] and dtype, `weight` and `bias` are [n]; `eps` is added to the variance. Raises
    `TensorError`.
    """
    y, total, _, _ = torch.ops.dsx_ops.add_layer_norm(x, residual, weight, bias, eps)
    return y, total


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd); the statistics are fp32 of shape x.shape[:-1]."""
    dtype = arithmetic_of(x)
    wide = x.to(dtype)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * weight.to(dtype) + bias.to(dtype)
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def reference_layer_norm_backward(
    grad: Tensor,
    saved: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    extra: Tensor | None,
    from_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); `extra` is added to dx."""
    dtype = arithmetic_of(saved)
    g, wide, w = grad.to(dtype), saved.to(dtype), weight.to(dtype)
    if from_output:
        xhat = torch.where(w == 0, torch.zeros_like(wide), (wide - bias.to(dtype)) / w)
    else:
        xhat = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    gw = g * w
    dx = (gw - gw.mean(-1, keepdim=True) - xhat * (gw * xhat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if extra is not None:
        dx = dx + extra.to(dtype)
    rows = tuple(range(g.dim() - 1))
    dweight = (g * xhat).sum(rows) if rows else g * xhat
    dbias = g.sum(rows) if rows else g.clone()
    return dx.to(saved.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


# ---- operators -------------------------------------------------------------------------------------------------------


def _check_forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise TensorError(f"layer norm: got shape {tuple(x.shape)}, expected a last dimension of at least one element")
    check(x, "layer norm's input", dtypes=WITH_FLOAT64)
    check(weight, "layer norm's weight", dtypes=vector_dtypes(x), shape=x.shape[-1:], like=x)
    check(bias, "layer norm's bias", dtypes=(weight.dtype,), shape=x.shape[-1:], like=x)
    if residual is not None:
        check(residual, "layer norm's residual", dtypes=(x.dtype,), shape=x.shape, like=x)


def _stats(x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(x.shape[:-1], dtype=arithmetic_of(x)) for _ in range(2))  # type: ignore[return-value]


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_forward(x, weight, bias, residual)
    module = native.fp32_module_for(x, "layer norm")
    if module is None:
        total = x if residual is None else x + residual
        y, mean, rstd = reference_layer_norm(total, weight, bias, eps)
        return y, total, mean, rstd
    y, (mean, rstd) = torch.empty_like(x), _stats(x)
    total = x if residual is None else torch.empty_like(x)
    w, b = weight.float(), bias.float()
    given = (x, residual, total, w, b, y, mean, rstd)
    module.layer_norm(addresses(*given), DTYPE_CODES[x.dtype], mean.numel(), x.shape[-1], eps, native.threads())
    return y, total, mean, rstd


def _run_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, from_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = _forward(x, None, weight, bias, eps)
    return y, mean, rstd


def _run_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, bias, eps)


def _run_backward(
    grad: Tensor,
    saved: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    extra: Tensor | None,
    from_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, saved, mean, rstd, weight, bias, extra)
    module = native.fp32_module_for(grad, "layer norm")
    if module is None:
        return reference_layer_norm_backward(grad, saved, mean, rstd, weight, bias, extra, from_output)
    dx, w, b = torch.empty_like(saved), weight.float(), bias.float()
    inverse = torch.where(w == 0, 0.0, 1.0 / w) if from_output else None
    sums = torch.empty(2, w.numel(), dtype=torch.float32)
    given = (grad, saved, mean, rstd, w, b, inverse, extra, dx, sums[0], sums[1])
    module.layer_norm_backward(
        addresses(*given), DTYPE_CODES[saved.dtype], mean.numel(), saved.shape[-1], native.threads()
    )
    return dx, sums[0].to(weight.dtype, copy=True), sums[1].to(bias.dtype, copy=True)


def _check_backward(
    grad: Tensor, saved: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, extra: Tensor | None
) -> None:
    _check_forward(saved, weight, bias, extra)
    check(grad, "layer norm's gradient", dtypes=(saved.dtype,), shape=saved.shape, like=saved)
    for stat in (mean, rstd):
        check(stat, "layer norm's statistics", dtypes=(arithmetic_of(saved),), shape=saved.shape[:-1], like=saved)


def _fake_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, from_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_forward(x, weight, bias)
    return (torch.empty_like(x), *_stats(x))


def _fake_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_forward(x, weight, bias, residual)
    return (torch.empty_like(x), torch.empty_like(x), *_stats(x))


def _fake_backward(
    grad: Tensor,
    saved: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    extra: Tensor | None,
    from_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, saved, mean, rstd, weight, bias, extra)
    return torch.empty_like(saved), torch.empty_like(weight), torch.empty_like(bias)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _setup_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.from_output = inputs
    y, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y if ctx.from_output else x, mean, rstd, weight, bias)


def _backward_layer_norm(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    saved, mean, rstd, weight, bias = ctx.saved_tensors
    found = torch.ops.dsx_ops.layer_norm_backward(
        grad.contiguous(), saved, mean, rstd, weight, bias, None, ctx.from_output
    )
    return (*found, None, None)


def _setup_add_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, mean, rstd, weight, bias)


def _backward_add_layer_norm(ctx: Any, grad: Tensor | None, extra: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return extra, extra, None, None, None
    total, mean, rstd, weight, bias = ctx.saved_tensors
    extra = None if extra is None else extra.contiguous()
    dx, dweight, dbias = torch.ops.dsx_ops.layer_norm_backward(
        grad.contiguous(), total, mean, rstd, weight, bias, extra, False
    )
    return dx, dx, dweight, dbias, None


library.operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps, bool from_output) -> (Tensor, Tensor, Tensor)",
    _run_layer_norm,
    _fake_layer_norm,
    setup=_setup_layer_norm,
    backward=_backward_layer_norm,
)
library.operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor,"
    " Tensor)",
    _run_add_layer_norm,
    _fake_add_layer_norm,
    setup=_setup_add_layer_norm,
    backward=_backward_add_layer_norm,
)
library.operator(
    "layer_norm_backward(Tensor grad, Tensor saved, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, "
    "Tensor? extra, bool from_output) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    gradient=True,
)
