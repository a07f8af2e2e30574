"""`apply_sparse_attention`: gives a model the pattern of a `sparse_attention` section."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.nn as nn

from ..errors import ArgumentError
from ..patterns import SparsityConfig
from .causal import make_causal_model_sparse
from .huggingface import check_causal_model, config_of
from .self_attention import SparseSelfAttention
from .utils import SparseAttentionUtils

__all__ = ["SparsitySection", "apply_sparse_attention"]


class SparsitySection(Protocol):
    """A validated section, such as `config.SparseAttentionConfig`."""

    def sparsity_config(self, num_heads: int) -> SparsityConfig:
        """The pattern for `num_heads` heads."""
        ...


def apply_sparse_attention(
    model: nn.Module, section: SparsitySection | Mapping[str, Any] | SparsityConfig, *, max_position: int | None = None
) -> list[str]:
    """Give a model a pattern, in place. Call it before the model is sharded.

    * A model with `SparseSelfAttention` modules: the pattern replaces that of each module.
    * A Hugging Face BERT or RoBERTa: its self-attention layers are replaced.
    * A causal Hugging Face model whose attention goes through transformers' registry (GPT-2, Llama, Mistral, Qwen,
      ...): each attention layer gets the pattern; later keys stay hidden, whatever the pattern says.

    A Hugging Face model gets a copy of its configuration; the original stays unchanged.

    Args:
        model: see above.
        section: the keys of the `sparse_attention` section as a dictionary, the validated section
            (`config.SparseAttentionConfig`), or a sparsity config.
        max_position: the longest sequence of a Hugging Face model; default: all positions of the model. Each layer
            keeps (max_position / block)^2 bytes for its layout, times the heads if their layouts differ.

    Returns:
        The names of the `SparseSelfAttention` modules that have the pattern.

    Raises:
        ArgumentError: the model is none of these, or the section does not validate.
        LayoutError: the pattern does not fit the heads or the length.
    """
    pattern_for = _patterns(section)
    found = {name: m for name, m in model.named_modules() if isinstance(m, SparseSelfAttention)}
    if found:
        if max_position is not None:
            raise ArgumentError(
                f"got max_position={max_position} for a model whose SparseSelfAttention modules have a length; "
                "make them with max_seq_length"
            )
        patterns = {name: pattern_for(m.sparsity_config.num_heads) for name, m in found.items()}
        for name, module in found.items():
            module.set_sparsity(patterns[name])
        return list(found)
    config = config_of(model)
    try:
        longest = SparseAttentionUtils.positions(model)
    except ArgumentError as no_encoder:
        _check_it_is_causal(model, no_encoder)
        return make_causal_model_sparse(model, max_position, pattern_for(config.num_attention_heads))
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, longest if max_position is None else max_position, pattern_for(config.num_attention_heads)
    )
    return [name for name, m in model.named_modules() if isinstance(m, SparseSelfAttention)]


def _check_it_is_causal(model: nn.Module, no_encoder: ArgumentError) -> None:
    try:
        check_causal_model(model)
    except ArgumentError as error:
        raise ArgumentError(
            f"sparse attention: {type(model).__name__} has nothing to apply it to: no SparseSelfAttention module, no "
            f"encoder of a Hugging Face BERT or RoBERTa, and it is not causal in the way of GPT-2 and Llama ({error}); "
            "build the model with SparseSelfAttention, or drop the sparse_attention section"
        ) from no_encoder


def _patterns(section: SparsitySection | Mapping[str, Any] | SparsityConfig) -> Callable[[int], SparsityConfig]:
    """number of heads -> the pattern."""
    if isinstance(section, SparsityConfig):
        return lambda heads: _checked_heads(section, heads)
    if isinstance(section, Mapping):
        return _validated(section).sparsity_config
    if not hasattr(section, "sparsity_config"):
        raise ArgumentError(
            f"got a section of type {type(section).__name__}, expected the keys of the sparse_attention section in a "
            "dictionary, a SparseAttentionConfig, or a sparsity config such as BigBirdSparsityConfig(num_heads=12)"
        )
    return section.sparsity_config


def _checked_heads(pattern: SparsityConfig, heads: int) -> SparsityConfig:
    if pattern.num_heads != heads:
        raise ArgumentError(
            f"got a pattern for {pattern.num_heads} heads and attention with {heads}; make it with num_heads={heads}"
        )
    return pattern


def _validated(section: Mapping[str, Any]) -> SparsitySection:
    from pydantic import ValidationError  # lazy import: only code that reads a configuration needs pydantic

    from ..config import SparseAttentionConfig

    if "sparse_attention" in section:
        raise ArgumentError('got a whole configuration, expected its section: pass config["sparse_attention"]')
    try:
        made = SparseAttentionConfig(**section)
    except ValidationError as error:
        raise ArgumentError(f"sparse_attention: {error}") from error
    if notice := made.notice():
        warnings.warn(notice, UserWarning, stacklevel=3)
    return made
