"""`apply_sparse_attention`: what the `sparse_attention` section of a configuration does to a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn as nn

from ..errors import ArgumentError
from ..patterns import SparsityConfig
from .self_attention import SparseSelfAttention
from .utils import SparseAttentionUtils

__all__ = ["SparsitySection", "apply_sparse_attention"]


class SparsitySection(Protocol):
    """A validated section, such as `config.SparseAttentionConfig`."""

    def sparsity_config(self, num_heads: int) -> SparsityConfig:
        """The pattern for so many heads."""
        ...


def apply_sparse_attention(model: nn.Module, section: SparsitySection) -> list[str]:
    """Give a model the pattern of a section. In place, before it is sharded; returns the names of the modules that changed.

    * A model with `SparseSelfAttention` modules: each gets the section's pattern in place of its own.
    * A Hugging Face BERT or RoBERTa: its self-attention layers are replaced, for all the positions the model has.

    Raises:
        ArgumentError: the model is neither.
        LayoutError: the pattern does not fit the heads or the length.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, SparseSelfAttention)}
    for module in found.values():
        module.set_sparsity(section.sparsity_config(module.sparsity_config.num_heads))
    if found:
        return list(found)
    config: Any = getattr(model, "config", None)
    try:
        longest = SparseAttentionUtils.positions(model)
    except ArgumentError as error:
        raise ArgumentError(
            f"the configuration has a sparse_attention section, but {type(model).__name__} has nothing to apply it to: no "
            "SparseSelfAttention module, and it is no Hugging Face BERT or RoBERTa; build the model with SparseSelfAttention or drop the section"
        ) from error
    pattern = section.sparsity_config(config.num_attention_heads)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, longest, pattern)
    return [name for name, m in model.named_modules() if isinstance(m, SparseSelfAttention)]
