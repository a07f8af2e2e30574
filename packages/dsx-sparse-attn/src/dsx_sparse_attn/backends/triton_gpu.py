"""CUDA tensors through the Triton kernels; CPU tensors too under Triton's interpreter (`TRITON_INTERPRET=1`, for tests)."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients
from ..layout import BLOCKS

__all__ = ["backward", "forward", "refusals", "unavailable"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256
_NOT_INSTALLED = "triton is not installed (pip install dsx-sparse-attn[triton])"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str:
    """Why the kernels run nothing on this machine; empty when they run. Asks for CUDA devices."""
    if importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    return "" if _interpreted() or torch.cuda.is_available() else "there is no CUDA device"


def refusals(call: AttentionCall) -> list[str]:
    """Why the kernels cannot do this call; empty when they can."""
    why = []
    if importlib.util.find_spec("triton") is None:
        why.append(_NOT_INSTALLED)
    if call.q.device.type != "cuda" and not (call.q.device.type == "cpu" and _interpreted()):
        why.append(f"tensors are on {call.q.device.type}, it works on cuda")
    if call.q.dtype not in _DTYPES:
        why.append(f"got {call.q.dtype}, it knows float32, bfloat16 and float16".replace("torch.", ""))
    if _interpreted() and call.q.dtype == torch.bfloat16:
        why.append("triton's interpreter reads bfloat16 as integers")
    if call.block not in BLOCKS:
        why.append(f"got block {call.block}, it knows {', '.join(map(str, BLOCKS))}")
    if call.q.shape[-1] > MAX_DIM:
        why.append(f"got head dimension {call.q.shape[-1]}, it goes to {MAX_DIM}")
    return why


def _lists(layout: Tensor, causal: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Counts int32 [layouts, blocks] and, in front of each list, the items: int32 [layouts, blocks, blocks]."""
    active = (layout.tril() if causal else layout) != 0
    active = active.transpose(-1, -2) if columns else active
    items = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return active.sum(-1, dtype=torch.int32).contiguous(), items.to(torch.int32).contiguous()


def _unit(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


class _Launch:
    """What the three kernels are given alike."""

    def __init__(self, call: AttentionCall) -> None:
        from . import triton_kernels  # late: importing Triton takes a second

        self.kernels = triton_kernels
        self.call = call
        self.q, self.k, self.v = map(_unit, (call.q, call.k, call.v))
        self.batch, self.heads, self.seq, self.dim = call.q.shape
        device = call.q.device
        self.bias = torch.empty(0, device=device) if call.bias is None else call.bias.to(torch.float32).contiguous()
        self.key_bias = (
            torch.empty(0, device=device) if call.key_bias is None else call.key_bias.to(torch.float32).contiguous()
        )
        self.seed = torch.zeros(1, dtype=torch.int64, device=device) if call.seed is None else call.seed
        self.drop = torch.full((1,), call.drop_below, dtype=torch.int64, device=device)
        self.layout_stride = 0 if call.layout.shape[0] == 1 else call.blocks

    def bias_strides(self) -> list[int]:
        """Batch, head and query strides of the bias, 0 where it is broadcast."""
        if self.call.bias is None:
            return [0, 0, 0]
        return [0 if n == 1 else s for n, s in zip(self.bias.shape[:3], self.bias.stride()[:3])]

    def sizes(self) -> list[float]:
        """heads, group, seq, blocks, layout_stride, scale, keep_scale."""
        call = self.call
        return [self.heads, call.group, self.seq, call.blocks, self.layout_stride, call.scale, call.keep_scale]

    def options(self) -> dict[str, int]:
        """Compile-time switches, warps and stages."""
        call = self.call
        width = max(16, 1 << (self.dim - 1).bit_length())
        return {
            "N": call.block, "D": self.dim, "DP": width,
            "HAS_BIAS": call.bias is not None, "HAS_KEY_BIAS": call.key_bias is not None,
            "CAUSAL": call.causal, "DROPOUT": call.seed is not None,
            "num_warps": 8 if call.block * width >= 128 * 128 else 4, "num_stages": 1 if width > 128 else 2,
        }  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [s for t in tensors for s in t.stride()[:3]]


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output like q, and the log-sum-exp, float32 [batch, heads, seq]."""
    launch = _Launch(call)
    out = torch.empty_like(launch.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    if out.numel():
        counts, items = _lists(call.layout, call.causal, columns=False)
        launch.kernels.forward_kernel[(call.blocks, launch.batch * launch.heads)](
            launch.q, launch.k, launch.v, out, lse, counts, items, launch.bias, launch.key_bias, launch.seed, launch.drop,
            *_strides(launch.q, launch.k, launch.v, out), *launch.bias_strides(), *launch.sizes(), **launch.options(),
        )  # fmt: skip
    return out, lse


def backward(call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool) -> Gradients:
    """Gradients of q, k, v; of the bias through a [batch, heads, seq, seq] buffer that is summed to its shape."""
    launch = _Launch(call)
    dout = _unit(dout)
    dq = torch.empty_like(launch.q, memory_format=torch.contiguous_format)
    dk, dv = torch.empty_like(launch.k), torch.empty_like(launch.v)
    want_bias = want_bias and call.bias is not None
    side = launch.seq if want_bias else 0
    dbias = torch.zeros(launch.batch, launch.heads, side, side, dtype=torch.float32, device=dq.device)
    if dq.numel():
        delta = (dout.float() * out.float()).sum(-1)
        masks = (launch.bias, launch.key_bias, launch.seed, launch.drop)
        counts, items = _lists(call.layout, call.causal, columns=False)
        launch.kernels.dq_kernel[(call.blocks, launch.batch * launch.heads)](
            launch.q, launch.k, launch.v, dout, dq, lse, delta, dbias, counts, items, *masks,
            *_strides(launch.q, launch.k, launch.v, dout, dq), *launch.bias_strides(), *launch.sizes(),
            WANT_BIAS=want_bias, **launch.options(),
        )  # fmt: skip
        counts, items = _lists(call.layout, call.causal, columns=True)
        launch.kernels.dkv_kernel[(call.blocks, launch.batch * launch.k.shape[1])](
            launch.q, launch.k, launch.v, dout, dk, dv, lse, delta, counts, items, *masks,
            *_strides(launch.q, launch.k, launch.v, dout, dk, dv), *launch.bias_strides(), *launch.sizes(),
            **launch.options(),
        )  # fmt: skip
    bias = dbias.sum_to_size(call.bias.shape) if want_bias and call.bias is not None else None
    return Gradients(dq, dk, dv, bias)
