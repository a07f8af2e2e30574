"""Sparse attention in causal Hugging Face models: GPT-2, Llama, and every model that follows the same rule
(`check_causal_model`).

A layer keeps its projections, rotary embedding, caches and head groups; only the function between queries, keys, values
and the output is replaced. Each attention module gets a `sparse_self_attention` with the layout.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from ..errors import ArgumentError, SparseAttentionError
from ..patterns import SparsityConfig
from .huggingface import check_causal_model, use_sparse_attention
from .self_attention import SparseSelfAttention

__all__ = ["make_causal_model_sparse"]


def make_causal_model_sparse(model: nn.Module, max_position: int | None, pattern: SparsityConfig) -> list[str]:
    """Give every attention layer of a causal model a pattern. In place; returns the names of the modules that were
    added.

    The model gets a copy of its configuration with `use_cache=False`, because decoding with a cache is not supported.

    Args:
        max_position: longest sequence (default: all positions of the model).
        pattern: the pattern for the query heads of the model. Later keys stay hidden, whatever it says.

    Raises:
        ArgumentError: the model does not follow the rule, or has fewer positions.
        LayoutError: the pattern does not fit the length.
        SparseAttentionError: this version of transformers has no registry of attention functions.
    """
    layers = check_causal_model(model)
    config: Any = model.config
    have = config.max_position_embeddings
    longest = have if max_position is None else max_position
    if longest > have:
        raise ArgumentError(f"got max_position={longest}, {type(model).__name__} has {have} positions")
    length = -(-longest // pattern.block) * pattern.block
    made = {name: SparseSelfAttention(pattern, max_seq_length=length, causal=True) for name in layers}
    if not use_sparse_attention(model):
        raise SparseAttentionError(
            "causal models need transformers 5 or newer, whose attention functions can be replaced"
        )
    for name, layer in layers.items():
        made[name].to(next(layer.parameters()).device).train(layer.training)
        layer.sparse_self_attention = made[name]
    own: Any = model.config
    own.use_cache = False
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.use_cache = False
    return [f"{name}.sparse_self_attention" for name in layers]
