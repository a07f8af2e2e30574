"""`BertSparseSelfAttention`: the self-attention of a BERT layer, over a layout."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch import Tensor

from ..errors import ArgumentError
from ..patterns import FixedSparsityConfig, SparsityConfig
from .self_attention import SparseSelfAttention

__all__ = ["BertSparseSelfAttention"]


class BertSparseSelfAttention(nn.Module):
    """Projections to queries, keys and values, sparse attention, heads merged.

    Parameters as in BERT: `query`, `key`, `value`.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: SparsityConfig | None = None,
        *,
        max_seq_length: int | None = None,
        projections: tuple[nn.Module, nn.Module, nn.Module] | None = None,
    ) -> None:
        """
        Args:
            config: has `hidden_size`, `num_attention_heads`, `attention_probs_dropout_prob`; `max_position_embeddings`
                is the longest sequence unless `max_seq_length` is given.
            sparsity_config: the pattern; default `FixedSparsityConfig(num_heads=config.num_attention_heads)`.
            projections: the layers to use for `query`, `key` and `value`; default: new ones.

        Raises:
            ArgumentError: heads do not divide the hidden size, or are not those of the pattern.
        """
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        if hidden % heads != 0:
            raise ArgumentError(f"got hidden_size={hidden} and num_attention_heads={heads}, expected a multiple")
        sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=heads)
        if sparsity_config.num_heads != heads:
            raise ArgumentError(
                f"got a sparsity config for {sparsity_config.num_heads} heads and a model with {heads}; "
                f"make it with num_heads={heads}"
            )
        self.num_attention_heads, self.attention_head_size = heads, hidden // heads
        if projections is None:
            projections = (nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden))
        self.query, self.key, self.value = projections
        longest = max_seq_length or config.max_position_embeddings
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config,
            max_seq_length=-(-longest // sparsity_config.block) * sparsity_config.block,
            dropout=getattr(config, "attention_probs_dropout_prob", 0.0),
        )

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, heads, seq, dim], a view."""
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The context, [batch, seq, hidden].

        Args:
            hidden_states: [batch, seq, hidden].
            attention_mask: a mask of the keys, [batch, seq] or BERT's extended [batch, 1, 1, seq]. Floats are added to
                the scores (the lowest ones hide, see `masks.py`); with bool, True is seen. A mask that differs between
                queries is [batch, 1, seq, seq].

        Raises:
            ArgumentError: the mask has another shape, or is a mask of the keys in integers.
        """
        batch, seq, hidden = hidden_states.shape
        q, k, v = (self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value))
        context = self.sparse_self_attention.attend(q, k, v, attention_mask)
        return context.transpose(1, 2).reshape(batch, seq, hidden)
