"""The parts of a decoder, read from a `config.json` of Hugging Face's format.

The decoders of the usual families differ in a few things that their configurations say: grouped heads or a latent
(MLA), norms of heads, norms behind blocks, biases, and experts with a router, with shared ones beside them and dense
blocks before. `decoders.py` makes a model of them.

Left out: state-space and linear attention, encoders, and what images or sound need. They are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import PlanError

__all__ = ["Shape", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """The parts of a decoder.

    Attributes:
        width, layers, words: hidden size, blocks, vocabulary.
        heads, key_heads, head: query heads, key heads, size of a head.
        inner: of a dense block.
        experts, chosen, expert_inner, shared_inner: experts, those of a token, sizes; 0 experts: dense.
        dense_first: dense blocks before those with experts.
        every: of so many blocks one has experts.
        dense_layers: blocks without experts, by number.
        latent: of keys and values (MLA), 0 without; `latent_query`, `rope`, `value`: its other sizes.
        query_bias, out_bias: of attention's projections.
        head_norms: queries and keys have norms of their own.
        around: norms behind attention and feed-forward, too (Gemma 2 and 3).
        shared_gate: a gate weighs the shared experts (Qwen2-MoE).
        sigmoid: scores of the router; otherwise softmax.
        tied: the output layer has the embedding's weight.
        window: tokens that a sliding layer sees; 0: all.
    """

    width: int
    layers: int
    words: int
    heads: int
    key_heads: int
    head: int
    inner: int
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_first: int = 0
    every: int = 1
    dense_layers: frozenset[int] = frozenset()
    latent: int = 0
    latent_query: int = 0
    rope: int = 0
    value: int = 0
    query_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    around: bool = False
    shared_gate: bool = False
    sigmoid: bool = False
    tied: bool = False
    window: int = 0

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts."""
        if layer < self.dense_first or layer in self.dense_layers:
            return False
        return bool(self.experts) and (layer + 1) % self.every == 0


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_STRANGE = ("ssm_cfg", "mamba_d_state", "mamba_num_heads", "state_size", "linear_num_value_heads", "is_encoder_decoder",
            "linear_attn_config", "layers_block_type")  # fmt: skip
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_QUERY_BIAS = ("qwen2", "qwen2_moe")
_AROUND = ("gemma2", "gemma3", "gemma3_text")


def shape_of(text: Mapping[str, Any], where: str = "config.json") -> Shape:
    """The parts of a decoder, of a configuration of Hugging Face's format.

    Raises:
        PlanError: it does not say what is needed, or its model is none of these decoders.
    """
    kind = str(text.get("model_type"))
    strange = [key for key in _STRANGE if text.get(key)]
    strange += sorted({t for t in text.get("layer_types") or () if t not in ("full_attention", "sliding_attention")})
    missing = [key for key in _NEEDED if not isinstance(text.get(key), int)]
    if strange or missing:
        found = f"it has {', '.join(strange)}" if strange else f"it does not say {', '.join(missing)}"
        raise PlanError(
            f"model: the code of model_type {kind!r} is not here, and {where} is not that of a decoder which the"
            f" planner makes by its configuration: {found}; give file.py:function that makes the model"
        )
    heads, width = text["num_attention_heads"], text["hidden_size"]
    latent = int(text.get("kv_lora_rank") or 0)
    rope, plain = int(text.get("qk_rope_head_dim") or 0), int(text.get("qk_nope_head_dim") or 0)
    return Shape(
        width=width,
        layers=text["num_hidden_layers"],
        words=text["vocab_size"],
        heads=heads,
        key_heads=heads if latent else int(text.get("num_key_value_heads") or heads),
        head=rope + plain if latent else int(text.get("head_dim") or width // heads),
        inner=int(text.get("intermediate_size") or 4 * width),
        latent=latent,
        latent_query=int(text.get("q_lora_rank") or 0),
        rope=rope,
        value=int(text.get("v_head_dim") or plain) if latent else 0,
        query_bias=bool(text.get("attention_bias") or text.get("qkv_bias", kind in _QUERY_BIAS)) and not latent,
        out_bias=bool(text.get("attention_bias")) and kind not in ("glm4_moe",),
        head_norms=bool(text.get("use_qk_norm") or kind in _HEAD_NORMS),
        around=kind in _AROUND,
        tied=bool(text.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        window=_window(text),
        **_experts(text),
    )


def _window(text: Mapping[str, Any]) -> int:
    """The tokens that sliding layers see, where all layers slide."""
    sliding = text.get("layer_types")
    on = all(t == "sliding_attention" for t in sliding) if sliding else text.get("use_sliding_window", True)
    return int(text.get("sliding_window") or 0) if on else 0


def _experts(text: Mapping[str, Any]) -> dict[str, Any]:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next((int(text[name]) for name in names if text.get(name)), 0)
    if count < 2:
        return {}
    inner = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    shared = int(text.get("shared_expert_intermediate_size") or inner * int(text.get("n_shared_experts") or 0))
    return {
        "experts": count,
        "chosen": int(text.get("num_experts_per_tok") or text.get("moe_topk") or 2),
        "expert_inner": inner,
        "shared_inner": shared,
        "dense_first": int(text.get("first_k_dense_replace") or 0),
        "every": max(1, int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1)),
        "dense_layers": frozenset(text.get("mlp_only_layers") or ()),
        "shared_gate": "shared_expert_intermediate_size" in text,
        "sigmoid": text.get("scoring_func") == "sigmoid" or text.get("model_type") in ("deepseek_v3", "glm4_moe"),
    }
