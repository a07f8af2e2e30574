"""`SparseAttentionUtils`: lets a pretrained BERT or RoBERTa of Hugging Face read longer texts with sparse attention.

SparseAttentionUtils.extend_position_embedding(model, 4096)
SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 4096, sparsity_config)
SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 4096)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError, SparseAttentionError
from ..patterns import FixedSparsityConfig, SparsityConfig
from .bert import BertSparseSelfAttention
from .huggingface import config_of, give_own_config, use_sparse_attention

__all__ = ["SparseAttentionUtils"]


class _LayerSelfAttention(BertSparseSelfAttention):
    """Replaces the self-attention of a Hugging Face layer: it takes the same arguments and returns a pair."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *rest: Any, **options: Any) -> Any:
        """Returns (context, None), because there are no attention weights.

        Raises:
            SparseAttentionError: the call has a cache, or is cross-attention.
        """
        refused = ("encoder_hidden_states", "past_key_values", "past_key_value", "head_mask")
        given = [name for name in refused if options.get(name) is not None]
        if given or any(x is not None and x is not False for x in rest) or options.get("output_attentions"):
            what = ", ".join(given) or "output_attentions, a head mask, or a cache"
            raise SparseAttentionError(
                f"sparse self-attention got {what}; it computes encoder self-attention only and keeps no weights"
            )
        return super().forward(hidden_states, attention_mask), None


def _base(model: nn.Module) -> tuple[nn.Module, int]:
    """The encoder model inside `model`, and the number of positions in its table before that of the first token."""
    for name in ("bert", "roberta"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _base(inner)
    embeddings = getattr(model, "embeddings", None)
    if embeddings is None or not hasattr(embeddings, "position_embeddings") or not hasattr(model, "encoder"):
        raise ArgumentError(
            f"got a {type(model).__name__}, expected a Hugging Face BERT or RoBERTa model (with `.bert`, `.roberta`, "
            "or `.embeddings.position_embeddings` and `.encoder.layer` of its own)"
        )
    padding = embeddings.position_embeddings.padding_idx  # RoBERTa numbers positions from padding_idx + 1
    return model, 0 if padding is None else padding + 1


class SparseAttentionUtils:
    """Static helper functions."""

    @staticmethod
    def positions(model: nn.Module) -> int:
        """The number of positions of a BERT or RoBERTa. Raises `ArgumentError` for another kind of model."""
        base, offset = _base(model)
        embeddings: Any = base.embeddings
        return embeddings.position_embeddings.weight.shape[0] - offset

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Give the model exactly `max_position` positions by repeating its table. In place; returns the model.

        The model gets a changed copy of its configuration; the caller's stays unchanged.

        Raises:
            ArgumentError: it is another kind of model, or it has as many positions already.
        """
        base, offset = _base(model)
        embeddings: Any = base.embeddings
        old = embeddings.position_embeddings.weight
        have = old.shape[0] - offset
        if max_position <= have:
            raise ArgumentError(f"got max_position={max_position}, the model already has {have}; expected more")
        with torch.no_grad():
            learned = old[offset:]
            rows = learned.repeat(-(-max_position // have), 1)[:max_position]
            weight = torch.cat([old[:offset], rows])
        table = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx=embeddings.position_embeddings.padding_idx)
        table.weight = nn.Parameter(weight.clone(), requires_grad=old.requires_grad)
        embeddings.position_embeddings = table
        positions = torch.arange(weight.shape[0], device=weight.device).expand(1, -1)
        for name, value in (("position_ids", positions), ("token_type_ids", torch.zeros_like(positions))):
            if hasattr(embeddings, name):
                persistent = name not in embeddings._non_persistent_buffers_set
                embeddings.register_buffer(name, value, persistent=persistent)
        if config_of(model) is not None:
            give_own_config(model).max_position_embeddings = weight.shape[0]
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let the tokenizer make sequences of up to `max_position` tokens. In place; returns the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Sparse attention in every encoder layer, with the layer's own projections. In place; returns the model.

        The model gets a copy of its configuration. The original stays unchanged, and other models can be made from it.

        Args:
            model: BERT or RoBERTa, with or without a head.
            max_position: longest sequence; the model must have as many positions (`extend_position_embedding`).
            sparsity_config: default `FixedSparsityConfig(num_heads=config.num_attention_heads)`.

        Raises:
            ArgumentError: the model is of another kind, is a decoder, has too few positions, or the pattern has another
                number of heads.
        """
        base, offset = _base(model)
        config: Any = base.config
        embeddings: Any = base.embeddings
        have = embeddings.position_embeddings.weight.shape[0] - offset
        if max_position > have:
            raise ArgumentError(
                f"got max_position={max_position}, the model has {have} positions; call extend_position_embedding first"
            )
        encoder: Any = base.encoder
        SparseAttentionUtils._replace(config, encoder.layer, sparsity_config, max_position)
        use_sparse_attention(model)  # if that is not possible, masks come as [batch, 1, 1, seq], which works too
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """Sparse attention in the given layers (each with `.attention.self`). In place; returns the layers."""
        SparseAttentionUtils._replace(config, layers, sparsity_config, config.max_position_embeddings)
        return layers

    @staticmethod
    def _replace(config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig | None, longest: int) -> None:
        if getattr(config, "is_decoder", False):
            raise ArgumentError("got a decoder; sparse self-attention here is for encoders")
        sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        for layer in layers:
            old = layer.attention.self
            projections = (old.query, old.key, old.value)
            new = _LayerSelfAttention(config, sparsity_config, max_seq_length=longest, projections=projections)
            new.sparse_self_attention.to(old.query.weight.device)
            new.train(old.training)
            layer.attention.self = new

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pad_token_id: int = 0,
        model_embeddings: Any = None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad a batch to a multiple of the block: returns (pad_len, input_ids, attention_mask, token_type_ids,
        position_ids, inputs_embeds).

        All are [batch, seq], except inputs_embeds [batch, seq, hidden]. None stays None, but a padded batch always gets
        an attention mask that hides the padding. `model_embeddings` embeds the padding of `inputs_embeds`.

        Raises:
            ArgumentError: there are neither ids nor embeddings, or embeddings must be padded and `model_embeddings` is
                missing.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ArgumentError("got neither input_ids nor inputs_embeds, expected one of them")
        batch, seq = given.shape[:2]
        pad = -seq % block_size
        if pad == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            if model_embeddings is None:
                raise ArgumentError("inputs_embeds need padding: pass model_embeddings, the layer that embeds ids")
            filler = model_embeddings(given.new_full((batch, pad), pad_token_id, dtype=torch.long))
            inputs_embeds = torch.cat([inputs_embeds, filler.to(inputs_embeds.dtype)], dim=1)
        if attention_mask is None:
            attention_mask = torch.ones(batch, seq, dtype=torch.long, device=given.device)

        def longer(x: Tensor | None, value: int) -> Tensor | None:
            return None if x is None else F.pad(x, (0, pad), value=value)

        return (
            pad, longer(input_ids, pad_token_id), longer(attention_mask, 0), longer(token_type_ids, 0),
            longer(position_ids, pad_token_id), inputs_embeds,
        )  # fmt: skip

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Remove the padding from a result, [batch, seq, ...]."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len] if pad_len else sequence_output
