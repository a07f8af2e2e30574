"""Dropout whose mask is a function of (seed, element index), so that backward computes it again instead of keeping it.

Element i is dropped when the upper 24 bits of `noise(seed, offset + i)` lie below p 2^24, else multiplied by 1 / (1 -
p). The same mask comes out on every device, thread count and split (`offset`: index of the first element in the whole
tensor). A seed gives one mask: take a new one per layer and step.

    dropout(x):                y = m(x)                          dx = m(dy)
    bias_dropout_residual:     y = residual + m(x + bias)        dx = m(dy);  dbias = sum_rows m(dy);  dresidual = dy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import library, native, reference
from ..checks import MASK32, WITH_FLOAT64, arithmetic_of, check, check_seed, rows_of, vector_dtypes
from ..errors import TensorError
from ..tables import DTYPE_CODES, addresses

_BITS = 24


def dropout(x: Tensor, p: float, seed: int, offset: int = 0) -> Tensor:
    """x with elements dropped with probability p, the others scaled by 1/(1-p); x's shape and dtype. Raises
    `TensorError`.
    """
    return torch.ops.dsx_ops.dropout(x, p, seed, offset)


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, offset: int = 0
) -> Tensor:
    """residual + dropout(x + bias) in one pass. `bias`: [x.shape[-1]] or None; `residual`: as x. Raises
    `TensorError`.
    """
    return torch.ops.dsx_ops.bias_dropout_residual(x, bias, residual, p, seed, offset)


def dropout_mask(
    shape: Sequence[int], p: float, seed: int, offset: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The mask (bool, True = kept) that `dropout` uses for a tensor of this shape with the probability `p`, `seed` and
    `offset`, made on `device`: the same bits everywhere. Raises what `dropout` raises for these numbers.
    """
    _check_numbers(p, offset, seed)
    count = torch.Size(shape).numel()
    first, _ = reference.noise(seed & MASK32, offset, count, torch.device(device))
    return ((first >> (32 - _BITS)) >= threshold(p)).view(torch.Size(shape))


def threshold(p: float) -> int:
    """Dropped are the elements whose 24 random bits lie below this."""
    return round(p * (1 << _BITS))


