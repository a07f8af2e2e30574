"""Weights from and to a Hugging Face `BertLayer` (post-LN), and the config that fits it. Nothing of `transformers` is
imported: names are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HyperparameterError
from .config import TransformerConfig
from .layer import TransformerLayer

_GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}


def config_from_bert(config: Any, **options: Any) -> TransformerConfig:
    """A `TransformerConfig` with the sizes and ratios of a Hugging Face `BertConfig`; `options` are further fields.
    Raises `HyperparameterError`.
    """
    if config.hidden_act not in _GELU:
        raise HyperparameterError(f"hidden_act: got {config.hidden_act!r}, expected one of {', '.join(_GELU)}")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise HyperparameterError("is_decoder, add_cross_attention: got True, expected an encoder")
    known = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "attn_dropout_ratio": config.attention_probs_dropout_prob,
        "hidden_dropout_ratio": config.hidden_dropout_prob,
        "num_hidden_layers": config.num_hidden_layers,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "pre_layer_norm": False,
        "gelu_approximate": _GELU[config.hidden_act],
    }
    return TransformerConfig(**{**known, **options})


def _pairs(layer: TransformerLayer, bert: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """(ours, theirs) for every weight and bias; ours may be a view."""
    b: Any = bert
    attention = (b.attention.self.query, b.attention.self.key, b.attention.self.value)
    for part, module in zip(layer.attn_qkvw.chunk(3), attention):
        yield part, module.weight
    for part, module in zip(layer.attn_qkvb.chunk(3), attention):
        yield part, module.bias
    modules = (
        b.attention.output.dense,
        b.attention.output.LayerNorm,
        b.intermediate.dense,
        b.output.dense,
        b.output.LayerNorm,
    )
    names = (
        ("attn_ow", "attn_ob"),
        ("attn_nw", "attn_nb"),
        ("inter_w", "inter_b"),
        ("output_w", "output_b"),
        ("norm_w", "norm_b"),
    )
    for module, (weight, bias) in zip(modules, names):
        yield getattr(layer, weight), module.weight
        yield getattr(layer, bias), module.bias


@torch.no_grad()
def copy_from_bert(layer: TransformerLayer, bert: nn.Module) -> TransformerLayer:
    """Give `layer` (post-LN) the weights of a Hugging Face `BertLayer`; returns it. Raises `HyperparameterError` for a
    pre-LN layer.
    """
    _check_order(layer)
    for ours, theirs in _pairs(layer, bert):
        ours.copy_(theirs)
    return layer


@torch.no_grad()
def copy_to_bert(layer: TransformerLayer, bert: nn.Module) -> nn.Module:
    """The other way round."""
    _check_order(layer)
    for ours, theirs in _pairs(layer, bert):
        theirs.copy_(ours)
    return bert


def _check_order(layer: TransformerLayer) -> None:
    if layer.config.pre_layer_norm:
        raise HyperparameterError("pre_layer_norm: got True, expected False: a BertLayer normalises after the residual")
