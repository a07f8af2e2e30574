"""GELU of x + bias, in the tanh form and in the exact one, forward and backward.

    tanh form:  y = u/2 (1 + tanh(a (u + b u^3))),  a = sqrt(2/pi), b = 0.044715  (Hendrycks & Gimpel 2016, section 2)
    exact form: y = u/2 (1 + erf(u / sqrt 2))

with u = x + bias, `bias` along the last dimension. Backward keeps x and bias only and computes u again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import library, native
from ..checks import WITH_FLOAT64, arithmetic_of, check, rows_of, vector_dtypes
from ..errors import TensorError
from ..tables import DTYPE_CODES, addresses

_A = math.sqrt(2.0 / math.pi)
_B = 0.044715
_FORMS = {"tanh": True, "none": False}


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """GELU(x + bias) of x's shape and dtype. `bias`: [x.shape[-1]]; `approximate`: "tanh" or "none", as torch's. Raises
    `TensorError`.
    """
    if approximate not in _FORMS:
        raise TensorError(f"approximate: got {approximate!r}, expected 'tanh' or 'none' (the exact form)")
    return torch.ops.dsx_ops.bias_gelu(x, bias, _FORMS[approximate])


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_bias_gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """The forward in plain PyTorch."""
    wide = arithmetic_of(x)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    inner = torch.tanh(_A * (u + _B * u * u * u)) if tanh else torch.erf(u * math.sqrt(0.5))
    return (0.5 * u * (1.0 + inner)).to(x.dtype)


def reference_bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """(dx, dbias); dbias is empty without a bias, and sums the unrounded dx."""
    wide = arithmetic_of(x)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if tanh:
        t = torch.tanh(_A * (u + _B * u * u * u))
        slope = 0.5 * (1.0 + t) + 0.5 * u * (1.0 - t * t) * _A * (1.0 + 3.0 * _B * u * u)
    else:
        density = torch.exp(-0.5 * u * u) * (1.0 / math.sqrt(2.0 * math.pi))
        slope = 0.5 * (1.0 + torch.erf(u * math.sqrt(0.5))) + u * density
    dx = grad.to(wide) * slope
    return dx.to(x.dtype), _sum_rows(dx, bias)


def _sum_rows(dx: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return dx.new_empty(0)
    rows = tuple(range(dx.dim() - 1))
    return (dx.sum(rows) if rows else dx.clone()).to(bias.dtype)


# ---- operators -------------------------------------------------------------------------------------------------------


def _check(x: Tensor, bias: Tensor | None, grad: Tensor | None = None) -> None:
    check(x, "GELU's input", dtypes=WITH_FLOAT64)
    if bias is not None:
        if x.dim() == 0:
            raise TensorError("GELU's input: got no dimension, expected at least one for the bias to lie along")
        check(bias, "GELU's bias", dtypes=vector_dtypes(x), shape=x.shape[-1:], like=x)
    if grad is not None:
        check(grad, "GELU's gradient", dtypes=(x.dtype,), shape=x.shape, like=x)


def _run(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    _check(x, bias)
    module = native.fp32_module_for(x, "GELU")
    if module is None:
        return reference_bias_gelu(x, bias, tanh)
    out, wide = torch.empty_like(x), None if bias is None else bias.float()
    _native(module, 0 if tanh else 1, x, None, wide, out, None)
    return out


def _run_backward(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    _check(x, bias, grad)
    module = native.fp32_module_for(x, "GELU")
    if module is None:
        return reference_bias_gelu_backward(grad, x, bias, tanh)
    dx, wide = torch.empty_like(x), None if bias is None else bias.float()
    sums = x.new_empty(0 if wide is None else wide.numel(), dtype=torch.float32)
    _native(module, 2 if tanh else 3, x, grad, wide, dx, None if wide is None else sums)
    return dx, sums if bias is None else sums.to(bias.dtype)


def _native(
    module: Any, form: int, x: Tensor, grad: Tensor | None, bias: Tensor | None, out: Tensor, sums: Tensor | None
) -> None:
    """`form` as BiasForm in native/include/dsx_ops/kernels.h."""
    rows, cols = rows_of(x)
    module.bias_function(
        form, addresses(x, grad, bias, out, sums), DTYPE_CODES[x.dtype], rows, cols, 1.0, [0, 0, 0], native.threads()
    )


def _fake(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    _check(x, bias)
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    _check(x, bias, grad)
    return torch.empty_like(x), x.new_empty(0, dtype=torch.float32) if bias is None else torch.empty_like(bias)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = torch.ops.dsx_ops.bias_gelu_backward(grad.contiguous(), x, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


library.operator(
    "bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor", _run, _fake, setup=_setup, backward=_backward
)
library.operator(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    gradient=True,
)
