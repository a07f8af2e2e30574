"""Dropout whose seed is a tensor.

The functions of `dsx_ops.functional.dropout` take their seed as a number. A compiled graph would freeze such a number;
a key is an int64 tensor on the host, drawn inside the graph (`new_key`), and read when the operator runs. Reading it
waits for no device. `site` (with everything else that must tell masks apart mixed into it) makes several masks from one
key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..functional import dropout as drop

_MASK64 = 0xFFFFFFFFFFFFFFFF


def new_key() -> Tensor:
    """A fresh key from torch's default generator: int64 [1], on the host."""
    return torch.randint(0, 2**31 - 1, (1,), dtype=torch.int64, device="cpu")


def mixed(a: int, b: int) -> int:
    """A well-mixed number of 62 bits (splitmix64's finaliser)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (x ^ (x >> 31)) >> 2


def seed_of(key: Tensor, site: int) -> int:
    """The 32-bit seed that a key means at a site."""
    return mixed(int(key), site) & 0xFFFFFFFF


def dropout(x: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    """`dsx_ops.dropout` with seed `seed_of(key, site)`."""
    return torch.ops.dsx_ops.keyed_dropout(x, p, key, site)


def bias_dropout_residual(x: Tensor, bias: Tensor, residual: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    """`dsx_ops.bias_dropout_residual` with seed `seed_of(key, site)`."""
    return torch.ops.dsx_ops.keyed_residual(x, bias, residual, p, key, site)


# ---- operators -------------------------------------------------------------------------------------------------------


def _run_dropout(x: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    return torch.ops.dsx_ops.dropout(x, p, seed_of(key, site), 0)


def _run_residual(x: Tensor, bias: Tensor, residual: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    return torch.ops.dsx_ops.bias_dropout_residual(x, bias, residual, p, seed_of(key, site), 0)


def _run_bias_grad(grad: Tensor, dtype: torch.dtype, p: float, key: Tensor, site: int) -> tuple[Tensor, Tensor]:
    return torch.ops.dsx_ops.bias_grad(grad, dtype, p, seed_of(key, site), 0)


def _fake_dropout(x: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    return drop._fake_dropout(x, p, 0, 0)


def _fake_residual(x: Tensor, bias: Tensor, residual: Tensor, p: float, key: Tensor, site: int) -> Tensor:
    return drop._fake_residual(x, bias, residual, p, 0, 0)


def _fake_bias_grad(grad: Tensor, dtype: torch.dtype, p: float, key: Tensor, site: int) -> tuple[Tensor, Tensor]:
    return drop._fake_bias_grad(grad, dtype, p, 0, 0)


def _setup_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, key, ctx.site = inputs
    ctx.save_for_backward(key)


def _backward_dropout(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (key,) = ctx.saved_tensors
    return torch.ops.dsx_ops.keyed_dropout(grad.contiguous(), ctx.p, key, ctx.site), None, None, None


def _setup_residual(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, key, ctx.site = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(key)


def _backward_residual(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (key,) = ctx.saved_tensors
    dx, dbias = torch.ops.dsx_ops.keyed_bias_grad(grad.contiguous(), ctx.bias_dtype, ctx.p, key, ctx.site)
    return dx, dbias, grad, None, None, None


library.operator(
    "keyed_dropout(Tensor x, float p, Tensor key, int site) -> Tensor",
    _run_dropout,
    _fake_dropout,
    setup=_setup_dropout,
    backward=_backward_dropout,
)
library.operator(
    "keyed_residual(Tensor x, Tensor bias, Tensor residual, float p, Tensor key, int site) -> Tensor",
    _run_residual,
    _fake_residual,
    setup=_setup_residual,
    backward=_backward_residual,
)
library.operator(
    "keyed_bias_grad(Tensor grad, ScalarType dtype, float p, Tensor key, int site) -> (Tensor, Tensor)",
    _run_bias_grad,
    _fake_bias_grad,
    gradient=True,
)
