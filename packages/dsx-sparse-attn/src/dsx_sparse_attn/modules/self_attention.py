"""`SparseSelfAttention`: the module around `block_sparse_attention`, with its layouts kept per length."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from ..attention import MaskMode, block_sparse_attention
from ..errors import ArgumentError, LayoutError
from ..patterns import FixedSparsityConfig, SparsityConfig

__all__ = ["SparseSelfAttention"]


class SparseSelfAttention(nn.Module):
    """Scores, masks, softmax and weighted values over a layout; no parameters.

    The layout is made once, for `max_seq_length`, and cut for shorter sequences: it is a buffer (saved with the model, moved
    with it, the same on every rank that loads or broadcasts it) and belongs to this module alone. Lengths that are no multiple
    of the block are fine.
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
            dropout: of the weights, in training mode.
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
        layout = self.sparsity_config.make_layout(max_seq_length)
        self.register_buffer("master_layout", layout.plain().to(torch.uint8))

    def set_sparsity(self, sparsity_config: SparsityConfig) -> None:
        """Take another pattern, for the same longest sequence (rounded up to its blocks).

        Raises:
            ArgumentError: it has other heads.
            LayoutError: it does not fit the length.
        """
        heads = self.sparsity_config.num_heads
        if sparsity_config.num_heads != heads:
            raise ArgumentError(f"got a pattern for {sparsity_config.num_heads} heads, this module has {heads}")
        layout = sparsity_config.covering(self.max_seq_length)
        self.master_layout = layout.plain().to(torch.uint8).to(self.master_layout.device)
        self.sparsity_config, self.max_seq_length = sparsity_config, layout.seq_len

    def get_layout(self, seq_len: int) -> Tensor:
        """The layout of so many positions, uint8 [heads, blocks, blocks]. Raises `LayoutError` beyond `max_seq_length`."""
        if seq_len > self.max_seq_length:
            raise LayoutError(
                f"got a sequence of {seq_len}, this module was made for max_seq_length={self.max_seq_length}; make it longer"
            )
        blocks = -(-seq_len // self.sparsity_config.block)
        return self.master_layout[:, :blocks, :blocks]

    def density(self, seq_len: int | None = None) -> float:
        """Share of blocks computed for so many positions (default: the most)."""
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

        As scripts pass them: a key that is transposed already, [batch, heads, dim, seq], and a mask of the keys as [batch, 1, 1, seq].
        A layout that blocks of the same pattern at another length would not have (a fixed pattern's short last window, random
        blocks) is that of `max_seq_length`, cut.
        """
        heads = self.sparsity_config.num_heads
        if query.dim() != 4 or query.shape[1] != heads:
            raise ArgumentError(f"got a query of shape {tuple(query.shape)}, expected [batch, {heads}, seq, dim]")
        if key.shape != query.shape and key.dim() == 4 and key.mT.shape == query.shape:
            key = key.mT
        if key_padding_mask is not None and key_padding_mask.dim() == 4 and key_padding_mask.shape[1:3] == (1, 1):
            key_padding_mask = key_padding_mask[:, 0, 0]
        return block_sparse_attention(
            query, key, value, self.get_layout(query.shape[2]),
            block=self.sparsity_config.block, rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode, attn_mask_mode=self.attn_mask_mode,
            causal=self.causal, dropout_p=self.dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Pattern and size."""
        config = self.sparsity_config
        return f"{type(config).__name__}, heads={config.num_heads}, block={config.block}, max_seq_length={self.max_seq_length}"
