"""CPU tensors, given to the compiled kernels as addresses and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import native
from ..call import AttentionCall, Gradients
from ..layout import BLOCKS

__all__ = ["backward", "forward", "refusals", "unavailable"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_TENSOR = [0, 0, 0, 0]
_PAD = 16
MAX_DIM = 256


def unavailable() -> str:
    """The reason that the kernels cannot run on this machine; empty if they can."""
    return native.missing()


def refusals(call: AttentionCall) -> list[str]:
    """The reasons why the kernels cannot do this call; empty if they can."""
    why = []
    if call.q.device.type != "cpu":
        why.append(f"tensors are on {call.q.device.type}, it works on cpu")
    if call.q.dtype not in _DTYPES:
        why.append(f"got {call.q.dtype}, it knows float32, bfloat16 and float16".replace("torch.", ""))
    if call.block not in BLOCKS:
        why.append(f"got block {call.block}, it knows {', '.join(map(str, BLOCKS))}")
    if call.q.shape[-1] > MAX_DIM:
        why.append(f"got head dimension {call.q.shape[-1]}, it goes to {MAX_DIM}")
    return why + [reason for reason in (unavailable(),) if reason]


def _last_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _tensor(t: Tensor) -> list[int]:
    batch, head, row, _ = t.stride()
    return [t.data_ptr(), batch, head, row]


def _bias_numbers(bias: Tensor | None) -> list[int]:
    if bias is None:
        return _NO_TENSOR
    return [bias.data_ptr(), *(0 if n == 1 else s for n, s in zip(bias.shape[:3], bias.stride()[:3]))]


class _Prepared:
    """The tensors of a call in the form that the kernels read. It keeps them alive while a kernel runs."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.q, self.k, self.v = map(_last_contiguous, (call.q, call.k, call.v))
        layout = call.layout.contiguous()
        self.layout = layout if layout.element_size() in (1, 8) and not layout.is_floating_point() else layout != 0
        self.bias = None if call.bias is None else call.bias.to(torch.float32).contiguous()
        self.key_bias = None if call.key_bias is None else call.key_bias.to(torch.float32).contiguous()
        self.threads = native.threads()

    def kernel_args(
        self, out: Tensor, lse: Tensor, grads: list[int], delta: int, dq: list[int], dbias: int
    ) -> list[int]:
        """All integers of a call, in the order of `Call` in native/bind/module.cpp."""
        call, (batch, heads, seq, dim) = self.call, self.q.shape
        seed = 0 if call.seed is None else int(call.seed.item()) & 0xFFFFFFFF
        return [
            _DTYPES[self.q.dtype], batch, heads, self.k.shape[1], seq, dim, call.block, call.blocks,
            self.layout.data_ptr(), self.layout.element_size(), self.layout.shape[0],
            call.causal, call.seed is not None, seed, call.drop_below, self.threads,
            *_tensor(self.q), *_tensor(self.k), *_tensor(self.v), *_tensor(out), *grads,
            lse.data_ptr(), delta, *_bias_numbers(self.bias),
            0 if self.key_bias is None else self.key_bias.data_ptr(), *dq, dbias,
        ]  # fmt: skip


def _loaded() -> Any:
    found = native.module()
    if found is None:
        raise RuntimeError(f"the native kernels went away between choosing and calling them: {native.missing()}")
    return found


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output, like q, and the log-sum-exp, float32 [batch, heads, seq]."""
    prepared = _Prepared(call)
    out = torch.empty_like(prepared.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32)
    if out.numel():
        numbers = prepared.kernel_args(out, lse, _NO_TENSOR * 3, 0, [0, 0], 0)
        _loaded().forward(numbers, call.scale, call.keep_scale)
    return out, lse


def backward(call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool) -> Gradients:
    """Gradients of q, k, v (and of the bias)."""
    prepared = _Prepared(call)
    module, (batch, heads, seq, dim) = _loaded(), call.q.shape
    dout, out = _last_contiguous(dout), _last_contiguous(out)
    dk, dv = torch.empty_like(prepared.k), torch.empty_like(prepared.v)
    dbias = torch.zeros_like(prepared.bias) if want_bias and prepared.bias is not None else None
    parts = module.parts_for(batch * prepared.k.shape[1], prepared.threads)
    width = -(-dim // _PAD) * _PAD
    # Sums in fp32, padded to full blocks. If q is fp32 and needs no padding, this is the gradient itself.
    dq = torch.zeros(parts, batch, heads, call.blocks * call.block, width)
    delta = torch.empty(batch, heads, seq)
    if dq.numel():
        grads = [*_tensor(dout), *_tensor(dk), *_tensor(dv)]
        address = 0 if dbias is None else dbias.data_ptr()
        numbers = prepared.kernel_args(out, lse, grads, delta.data_ptr(), [dq.data_ptr(), dq.stride(0)], address)
        module.backward(numbers, call.scale, call.keep_scale, parts)
    total = dq[0] if parts == 1 else dq.sum(0)
    return Gradients(total[:, :, :seq, :dim].to(call.q.dtype).contiguous(), dk, dv, dbias)
