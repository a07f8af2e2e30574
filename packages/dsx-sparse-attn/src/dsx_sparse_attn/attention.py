"""`block_sparse_attention`: attention that computes only the blocks of a layout, forward and backward.

out = dropout(softmax(q k^T * scale + rpe + masks)) v, where scores outside the layout are -inf. A query that may see no
key gives zeros. The kernels never allocate a tensor of the size of the score matrix (but a `rpe` or `attn_mask` that
you pass has that size).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .backends import flex
from .cache import on_device
from .call import AttentionCall, compute_dtype
from .errors import ArgumentError, LayoutError
from .layout import Layout
from .library import attention
from .masks import additive, check_mask

__all__ = ["block_sparse_attention", "explain_backends"]

MaskMode = Literal["add", "mul"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rpe: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    key_padding_mask_mode: MaskMode = "add",
    attn_mask_mode: MaskMode = "mul",
    dropout_seed: int | None = None,
    block: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over the blocks of `layout`.

    Args:
        q: [batch, heads, seq, dim]; float32, bfloat16, float16 or float64; computed in float32 (float64 in float64).
            Under `torch.autocast` q, k and v may differ.
        k, v: [batch, kv_heads, seq, dim]; heads is a multiple of kv_heads (grouped queries).
        layout: [heads or 1, blocks, blocks], nonzero where a block is computed: a `Layout`, or a plain tensor.
        scale: factor on the scores; default 1 / sqrt(dim).
        key_padding_mask: [batch, seq]. Bool: True hides a key, as in `torch.nn.MultiheadAttention`. Floats that are
            added to the scores ("add"; refused if all are 0 or 1), or numbers of which 0 hides ("mul"; refused if one
            is negative). Values are not checked in compiled code.
        attn_mask: [seq, seq], or 4 dimensions that broadcast to [batch, heads, seq, seq]. Bool: True is seen, as in
            `scaled_dot_product_attention`. Numbers as above; the default is "mul".
        rpe: relative position bias added to the scores, [seq, seq], [heads, seq, seq] or 4-D as above; gets a gradient.
        causal: a query sees no later key, also inside blocks.
        dropout_p: probability of dropping a weight, in [0, 1).
        dropout_seed: the seed of the dropout mask; default: drawn from torch's generator of the device.
        block: positions per block; default: the `Layout`'s, else seq / blocks. The last block may be short.
        backend: "auto", "native", "triton", "flex" or "torch".

    Returns:
        [batch, heads, seq, dim] in q's dtype.

    Raises:
        LayoutError: the layout fits neither heads nor length.
        ArgumentError: a shape, dtype, device or number is wrong.
        BackendError: the requested backend cannot do this; `reasons` has the reasons of each backend.
    """
    dispatch.check_name(backend)
    options = Options(
        scale,
        key_padding_mask,
        attn_mask,
        rpe,
        causal,
        dropout_p,
        key_padding_mask_mode,
        attn_mask_mode,
        dropout_seed,
        block,
    )
    c = checked(q, k, v, layout, options)
    if (c.q.device.type != "cpu" or backend == "flex") and dispatch.prefers_flex(c, backend):
        return flex.run(c)
    return attention(*c, backend)


def explain_backends(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, **options: Any) -> dict[str, list[str]]:
    """For each backend, why it cannot do a call with these arguments; an empty list means that it can.

    Args:
        q, k, v: as `block_sparse_attention` takes them.
        layout: the blocks that are computed.
        options: further arguments of `block_sparse_attention`.

    Raises:
        ArgumentError, LayoutError: as `block_sparse_attention`, and for an option that there is not.
    """
    known = set(Options._fields)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ArgumentError(f"got option {unknown[0]!r}, expected one of {', '.join(sorted(known))}")
    return dispatch.explain(checked(q, k, v, layout, Options(**options)))


class Options(NamedTuple):
    """The options of `block_sparse_attention`, as given."""

    scale: float | None = None
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    rpe: Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    key_padding_mask_mode: MaskMode = "add"
    attn_mask_mode: MaskMode = "mul"
    dropout_seed: int | None = None
    block: int | None = None


def checked(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, options: Options) -> AttentionCall:
    """Check all arguments and bring them into one form. Raises `ArgumentError` and `LayoutError`."""
    if not (q.dtype == k.dtype == v.dtype):
        q, k, v = _cast_as_autocast(q, k, v)
    _check_tensors(q, k, v)
    block = options.block
    if isinstance(layout, Layout):
        block = layout.block if block is None else block
        layout = layout.plain()
    block = _checked_block(layout, block, q)
    if not 0.0 <= options.dropout_p < 1.0:
        raise ArgumentError(f"got dropout_p={options.dropout_p}, expected a probability in [0, 1)")
    dtype = compute_dtype(q.dtype)
    return AttentionCall(
        q,
        k,
        v,
        on_device(layout, q.device),
        _bias(q, options, dtype),
        _key_bias(q, options, dtype),
        _seed(q, options),
        1.0 / math.sqrt(q.shape[-1]) if options.scale is None else float(options.scale),
        block,
        bool(options.causal),
        float(options.dropout_p),
    )


