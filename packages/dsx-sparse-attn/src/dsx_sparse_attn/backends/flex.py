"""PyTorch's FlexAttention with the layout as its block mask.

It has its own autograd, so it is called instead of our operator. When compiled, it is a fast kernel on CUDA, and a
forward-only kernel on CPU. Each new combination of shapes and options is compiled once. `dispatch.ORDER` says when
`auto` takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache import derived
from ..call import AttentionCall
from ..masks import HIDES_BELOW

__all__ = ["block_mask", "compiled_attention", "refusals", "run", "unavailable"]

CUDA_BLOCK = 128  # FlexAttention's CUDA kernels go over their mask in blocks of 128
_LEAST_DIM = 16
_RECOMPILES = 64  # per process; torch's own limit is 8, after which it computes all scores


def unavailable() -> str:
    """Returns "": every torch that this package runs with has it."""
    return ""


def refusals(call: AttentionCall) -> list[str]:
    """The reasons why FlexAttention cannot do this call; empty when it can."""
    why, device = [], call.q.device.type
    if call.seed is not None:
        why.append("it has no dropout")
    if call.q.dtype == torch.float64:
        why.append("it does not know float64")
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v))
    if device == "cpu" and wants_grad:
        why.append("it has no backward on CPU")
    if device == "cpu" and call.bias is not None and call.bias.requires_grad:
        why.append("it has no gradient of rpe on CPU")
    if device not in ("cpu", "cuda"):
        why.append(f"tensors are on {device}, it works on cpu and cuda")
    if device == "cuda" and call.block % CUDA_BLOCK:
        why.append(f"got block {call.block}; on CUDA its masks need multiples of {CUDA_BLOCK}")
    if device == "cuda" and call.q.shape[-1] < _LEAST_DIM:
        why.append(f"got head dimension {call.q.shape[-1]}; on CUDA it begins at {_LEAST_DIM}")
    return why


def block_mask(call: AttentionCall) -> Any:
    """The layout as a `BlockMask`, made once per layout and length.

    Blocks that are computed completely are listed separately from those that the causal diagonal or the end of the
    sequence cuts.
    """
    seq, n, heads, causal = call.q.shape[2], call.block, call.q.shape[1], call.causal
    layout = call.layout
    if torch.compiler.is_compiling():
        return _block_mask(layout, seq, n, heads, causal)
    return derived(layout, ("flex", seq, n, heads, causal), lambda: _block_mask(layout, seq, n, heads, causal))


def _block_mask(layout: Tensor, seq: int, n: int, heads: int, causal: bool) -> Any:
    from torch.nn.attention.flex_attention import BlockMask  # lazy import: importing it costs a second

    active = ((layout.tril() if causal else layout) != 0).expand(heads, -1, -1)
    full = torch.ones_like(active)
    if causal:
        full = full & ~torch.eye(active.shape[-1], dtype=torch.bool, device=active.device)
    if seq % n:
        full[:, -1], full[:, :, -1] = False, False

    def mask_mod(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = active[h, i // n, j // n]  # the uncompiled function uses only this
        return inside & (i >= j) if causal else inside

    counts, order = _lists(active & ~full)
    full_counts, full_order = _lists(active & full)
    return BlockMask.from_kv_blocks(
        counts, order, full_counts, full_order, BLOCK_SIZE=n, mask_mod=mask_mod, seq_lengths=(seq, seq)
    )


def _lists(active: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, heads, blocks] and items int32 [1, heads, blocks, blocks], listed ones in front."""
    order = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return active.sum(-1, dtype=torch.int32).unsqueeze(0).contiguous(), order.unsqueeze(0).contiguous()


def _score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    bias: Any = call.bias
    key_bias: Any = call.key_bias
    if bias is None and key_bias is None:
        return None
    if bias is not None:
        bias = bias.expand(call.q.shape[0], call.q.shape[1], call.q.shape[2], -1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if key_bias is None:
            added = bias[b, h, i, j]  # pyright: ignore[reportOptionalSubscript]
        elif bias is None:
            added = key_bias[b, j]
        else:
            added = bias[b, h, i, j] + key_bias[b, j]
        return score + torch.where(added < HIDES_BELOW, -float("inf"), added)

    return score_mod


@functools.cache
def compiled_attention(backend: str = "inductor") -> Callable[..., Any]:
    """`flex_attention` under `torch.compile`, wrapped once per process.

    torch compiles again for each new combination of shapes and options. After a limit it falls back to the uncompiled
    function, which computes all scores. So the limit is raised, and beyond it torch raises an error.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attention(*arguments: Any, **options: Any) -> Any:
        return flex_attention(*arguments, **options)

    compiled = torch.compile(attention, dynamic=False, fullgraph=True, backend=backend)

    def run_compiled(*arguments: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):  # pyright: ignore[reportPrivateUsage]
            return compiled(*arguments, **options)

    return run_compiled


def run(call: AttentionCall, *, compiled: bool | None = None) -> Tensor:
    """The output, like q. `compiled` (default: on CUDA) uses torch.compile; otherwise all scores are in memory."""
    from torch.nn.attention.flex_attention import flex_attention

    if compiled is None:
        compiled = call.q.device.type == "cuda"
    # Inside the user's own torch.compile the function is traced as part of their graph.
    function = compiled_attention() if compiled and not torch.compiler.is_compiling() else flex_attention
    return function(
        call.q, call.k, call.v,
        score_mod=_score_mod(call), block_mask=block_mask(call), scale=call.scale, enable_gqa=call.group > 1,
    )  # fmt: skip
