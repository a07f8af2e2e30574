"""y = GELU(x + bias) W^T without keeping the GELU's result: backward computes it again from x, which it needs anyway.

h = GELU(x + b);  y = h W^T;      dW = dy^T h;  dh = dy W;  dx, db = backward of the GELU
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor, tanh: bool) -> Tensor:  # type: ignore[override]
        ctx.tanh = tanh
        ctx.save_for_backward(x, bias, weight)
        return linear(torch.ops.dsx_ops.bias_gelu(x, bias, tanh), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, bias, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        again = torch.ops.dsx_ops.bias_gelu(x, bias, ctx.tanh).view(-1, x.shape[-1])
        dweight = torch.matmul(rows.t(), again)
        dresult = torch.matmul(rows, weight).view(x.shape)
        dx, dbias = torch.ops.dsx_ops.bias_gelu_backward(dresult, x, bias, ctx.tanh)
        return dx, dbias, dweight, None


def gelu_linear(x: Tensor, bias: Tensor, weight: Tensor, *, tanh: bool, again: bool) -> Tensor:
    """GELU(x + bias) W^T: x [..., n], bias [n], weight [m, n] of x's dtype. `again`: the GELU's result is not kept for
    backward.
    """
    if again:
        return _GeluLinear.apply(x, bias, weight, tanh)  # type: ignore[return-value]
    return linear(torch.ops.dsx_ops.bias_gelu(x, bias, tanh), weight)
