"""Attention as operators of torch: `torch.ops.dsx_sparse_attn.attention` and its backward.

Registered with fakes and an autograd formula, they are one node for torch.compile, activation checkpointing and `torch.library.opcheck`. Which
backend runs is decided when real tensors arrive. Where nobody watches the dispatcher (ordinary eager training), `attention` goes to the
same functions directly: torch's generated autograd wrapper costs 0.3 ms a step, as much as the kernels at 512 positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    f"attention_backward(Tensor dout, Tensor out, Tensor lse, bool want_bias, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, backend = arguments
    call = AttentionCall(*inputs)
    return dispatch.chosen(call, backend).forward(call)


def _backward(dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, backend = arguments
    call = AttentionCall(*inputs)
    grads = dispatch.chosen(call, backend).backward(call, dout, out, lse, want_bias)
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    want_bias = tensors[4] is not None and ctx.needs_input_grad[4]
    dq, dk, dv, dbias = torch.ops.dsx_sparse_attn.attention_backward(dout, out, lse, want_bias, *tensors, *ctx.options)
    return dq, dk, dv, None, dbias if want_bias else None, *[None] * 7


def _no_second(ctx: Any, *grads: Tensor) -> None:
    raise SparseAttentionError(
        "second derivatives of block-sparse attention are not there; for gradient penalties use "
        "dsx_sparse_attn.MatMul and Softmax, which differentiate as often as you like"
    )


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::attention", _fake_forward, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::attention", _gradients, setup_context=_save, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::attention_backward", _no_second, lib=_library)


class _Attention(torch.autograd.Function):
    """What the registered operator does, without the dispatcher. Same saved tensors and formulas; what gets gradients stands in front."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> Tensor:
        out, lse = _forward(*arguments)
        ctx.save_for_backward(*arguments[:7], out, lse)
        ctx.options = arguments[7:]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        want_bias = ctx.needs_input_grad[3]
        # With create_graph the operator is called, which knows how to refuse a second derivative.
        run = torch.ops.dsx_sparse_attn.attention_backward if torch.is_grad_enabled() else _backward
        dq, dk, dv, dbias = run(grads[0], out, lse, want_bias, *tensors, *ctx.options)
        return dq, dk, dv, dbias if want_bias else None, None


_PLAIN = (Tensor, torch.nn.Parameter)


def _unwatched(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors and no compiler, tracer, counter or transform looks on."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(t is None or type(t) in _PLAIN for t in tensors)
    )


def attention(*arguments: Any) -> Tensor:
    """The output of the operator `dsx_sparse_attn::attention` for its arguments."""
    q, k, v, _, bias = arguments[:5]
    if _unwatched(*arguments[:7]):
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return _Attention.apply(q, k, v, bias, arguments)
        return _forward(*arguments)[0]
    if not torch.compiler.is_compiling():
        register_flop_formulas()  # what watches may count
    return torch.ops.dsx_sparse_attn.attention(*arguments)[0]