def _cast_as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under `torch.autocast`, tensors of different precision (such as queries rotated in float32) are cast to the
    precision in which autocast computes products.
    """
    kind = q.device.type
    mixed = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (q, k, v))
    if not mixed or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ArgumentError(
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected q [batch, heads, seq, dim] and "
            "k, v of one shape [batch, kv_heads, seq, dim]"
        )
    batch, heads, seq, dim = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, seq, dim):
        raise ArgumentError(
            f"got q {tuple(q.shape)} and k, v {tuple(k.shape)}; expected the same batch, sequence length and head "
            "dimension (block-sparse attention is self-attention)"
        )
    if k.shape[1] == 0 or heads % k.shape[1] != 0:
        raise ArgumentError(f"got {heads} query heads and {k.shape[1]} key heads, expected a multiple")
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
        raise ArgumentError(
            f"got q, k, v of {q.dtype}, {k.dtype}, {v.dtype}; expected one of float32, bfloat16, float16, float64 "
            "for all"
        )
    if not (q.device == k.device == v.device):
        raise ArgumentError(f"got q, k, v on {q.device}, {k.device}, {v.device}; expected one device")


def _checked_block(layout: Tensor, block: int | None, q: Tensor) -> int:
    """Check that layout and tensors fit; returns the block size."""
    heads, seq = q.shape[1], q.shape[2]
    if layout.dim() != 3 or layout.shape[1] != layout.shape[2] or layout.shape[1] == 0:
        raise LayoutError(f"got a layout of shape {tuple(layout.shape)}, expected [heads, blocks, blocks]")
    if layout.shape[0] not in (1, heads):
        raise LayoutError(
            f"got a layout for {layout.shape[0]} heads and q with {heads}; expected {heads} (or 1 for all)"
        )
    blocks = layout.shape[1]
    if block is None:
        if seq % blocks != 0:
            raise LayoutError(
                f"got a sequence of {seq} and a layout of {blocks} blocks, and no block size: "
                f"{blocks} does not divide {seq}; pass block=, or a Layout, which knows its own"
            )
        block = seq // blocks
    if block < 1 or -(-seq // block) != blocks:
        raise LayoutError(
            f"got a sequence of {seq}, a layout of {blocks} x {blocks} blocks and block {block}, which covers "
            f"{blocks * block}; expected {-(-seq // max(block, 1))} blocks (make_layout for the padded length, or "
            f"config.covering({seq}))"
        )
    return block


def _check_mask(name: str, mask: Tensor, mode: str, q: Tensor) -> None:
    check_mask(name, mask, mode)
    if mask.requires_grad:
        raise ArgumentError(f"got a {name} that requires a gradient, which masks do not get; pass it as rpe")
    if mask.device != q.device:
        raise ArgumentError(f"got a {name} on {mask.device} and q on {q.device}, expected one device")


def _broadcast_4d(name: str, x: Tensor, q: Tensor) -> Tensor:
    """[seq, seq], [heads, seq, seq] or 4-D -> 4-D with every size 1 or that of the scores (keys: full)."""
    batch, heads, seq, _ = q.shape
    wide = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if 2 <= x.dim() <= 4 else x
    full = (batch, heads, seq, seq)
    if wide.dim() != 4 or any(n not in (1, m) for n, m in zip(wide.shape, full)):
        raise ArgumentError(
            f"got {name} of shape {tuple(x.shape)}, expected [{seq}, {seq}], [{heads}, {seq}, {seq}] or 4-D "
            f"broadcasting to {full}"
        )
    return wide if wide.shape[3] == seq else wide.expand(-1, -1, -1, seq)


def _bias(q: Tensor, options: Options, dtype: torch.dtype) -> Tensor | None:
    """rpe and attn_mask as one tensor; autograd passes its gradient on to rpe."""
    bias = None
    if options.rpe is not None:
        if options.rpe.device != q.device:
            raise ArgumentError(f"got a rpe on {options.rpe.device} and q on {q.device}, expected one device")
        bias = _broadcast_4d("rpe", options.rpe, q).to(dtype)
    if options.attn_mask is not None:
        _check_mask("attn_mask", options.attn_mask, options.attn_mask_mode, q)
        mask = _broadcast_4d("attn_mask", additive(options.attn_mask, options.attn_mask_mode, dtype), q)
        bias = mask if bias is None else bias + mask
    return bias


def _key_bias(q: Tensor, options: Options, dtype: torch.dtype) -> Tensor | None:
    mask = options.key_padding_mask
    if mask is None:
        return None
    _check_mask("key_padding_mask", mask, options.key_padding_mask_mode, q)
    if mask.shape != (q.shape[0], q.shape[2]):
        raise ArgumentError(f"got a key_padding_mask of shape {tuple(mask.shape)}, expected {(q.shape[0], q.shape[2])}")
    return additive(mask, options.key_padding_mask_mode, dtype, true_hides=True)


def _seed(q: Tensor, options: Options) -> Tensor | None:
    if options.dropout_p == 0.0:
        return None
    if options.dropout_seed is not None:
        return torch.full((1,), options.dropout_seed & 0xFFFFFFFF, dtype=torch.int64, device=q.device)
    return torch.randint(0, 2**32, (1,), dtype=torch.int64, device=q.device)