def keep_scale(p: float) -> float:
    """The factor of kept elements (as fp32); 0 when all are dropped."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_dropout(x: Tensor, p: float, seed: int, offset: int) -> Tensor:
    """`dropout` in plain PyTorch."""
    return _dropped(x.to(arithmetic_of(x)), p, seed, offset).to(x.dtype)


def reference_bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, offset: int
) -> Tensor:
    """`bias_dropout_residual` in plain PyTorch."""
    wide = arithmetic_of(x)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    return (residual.to(wide) + _dropped(u, p, seed, offset)).to(x.dtype)


def reference_bias_grad(grad: Tensor, dtype: torch.dtype, p: float, seed: int, offset: int) -> tuple[Tensor, Tensor]:
    """(m(grad), its sum over all dimensions but the last, in `dtype`)."""
    dx = _dropped(grad.to(arithmetic_of(grad)), p, seed, offset)
    rows = tuple(range(grad.dim() - 1))
    return dx.to(grad.dtype), (dx.sum(rows) if rows else dx.clone()).to(dtype)


def _dropped(u: Tensor, p: float, seed: int, offset: int) -> Tensor:
    if p == 0.0:
        return u.clone()
    kept = dropout_mask(u.shape, p, seed, offset, u.device)
    return torch.where(kept, u * torch.tensor(keep_scale(p), dtype=u.dtype), torch.zeros_like(u))


# ---- operators -------------------------------------------------------------------------------------------------------


def _check_numbers(p: float, offset: int, seed: int) -> None:
    if not 0.0 <= p <= 1.0:
        raise TensorError(f"p: got {p}, expected a probability between 0 and 1")
    check_seed(seed, offset)


def _check(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int, offset: int) -> None:
    _check_numbers(p, offset, seed)
    check(x, "dropout's input", dtypes=WITH_FLOAT64)
    if bias is not None:
        if x.dim() == 0:
            raise TensorError("dropout's input: got no dimension, expected at least one for the bias to lie along")
        check(bias, "dropout's bias", dtypes=vector_dtypes(x), shape=x.shape[-1:], like=x)
    if residual is not None:
        check(residual, "dropout's residual", dtypes=(x.dtype,), shape=x.shape, like=x)


def _run_dropout(x: Tensor, p: float, seed: int, offset: int) -> Tensor:
    _check(x, None, None, p, seed, offset)
    module = native.fp32_module_for(x, "dropout")
    if module is None:
        return reference_dropout(x, p, seed, offset)
    out = torch.empty_like(x)
    _native(module, _PLAIN, (x, None, None, out, None), p, seed, offset)
    return out


def _run_residual(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, offset: int) -> Tensor:
    _check(x, bias, residual, p, seed, offset)
    module = native.fp32_module_for(x, "dropout")
    if module is None:
        return reference_bias_dropout_residual(x, bias, residual, p, seed, offset)
    out, wide = torch.empty_like(x), None if bias is None else bias.float()
    _native(module, _RESIDUAL, (x, residual, wide, out, None), p, seed, offset)
    return out


def _run_bias_grad(grad: Tensor, dtype: torch.dtype, p: float, seed: int, offset: int) -> tuple[Tensor, Tensor]:
    _check(grad, None, None, p, seed, offset)
    module = native.fp32_module_for(grad, "dropout")
    if module is None:
        return reference_bias_grad(grad, dtype, p, seed, offset)
    dx, sums = torch.empty_like(grad), grad.new_empty(grad.shape[-1:], dtype=torch.float32)
    _native(module, _PLAIN, (grad, None, None, dx, sums), p, seed, offset)
    return dx, sums.to(dtype)


_PLAIN, _RESIDUAL = 4, 5  # BiasForm in native/include/dsx_ops/kernels.h


def _native(module: Any, form: int, tensors: tuple[Tensor | None, ...], p: float, seed: int, offset: int) -> None:
    """`tensors`: x, residual, bias (fp32), out, sums of the columns (fp32)."""
    x = cast(Tensor, tensors[0])
    module.bias_function(
        form,
        addresses(*tensors),
        DTYPE_CODES[x.dtype],
        *rows_of(x),
        keep_scale(p),
        [threshold(p), seed & MASK32, offset],
        native.threads(),
    )


def _fake_dropout(x: Tensor, p: float, seed: int, offset: int) -> Tensor:
    _check(x, None, None, p, seed, offset)
    return torch.empty_like(x)


def _fake_residual(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, offset: int) -> Tensor:
    _check(x, bias, residual, p, seed, offset)
    return torch.empty_like(x)


def _fake_bias_grad(grad: Tensor, dtype: torch.dtype, p: float, seed: int, offset: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), grad.new_empty(grad.shape[-1:], dtype=dtype)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _setup_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, ctx.seed, ctx.offset = inputs


def _backward_dropout(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsx_ops.dropout(grad.contiguous(), ctx.p, ctx.seed, ctx.offset), None, None, None


def _setup_residual(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, ctx.seed, ctx.offset = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_residual(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    whole = grad.contiguous()
    if ctx.bias_dtype is None:
        dx, dbias = torch.ops.dsx_ops.dropout(whole, ctx.p, ctx.seed, ctx.offset), None
    else:
        dx, dbias = torch.ops.dsx_ops.bias_grad(whole, ctx.bias_dtype, ctx.p, ctx.seed, ctx.offset)
    return dx, dbias, grad, None, None, None


library.operator(
    "dropout(Tensor x, float p, int seed, int offset) -> Tensor",
    _run_dropout,
    _fake_dropout,
    setup=_setup_dropout,
    backward=_backward_dropout,
)
library.operator(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor residual, float p, int seed, int offset) -> Tensor",
    _run_residual,
    _fake_residual,
    setup=_setup_residual,
    backward=_backward_residual,
)
library.operator(
    "bias_grad(Tensor grad, ScalarType dtype, float p, int seed, int offset) -> (Tensor, Tensor)",
    _run_bias_grad,
    _fake_bias_grad,
    gradient=True,
)
