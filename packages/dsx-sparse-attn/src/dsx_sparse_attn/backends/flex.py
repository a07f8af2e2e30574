"""PyTorch's FlexAttention with the layout as its block mask.

It brings its own autograd, so it is called around our operator. Compiled, it is a fast kernel on CUDA and a forward-only one on
CPU; every new shape compiles again. Taken by `auto` on CUDA where Triton's kernels refuse; on request elsewhere.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..call import AttentionCall

__all__ = ["block_mask", "refusals", "run", "unavailable"]


def unavailable() -> str:
    """Why FlexAttention runs nothing on this machine; empty when it runs."""
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} has no flex_attention"
    return ""


def refusals(call: AttentionCall) -> list[str]:
    """Why FlexAttention cannot do this call; empty when it can."""
    why = [reason for reason in (unavailable(),) if reason]
    if call.seed is not None:
        why.append("it has no dropout")
    if call.q.dtype == torch.float64:
        why.append("it does not know float64")
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v))
    if call.q.device.type == "cpu" and wants_grad:
        why.append("it has no backward on CPU")
    if call.bias is not None and call.bias.requires_grad and call.q.device.type == "cpu":
        why.append("it has no gradient of rpe on CPU")
    if call.q.device.type not in ("cpu", "cuda"):
        why.append(f"tensors are on {call.q.device.type}, it works on cpu and cuda")
    if call.q.device.type == "cuda" and call.block < 128:
        why.append(f"got block {call.block}; on CUDA its masks need blocks of 128")
    return why


def block_mask(call: AttentionCall):
    """The layout as a `BlockMask`: blocks that need no look at their elements are listed apart from the causal diagonal and the end."""
    from torch.nn.attention.flex_attention import BlockMask  # late: importing it costs a second

    seq, n, heads = call.q.shape[2], call.block, call.q.shape[1]
    active = ((call.layout.tril() if call.causal else call.layout) != 0).expand(heads, -1, -1)
    whole = torch.ones_like(active)
    if call.causal:
        whole = whole & ~torch.eye(call.blocks, dtype=torch.bool, device=active.device)
    if seq % n:
        whole[:, -1], whole[:, :, -1] = False, False
    causal = call.causal

    def mask_mod(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = active[h, i // n, j // n]  # the eager path looks at nothing else
        return inside & (i >= j) if causal else inside

    counts, order = _lists(active & ~whole)
    full_counts, full_order = _lists(active & whole)
    return BlockMask.from_kv_blocks(
        counts, order, full_counts, full_order, BLOCK_SIZE=n, mask_mod=mask_mod, seq_lengths=(seq, seq)
    )


def _lists(active: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, heads, blocks] and items int32 [1, heads, blocks, blocks], listed ones in front."""
    order = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return active.sum(-1, dtype=torch.int32).unsqueeze(0).contiguous(), order.unsqueeze(0).contiguous()


def _score_mod(call: AttentionCall):
    bias, key_bias = call.bias, call.key_bias
    if bias is None and key_bias is None:
        return None
    if bias is not None:
        bias = bias.expand(call.q.shape[0], call.q.shape[1], call.q.shape[2], -1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b, h, i, j]
        if key_bias is not None:
            score = score + key_bias[b, j]
        return score

    return score_mod


def run(call: AttentionCall, *, compiled: bool | None = None) -> Tensor:
    """Output like q. `compiled` (default: on CUDA) goes through torch.compile, else it materialises the scores."""
    from torch.nn.attention.flex_attention import flex_attention

    if compiled is None:
        compiled = call.q.device.type == "cuda"
    function = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return function(
        call.q, call.k, call.v,
        score_mod=_score_mod(call), block_mask=block_mask(call), scale=call.scale, enable_gqa=call.group > 1,
    )  # fmt: skip
