"""Common code for all Hugging Face models: a private copy of the configuration, and registered attention and masks.

`transformers` has a registry for functions that compute attention and for functions that make masks; the model's
configuration holds the name under which they are looked up. `use_sparse_attention` registers our functions and writes
their name into a copy of the configuration that only this model has. The caller's configuration stays unchanged, so
other models can be made from it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..errors import ArgumentError, SparseAttentionError
from .self_attention import SparseSelfAttention

__all__ = ["NAME", "check_causal_model", "config_of", "give_own_config", "use_sparse_attention"]

NAME = "dsx_sparse"  # the name of the attention implementation in transformers
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")  # arguments of some models that change their attention


def config_of(model: nn.Module) -> Any:
    """The configuration of a model, or of the outermost module inside it that has one; None if there is none."""
    return next((module.config for module in model.modules() if hasattr(module, "config")), None)


def give_own_config(model: nn.Module) -> Any:
    """Replace the configuration in all modules of a model by one copy, and return it."""
    memo: dict[int, Any] = {}
    old = config_of(model)
    own = copy.deepcopy(old, memo)
    kinds = tuple({type(config) for config in (old, *_parts_of(old))})
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, kinds) and id(value) in memo:
                setattr(module, name, memo[id(value)])
    return own


def _parts_of(config: Any) -> list[Any]:
    """Configurations inside a configuration, such as that of a model's decoder."""
    return [value for value in vars(config).values() if hasattr(value, "model_type")]


def use_sparse_attention(model: nn.Module) -> bool:
    """Have transformers call our attention and mask functions for this model.

    Returns:
        False if this version of transformers has no registries; then nothing was changed.
    """
    try:
        masking = importlib.import_module("transformers.masking_utils")
        attention = importlib.import_module("transformers.modeling_utils").AttentionInterface
    except (ImportError, AttributeError):  # the model is not from transformers, or from a version without registries
        return False
    if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
        return False
    masking.AttentionMaskInterface.register(NAME, _mask_function(masking))
    attention.register(NAME, _attention)
    give_own_config(model)._attn_implementation = NAME
    return True


def _mask_function(masking: Any) -> Any:
    """The function that makes masks, for `transformers.masking_utils` as given (an import cannot be traced)."""

    def mask(
        *,
        q_length: int,
        kv_length: int,
        mask_function: Any,
        attention_mask: Tensor | None = None,
        q_offset: Any = 0,
        kv_offset: int = 0,
        **options: Any,
    ) -> Tensor | None:
        """A mask of the keys, bool [batch, keys], if the model masks nothing else; otherwise a mask of queries by keys,
        bool [batch, 1, queries, keys]. Plain causality is left to the attention module.
        """
        plain = mask_function in (masking.causal_mask_function, masking.bidirectional_mask_function)
        if plain and q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0:
            return None if attention_mask is None else attention_mask.bool()
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking.sdpa_mask(
            q_length=q_length, kv_length=kv_length, mask_function=mask_function, attention_mask=attention_mask,
            q_offset=q_offset, kv_offset=kv_offset, **options,
        )  # fmt: skip

    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it: takes [batch, heads, seq, dim], returns
    ([batch, seq, heads, dim], None).

    Raises:
        SparseAttentionError: the layer has no pattern, or it asks for something that sparse attention does not compute.
    """
    sparse = getattr(module, "sparse_self_attention", None)
    if not isinstance(sparse, SparseSelfAttention):
        raise SparseAttentionError(
            f'{type(module).__name__} runs under attn_implementation="{NAME}" and has no pattern; '
            "give the model one with dsx_sparse_attn.apply_sparse_attention"
        )
    given = [name for name in _UNKNOWN if options.get(name) is not None]
    given += ["output_attentions"] if options.get("output_attentions") else []
    if given:
        raise SparseAttentionError(
            f"sparse attention got {', '.join(given)} from {type(module).__name__}, which it lacks"
        )
    if query.shape[2] != key.shape[2]:
        raise SparseAttentionError(
            f"sparse attention got {query.shape[2]} queries and {key.shape[2]} keys, expected as many: it computes "
            "whole sequences and does not decode with a cache; call the model with use_cache=False"
        )
    out = sparse.attend(query, key, value, attention_mask, scale=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def check_causal_model(model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention modules of a causal Hugging Face model, by name.

    The rule: the model leaves attention to transformers' registry (`_supports_attention_backend`), and each of its
    attention modules has `is_causal = True`, as in GPT-2, Llama, Mistral, Qwen and others.

    Raises:
        ArgumentError: the model does not follow the rule; the text says where.
    """
    name = type(model).__name__
    if not hasattr(model, "config") or not getattr(model, "_supports_attention_backend", False):
        raise ArgumentError(
            f"{name} is no Hugging Face model that leaves attention to transformers' AttentionInterface"
        )
    layers = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "is_causal", None), bool)}
    other = [n for n, m in layers.items() if not m.is_causal or getattr(m, "is_cross_attention", False)]
    if not layers:
        raise ArgumentError(f"{name} has no attention module that says whether it is causal (`is_causal`)")
    if other or getattr(model.config, "is_causal", True) is False:
        where = ", ".join(other[:3]) or "config.is_causal=False"
        raise ArgumentError(f"{name} has attention that is not causal self-attention: {where}")
    return layers
