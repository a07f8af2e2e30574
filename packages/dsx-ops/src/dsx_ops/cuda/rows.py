"""Kernels of the row functions (layer norm, GELU, dropout, softmax) for CUDA tensors.

Each allocates what the operator's fake describes (which also checks the arguments), and starts the launch. None: the
kernel does not take these arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import MASK32
from ..functional import dropout as drop
from ..functional import gelu, layer_norm, softmax
from ..tables import DTYPE_CODES, addresses
from . import launch

Rows = tuple[int, int, int]


def _rows(x: Tensor) -> Rows:
    """(dtype, rows, columns)."""
    cols = x.shape[-1] if x.dim() else 1
    return (DTYPE_CODES[x.dtype], x.numel() // cols if cols else 0, cols)


def _partials(slabs: int, x: Tensor, vectors: int = 1) -> Tensor:
    """Room for the column sums of so many groups of rows."""
    cols = x.shape[-1] if x.dim() else 1
    return torch.empty(vectors * slabs * cols, dtype=torch.float32, device=x.device)


# ---- layer norm ------------------------------------------------------------------------------------------------------


def run_layer_norm(
    module: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, from_output: bool
) -> tuple[Tensor, ...]:
    """`layer_norm`."""
    y, mean, rstd = layer_norm._fake_layer_norm(x, weight, bias, eps, from_output)
    given = addresses(x, None, None, y, mean, rstd)
    module.layer_norm(launch.place(x), _rows(x), given, launch.vector(weight), launch.vector(bias), eps)
    return y, mean, rstd


def run_add_layer_norm(
    module: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """`add_layer_norm`."""
    y, total, mean, rstd = layer_norm._fake_add_layer_norm(x, residual, weight, bias, eps)
    given = addresses(x, residual, total, y, mean, rstd)
    module.layer_norm(launch.place(x), _rows(x), given, launch.vector(weight), launch.vector(bias), eps)
    return y, total, mean, rstd


def run_layer_norm_backward(
    module: Any,
    grad: Tensor,
    saved: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    extra: Tensor | None,
    from_output: bool,
) -> tuple[Tensor, ...]:
    """`layer_norm_backward`."""
    dx, dweight, dbias = layer_norm._fake_backward(grad, saved, mean, rstd, weight, bias, extra, from_output)
    partials = _partials(module.norm_slabs(_rows(saved)), saved, 2)
    given = addresses(grad, saved, mean, rstd, extra, dx, dweight, dbias, partials)
    vectors = launch.vector(weight), launch.vector(bias)
    module.layer_norm_backward(launch.place(saved), _rows(saved), given, *vectors, from_output)
    return dx, dweight, dbias


# ---- GELU ------------------------------------------------------------------------------------------------------------


def run_bias_gelu(module: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """`bias_gelu`."""
    y = gelu._fake(x, bias, tanh)
    module.bias_gelu(launch.place(x), _rows(x), addresses(x, y), launch.vector(bias), tanh)
    return y


def run_bias_gelu_backward(
    module: Any, grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool
) -> tuple[Tensor, Tensor]:
    """`bias_gelu_backward`."""
    dx, dbias = gelu._fake_backward(grad, x, bias, tanh)
    sums, partials = (None, None) if bias is None else (dbias, _partials(module.column_slabs(_rows(x)), x))
    module.bias_gelu_backward(
        launch.place(x), _rows(x), addresses(grad, x, dx, sums, partials), launch.vector(bias), tanh
    )
    return dx, dbias


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _mask_numbers(p: float, seed: int, offset: int) -> tuple[bool, int, float, int, int]:
    return (p != 0.0, drop.threshold(p), drop.keep_scale(p), seed & MASK32, offset)


def run_dropout(module: Any, x: Tensor, p: float, seed: int, offset: int) -> Tensor:
    """`dropout`."""
    y = drop._fake_dropout(x, p, seed, offset)
    numbers = _mask_numbers(p, seed, offset)
    module.dropout(launch.place(x), _rows(x), addresses(x, None, y), launch.vector(None), numbers)
    return y


def run_bias_dropout_residual(
    module: Any, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, offset: int
) -> Tensor:
    """`bias_dropout_residual`."""
    y = drop._fake_residual(x, bias, residual, p, seed, offset)
    numbers = _mask_numbers(p, seed, offset)
    module.dropout(launch.place(x), _rows(x), addresses(x, residual, y), launch.vector(bias), numbers)
    return y


def run_bias_grad(
    module: Any, grad: Tensor, dtype: torch.dtype, p: float, seed: int, offset: int
) -> tuple[Tensor, Tensor]:
    """`bias_grad`."""
    drop._check(grad, None, None, p, seed, offset)
    dx, dbias = drop._fake_bias_grad(grad, dtype, p, seed, offset)
    partials, numbers = _partials(module.column_slabs(_rows(grad)), grad), _mask_numbers(p, seed, offset)
    module.bias_grad(launch.place(grad), _rows(grad), addresses(grad, dx, partials), launch.vector(dbias), numbers)
    return dx, dbias


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _mask_view(module: Any, x: Tensor, mask: Tensor | None) -> tuple | None:
    """The mask as strides over the rows of x; None when x has more dimensions than the kernel counts."""
    dims = module.MASK_DIMS
    if mask is None:
        return (0, 0, 0, [1] * dims, [0] * dims, 0)
    ahead = list(x.shape[:-1])
    if len(ahead) > dims:
        return None
    wide = mask.expand(x.shape)
    strides = [s if n > 1 else 0 for n, s in zip(ahead, wide.stride())]
    padding = dims - len(ahead)
    kind, dtype = (2, 0) if mask.dtype is torch.bool else (1, DTYPE_CODES[mask.dtype])
    return (kind, dtype, mask.data_ptr(), [1] * padding + ahead, [0] * padding + strides, wide.stride(-1))


def run_masked_softmax(module: Any, x: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """`masked_softmax`; not for inputs of more than seven dimensions."""
    y = softmax._fake(x, mask, scale)
    view = _mask_view(module, x, mask)
    if view is None:
        return None
    module.masked_softmax(launch.place(x), _rows(x), addresses(x, y), view, scale)
    return y


def run_softmax_backward(module: Any, grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """`softmax_backward`."""
    dx = softmax._fake_backward(grad, y, scale)
    module.softmax_backward(launch.place(y), _rows(y), addresses(grad, y, dx), scale)
    return dx
