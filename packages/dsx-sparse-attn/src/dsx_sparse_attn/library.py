"""Attention as operators of torch: `torch.ops.dsx_sparse_attn.attention` and its backward.

They are registered with fakes and an autograd formula, so they are one node for torch.compile, activation checkpointing
and `torch.library.opcheck`. The backend is chosen when real tensors arrive.

Every call goes through the dispatcher. A path around it, for calls that no mode of torch watches, saved 46 microseconds
of a training step (118 instead of 164, one thread, 2026-11-22). It was deleted, because the kernels take 3 ms at 512
positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import dispatch
from .call import AttentionCall, compute_dtype
from .errors import SparseAttentionError
from .flops import register_flop_formulas

__all__ = ["attention"]

NAMESPACE = "dsx_sparse_attn"
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor layout, Tensor? bias, Tensor? key_bias, Tensor? seed, "
    "float scale, int block, bool causal, float dropout_p, str backend"
)
_library = torch.library.Library(NAMESPACE, "DEF")  # the registrations live as long as this object
_library.define(f"attention({_INPUTS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor out, Tensor lse, bool want_bias, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, backend = arguments
    call = AttentionCall(*inputs)
    return dispatch.kernels_for(call, backend).forward(call)


def _backward(dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, backend = arguments
    call = AttentionCall(*inputs)
    grads = dispatch.kernels_for(call, backend).backward(call, dout, out, lse, want_bias)
    return grads.q, grads.k, grads.v, dout.new_empty(0) if grads.bias is None else grads.bias


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    q = arguments[0]
    last = q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous()
    return torch.empty_like(last), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _fake_backward(dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, _, bias = arguments[:5]
    dk, dv = (torch.empty_like(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()) for t in (k, v))
    dbias = dout.new_empty(0)
    if want_bias and bias is not None:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    return q.new_empty(q.shape), dk, dv, dbias


class _Attention(torch.autograd.Function):
    """The autograd formula; it calls the operators below autograd."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(torch.ops.dsx_sparse_attn.attention, *arguments)
        ctx.save_for_backward(*arguments[:7], out, lse)
        ctx.options = arguments[7:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        want_bias = tensors[4] is not None and ctx.needs_input_grad[4]
        operator = torch.ops.dsx_sparse_attn.attention_backward
        # With create_graph the operator's own autograd is needed, because it refuses second derivatives.
        run = operator if torch.is_grad_enabled() else functools.partial(_below_autograd, operator)
        dq, dk, dv, dbias = run(grads[0], out, lse, want_bias, *tensors, *ctx.options)
        return dq, dk, dv, None, dbias if want_bias else None, *[None] * 7


def _below_autograd(operator: Any, *arguments: Any) -> Any:
    # torch.library's own autograd wrappers use this guard to call the kernels below them.
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _with_autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, k, v, _, bias = arguments[:5]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias)):
        return _Attention.apply(*arguments)
    return _below_autograd(torch.ops.dsx_sparse_attn.attention, *arguments)


def _no_second(ctx: Any, *grads: Tensor) -> None:
    raise SparseAttentionError(
        "second derivatives of block-sparse attention are not there; for gradient penalties use "
        "dsx_sparse_attn.MatMul and Softmax, which differentiate as often as you like"
    )


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::attention", _fake_forward, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _fake_backward, lib=_library)
# Registered by hand: with the wrapper of `torch.library.register_autograd`, the overhead of a training step is 224
# microseconds instead of 164 (the measurement in the module's docstring).
_library.impl("attention", _with_autograd, "Autograd")
torch.library.register_autograd(f"{NAMESPACE}::attention_backward", _no_second, lib=_library)


def attention(*arguments: Any) -> Tensor:
    """The output of the operator `dsx_sparse_attn::attention` for its arguments."""
    if not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
        register_flop_formulas()  # the mode may count operations
    return torch.ops.dsx_sparse_attn.attention(*arguments)[0]
