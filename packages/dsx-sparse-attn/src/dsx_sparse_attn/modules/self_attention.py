"""`SparseSelfAttention`: the module around `block_sparse_attention`, with its layouts kept per length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..attention import MaskMode, block_sparse_attention
from ..errors import ArgumentError, LayoutError
from ..layout import Layout
from ..patterns import FixedSparsityConfig, SparsityConfig

__all__ = ["SparseSelfAttention"]

_KEPT_LENGTHS = 16  # a module keeps the cut layouts of so many lengths, and the kernels' values made from them


class SparseSelfAttention(nn.Module):
    """Scores, masks, softmax and weighted values over a layout; no parameters.

    The layout is made once, for `max_seq_length`, and cut for shorter sequences. It is a buffer of this module: it is
    saved and moved with the model, and is the same on every rank that loads or broadcasts it. Lengths that are not
    multiples of the block are allowed.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
        *,
        dropout: float = 0.0,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        """
        Args:
            sparsity_config: the pattern; default `FixedSparsityConfig(num_heads=4)`.
            key_padding_mask_mode, attn_mask_mode: "add" adds a mask to the scores, "mul" hides where it is 0.
            max_seq_length: longest sequence; a multiple of the block.
            dropout: probability of dropping a weight, in training mode.
            causal: no query sees a later key.
            backend: see `block_sparse_attention`.

        Raises:
            LayoutError: the pattern does not fit `max_seq_length`.
            ArgumentError: a mode is neither "add" nor "mul".
        """
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ArgumentError(f'got {name}={mode!r}, expected "add" or "mul"')
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode: MaskMode = key_padding_mask_mode
        self.attn_mask_mode: MaskMode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.dropout, self.causal, self.backend = dropout, causal, backend
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # blocks -> (the layout it was cut from, the cut)
        self.register_buffer(
            "master_layout", _stored(self.sparsity_config, self.sparsity_config.make_layout(max_seq_length))
        )

    def set_sparsity(self, sparsity_config: SparsityConfig) -> None:
        """Replace the pattern, for the same longest sequence (rounded up to the new blocks).

        Raises:
            ArgumentError: the pattern has another number of heads.
            LayoutError: the pattern does not fit the length.
        """
        heads = self.sparsity_config.num_heads
        if sparsity_config.num_heads != heads:
            raise ArgumentError(f"got a pattern for {sparsity_config.num_heads} heads, this module has {heads}")
        layout = sparsity_config.covering(self.max_seq_length)
        self.master_layout = _stored(sparsity_config, layout).to(self.master_layout.device)
        self.sparsity_config, self.max_seq_length = sparsity_config, layout.seq_len

    def get_layout(self, seq_len: int) -> Tensor:
        """The layout for `seq_len` positions, uint8 [1 or heads, blocks, blocks]; it has one head if all heads have the
        same pattern.

        Returns the same tensor every time, so that values that kernels make from a layout can be cached with it.

        Raises:
            LayoutError: the sequence is longer than `max_seq_length`.
        """
        if seq_len > self.max_seq_length:
            raise LayoutError(
                f"got a sequence of {seq_len}, this module was made for max_seq_length={self.max_seq_length}; "
                "make it longer"
            )
        blocks = -(-seq_len // self.sparsity_config.block)
        whole = self.master_layout
        if blocks == whole.shape[-1]:
            return whole
        if torch.compiler.is_compiling():
            return whole[:, :blocks, :blocks]
        cut_from, cut = self._views.pop(blocks, (None, None))
        if cut is None or cut_from is not whole:
            cut = whole[:, :blocks, :blocks]
        self._views[blocks] = whole, cut  # the most recent is the last
        if len(self._views) > _KEPT_LENGTHS:
            del self._views[next(iter(self._views))]
        return cut

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a view is not a view any more: writes to the copied layout would not show in it.
        return {**self.__dict__, "_views": {}}

    def density(self, seq_len: int | None = None) -> float:
        """Share of the blocks that are computed for `seq_len` positions (default: the longest sequence)."""
        return (self.get_layout(seq_len or self.max_seq_length) != 0).float().mean().item()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """[batch, heads, seq, dim] from tensors of that shape; see `block_sparse_attention` for masks and errors.

        A transposed key, [batch, heads, dim, seq], and a mask of the keys of shape [batch, 1, 1, seq] are accepted too.
        A shorter sequence uses the first blocks of the layout of `max_seq_length`. For some patterns (random blocks, a
        fixed pattern's short last window) that differs from a layout that is made for the shorter length.
        """
        self._check_heads(query)
        if key.shape != query.shape and key.dim() == 4 and key.mT.shape == query.shape:
            key = key.mT
        if key_padding_mask is not None and key_padding_mask.dim() == 4 and key_padding_mask.shape[1:3] == (1, 1):
            key_padding_mask = key_padding_mask[:, 0, 0]
        return block_sparse_attention(
            query, key, value, self.get_layout(query.shape[2]),
            block=self.sparsity_config.block, rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode, attn_mask_mode=self.attn_mask_mode,
            causal=self.causal, dropout_p=self._dropout(), backend=self.backend,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        scale: float | None = None,
        dropout: float | None = None,
    ) -> Tensor:
        """Attention with one mask, as Hugging Face models have it; the mask's shape and dtype say what it means.

        Args:
            query: [batch, heads, seq, dim].
            key, value: [batch, key heads, seq, dim].
            mask: a mask of the keys, [batch, seq] or [batch, 1, 1, seq], in addition to this module's causality; or a
                mask of queries by keys, [batch, 1 or heads, seq, seq], which must contain the causality too. Bool: True
                is seen; floats are added.
            scale: factor on the scores; default 1 / sqrt(dim).
            dropout: probability of dropping a weight; default: this module's, in training mode.

        Raises:
            ArgumentError: the mask has another shape, or consists of integers.
        """
        self._check_heads(query)
        masks = masks_by_shape(mask, query.shape[0], query.shape[2])
        return block_sparse_attention(
            query, key, value, self.get_layout(query.shape[2]), block=self.sparsity_config.block,
            **masks, attn_mask_mode="add", causal=self.causal and "attn_mask" not in masks,
            scale=scale, dropout_p=self._dropout() if dropout is None else dropout, backend=self.backend,
        )  # fmt: skip

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _check_heads(self, query: Tensor) -> None:
        heads = self.sparsity_config.num_heads
        if query.dim() != 4 or query.shape[1] != heads:
            raise ArgumentError(f"got a query of shape {tuple(query.shape)}, expected [batch, {heads}, seq, dim]")

    def extra_repr(self) -> str:
        """Pattern and size."""
        config = self.sparsity_config
        sizes = f"heads={config.num_heads}, block={config.block}, max_seq_length={self.max_seq_length}"
        return f"{type(config).__name__}, {sizes}"


def _stored(config: SparsityConfig, layout: Layout) -> Tensor:
    """The layout as uint8, with one head if all heads have the same pattern, because a layout for long texts is
    large.
    """
    blocks = layout.plain()
    same = not config.different_layout_per_head and bool((blocks == blocks[:1]).all())
    return (blocks[:1] if same else blocks).to(torch.uint8).contiguous()


def masks_by_shape(mask: Tensor | None, batch: int, seq: int) -> dict[str, Any]:
    """The option of `block_sparse_attention` for a mask of this shape; see `SparseSelfAttention.attend`."""
    if mask is None:
        return {}
    keys = None
    if mask.dim() == 2:
        keys = mask
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == 1:
        keys = mask[:, 0, 0].expand(batch, -1)
    if keys is not None:  # True is seen here, and hides in a bool key_padding_mask
        return {"key_padding_mask": ~keys if keys.dtype == torch.bool else keys}
    if mask.dim() == 4 and mask.shape[-2:] == (seq, seq):
        return {"attn_mask": mask}
    raise ArgumentError(
        f"got an attention_mask of shape {tuple(mask.shape)}, expected [{batch}, {seq}], [{batch}, 1, 1, {seq}] or "
        f"[{batch}, 1, {seq}, {seq}]"
    )
