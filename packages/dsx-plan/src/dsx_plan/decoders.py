"""Decoders by their configuration alone: for a `config.json` whose model has no code on this machine.

A plan needs the layers of a model, their sizes and their order; it needs no values. Modules have the names that Hugging
Face gives them, so that stages, slices and experts of an engine are found as they are in the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .families import Shape, shape_of

__all__ = ["decoder"]


def decoder(text: Mapping[str, Any], where: str = "config.json") -> nn.Module:
    """A model of a configuration of Hugging Face's format, with random values, as `nn.Module` makes them.

    Raises:
        PlanError: see `shape_of`.
    """
    return DecoderForCausalLM(shape_of(text, where), text)


class Norm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: [B, H, S, D], [S, D] -> [B, H, S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, H, S, D] and [B, K, S, D], [B, K, S, V] -> [B, S, H x V]."""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention with grouped key heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, keys = shape.head, shape.key_heads * shape.head
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=shape.query_bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.query_bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.query_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=shape.out_bias)
        if shape.head_norms:
            self.q_norm, self.k_norm = Norm(shape.head), Norm(shape.head)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any) -> torch.Tensor:
        """[B, S, width] -> the same."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o_proj(_attend(_turned(q, cos, sin), _turned(k, cos, sin), v, mask))


class LatentAttention(nn.Module):
    """Attention whose keys and values come of a latent (MLA), as in DeepSeek-V2 and V3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, self.rope, self.value, self.latent = shape.head, shape.rope, shape.value, shape.latent
        if shape.latent_query:
            self.q_a_proj = nn.Linear(shape.width, shape.latent_query, bias=shape.out_bias)
            self.q_a_layernorm = Norm(shape.latent_query)
            self.q_b_proj = nn.Linear(shape.latent_query, shape.heads * shape.head, bias=False)
        else:
            self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.width, shape.latent + shape.rope, bias=shape.out_bias)
        self.kv_a_layernorm = Norm(shape.latent)
        self.kv_b_proj = nn.Linear(shape.latent, shape.heads * (shape.head - shape.rope + shape.value), bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.value, shape.width, bias=shape.out_bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any) -> torch.Tensor:
        """[B, S, width] -> the same."""
        found = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if hasattr(self, "q_a_proj") else self.q_proj(x)
        q = found.unflatten(-1, (-1, self.head)).transpose(1, 2)
        plain = self.head - self.rope
        latent, turning = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        wide = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, plain + self.value)).transpose(1, 2)
        k, v = wide.split((plain, self.value), -1)
        turning = _turned(turning.unsqueeze(1), cos, sin).expand(-1, k.shape[1], -1, -1)
        q = torch.cat((q[..., :plain], _turned(q[..., plain:], cos, sin)), -1)
        return self.o_proj(_attend(q, torch.cat((k, turning), -1), v, mask))


class FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PackedExperts(nn.Module):
    """Experts in one weight each way, a row for each expert: the form in which `dsx_moe` divides them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts, self.act_fn = shape.experts, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert_inner, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.width, shape.expert_inner))

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, width], int64 [T, K], [T, K] -> [T, width]."""
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // chosen.shape[-1]
        ends = torch.bincount(flat, minlength=self.num_experts).cumsum(0).to(torch.int32)
        rows = hidden_states[token]
        product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
        gate, up = product(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        out = product(self.act_fn(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        out = out * weights.reshape(-1)[order].unsqueeze(-1).to(out.dtype)
        return torch.zeros_like(hidden_states).index_add(0, token, out)


class Router(nn.Module):
    """Scores of experts for tokens, and the experts that are chosen."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen, self.sigmoid = shape.chosen, shape.sigmoid
        self.weight = nn.Parameter(torch.zeros(shape.experts, shape.width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, width] -> int64 [T, K] and [T, K]."""
        logits = F.linear(x, self.weight).float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        weights, chosen = scores.topk(self.chosen, -1)
        return chosen, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


class SparseFeedForward(nn.Module):
    """A router, its experts, and those that all tokens share."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.experts = Router(shape), PackedExperts(shape)
        if shape.shared_inner:
            self.shared_experts = FeedForward(shape.width, shape.shared_inner)
        if shape.shared_gate:
            self.shared_expert_gate = nn.Linear(shape.width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, width] -> the same."""
        tokens = x.flatten(0, 1)
        out = self.experts(tokens, *self.gate(tokens)).view_as(x)
        if not hasattr(self, "shared_experts"):
            return out
        shared = self.shared_experts(x)
        return out + (self.shared_expert_gate(x).sigmoid() * shared if hasattr(self, "shared_expert_gate") else shared)


class Block(nn.Module):
    """Attention and feed-forward with norms before them, or around them."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(shape) if shape.latent else Attention(shape)
        sparse = shape.has_experts(layer)
        self.mlp = SparseFeedForward(shape) if sparse else FeedForward(shape.width, shape.inner)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.width), Norm(shape.width)
        if shape.around:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(shape.width), Norm(shape.width)

    def forward(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any) -> torch.Tensor:
        """[B, S, width] -> the same."""
        x = hidden_states
        out = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        if not hasattr(self, "pre_feedforward_layernorm"):
            x = x + out
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Output(dict):
    """The results by name, as attributes too, as transformers' models give them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Decoder(nn.Module):
    """Embedding, blocks, norm."""

    def __init__(self, shape: Shape, config: Any) -> None:
        super().__init__()
        self.config, self.again = config, False
        self.embed_tokens = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = Norm(shape.width)
        self.turned, self.window = shape.rope or shape.head, shape.window

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Output:
        """int64 [B, S], or hidden states [B, S, width] -> `last_hidden_state`."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        place = torch.arange(x.shape[1], device=x.device)
        half = torch.exp(torch.arange(self.turned // 2, device=x.device) * (-2.0 * math.log(1e4) / self.turned))
        angle = place[:, None] * half
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = None
        if 0 < self.window < len(place):
            behind = place[:, None] - place
            mask = (behind >= 0) & (behind < self.window)
        for block in self.layers:
            if self.again and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask)
        return Output(last_hidden_state=self.norm(x))


class DecoderForCausalLM(nn.Module):
    """A decoder with an output layer and the loss of the next token."""

    base_model_prefix = "model"

    def __init__(self, shape: Shape, text: Mapping[str, Any]) -> None:
        super().__init__()
        layout = {} if shape.latent else {"model_type": "qwen3" if shape.head_norms else "llama"}  # slices by rules
        self.config = SimpleNamespace(**{**text, "use_cache": False, **layout})
        self.model = Decoder(shape, self.config)
        self.lm_head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def gradient_checkpointing_enable(self) -> None:
        """Let blocks be recomputed in backward."""
        self.model.again = True

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, labels: Any = None, **_: Any) -> Output:
        """int64 [B, S], and labels of the same shape -> `logits` [B, S, words] and `loss`."""
        logits = self.lm_head(self.model(input_ids, inputs_embeds).last_hidden_state)
        if labels is None:
            return Output(logits=logits)
        wide, following = logits.float(), F.pad(labels, (0, 1), value=-100)[..., 1:]
        return Output(loss=F.cross_entropy(wide.flatten(0, 1), following.reshape(-1)), logits=logits)
