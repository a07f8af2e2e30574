"""softmax(scale Q K^T + mask) V for a layer that trains: with dropout on the probabilities, or by torch's fused
attention.

    P = softmax(scale Q K^T + mask);  D = dropout(P);  O = D V
    dV = D^T dO;  dP = dropout(dO V^T) with the same mask;  dS = scale P (dP - rowsum(P dP));  dQ = dS K;  dK = dS^T Q

Torch's fused attention (`scaled_dot_product_attention`) does it all without ever writing P. It serves wherever it can:
always where nothing is dropped on the CPU or without gradients; on CUDA also for training, with and without dropout,
when one of its fused kernels takes the tensors. Under `torch.use_deterministic_algorithms(True)` only the flash kernel
does, whose backward then adds in a fixed order. Otherwise the explicit way runs. In it the mask of the dropout is a
function of its key and is never kept; D is kept or, on demand, computed again from P. In the fused kernels the mask
comes from torch's CUDA generator, and the key does not count.
"""

from __future__ import annotations

import enum
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import keyed


class _Explicit(torch.autograd.Function):
    """Attention with its probabilities in memory; every sum in a fixed order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        p: float,
        drop_key: Tensor,
        site: int,
        keep_dropped: bool,
    ) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2))
        probabilities = torch.ops.dsx_ops.masked_softmax(scores, mask, scale)
        dropped = probabilities if p == 0.0 else torch.ops.dsx_ops.keyed_dropout(probabilities, p, drop_key, site)
        ctx.scale, ctx.p, ctx.site = scale, p, site
        kept = dropped if keep_dropped and p != 0.0 else None
        ctx.save_for_backward(query, key, value, probabilities, kept, drop_key)
        return torch.matmul(dropped, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, probabilities, dropped, drop_key = ctx.saved_tensors
        if dropped is None:
            dropped = _replayed(ctx, probabilities, drop_key)
        dvalue = torch.matmul(dropped.transpose(-1, -2), grad)
        dprobabilities = _replayed(ctx, torch.matmul(grad, value.transpose(-1, -2)), drop_key)
        dscores = torch.ops.dsx_ops.softmax_backward(dprobabilities, probabilities, ctx.scale)
        dquery, dkey = torch.matmul(dscores, key), torch.matmul(dscores.transpose(-1, -2), query)
        return dquery, dkey, dvalue, None, None, None, None, None, None


def _replayed(ctx: Any, x: Tensor, drop_key: Tensor) -> Tensor:
    return x if ctx.p == 0.0 else torch.ops.dsx_ops.keyed_dropout(x, ctx.p, drop_key, ctx.site)


class Way(enum.Enum):
    """The implementation of attention."""

    EXPLICIT = enum.auto()
    FUSED = enum.auto()
    FLASH = enum.auto()  # the one fused kernel whose backward has a fixed order on demand


def choose_way(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, any_order: bool) -> Way:
    """The implementation for these tensors; `mask` as torch's fused attention takes it."""
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.device.type != "cuda" or (p == 0.0 and not trains):
        return Way.FUSED if p == 0.0 else Way.EXPLICIT
    params = cuda.SDPAParams(query, key, value, mask, p, False, False)
    flash = cuda.can_use_flash_attention(params)
    if torch.are_deterministic_algorithms_enabled() and not any_order:
        return Way.FLASH if flash else Way.EXPLICIT
    fused = flash or cuda.can_use_efficient_attention(params) or cuda.can_use_cudnn_attention(params)
    return Way.FUSED if fused else Way.EXPLICIT


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    p: float = 0.0,
    drop_key: Tensor | None = None,
    site: int = 0,
    keep_dropped: bool = True,
    any_order: bool = False,
) -> Tensor:
    """[batch, heads, sequence, size per head] from three such.

    Args:
        mask: broadcastable to [batch, heads, sequence, sequence], bool (True takes part) or added.
        p: dropout of the probabilities; where attention is explicit, with `drop_key` and `site`.
        keep_dropped: False computes the dropped probabilities again in backward (explicit attention).
        any_order: take any fused kernel on CUDA, even where torch.use_deterministic_algorithms asks for a fixed order.
    """
    scale = query.shape[-1] ** -0.5
    fused_mask = mask if mask is None or mask.dtype is torch.bool else mask.to(query.dtype)
    way = choose_way(query, key, value, fused_mask, p, any_order)
    if way is Way.EXPLICIT:
        random = keyed.new_key() if drop_key is None else drop_key
        made: Any = _Explicit.apply(query, key, value, mask, scale, p, random, site, keep_dropped)
        return made
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if way is Way.FLASH else nullcontext():
        return scaled_dot_product_attention(query, key, value, attn_mask=fused_mask, dropout_p=p, scale=scale)
