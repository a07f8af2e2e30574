"""Top-1, top-2 and top-k gating: from router logits to a routing and a load-balancing loss. Pure functions.

With T tokens, E experts, gates g = softmax(logits) and the 0/1 mask m of the experts that a token requests:

    capacity  C = max(ceil(T / E * capacity_factor * k), min_capacity)
    loss      l = E * sum_e mean_t(g[t, e]) * mean_t(m[t, e])   (top-k: divided by k; top-2: m of the first choice)

* top-1: the expert is argmax(g), or argmax(logits + Gumbel noise). The weight is g. Random token selection keeps C
  random tokens of each expert; without it the C earliest are kept.
* top-2: the second expert is argmax(logits + Gumbel noise) over the others. An expert keeps first choices before second
  choices, up to C. The weights are g1 / (g1 + g2) and g2 / (g1 + g2), where a dropped choice counts as 0.
* top-k: the experts have the k largest gates. Each expert keeps its C largest gates ("probs") or its C earliest tokens
  ("position"). The weights are divided by their sum, where a dropped choice counts as 0.

Sources: Switch Transformer (arXiv 2101.03961, top-1 and the loss), GShard (arXiv 2006.16668, top-2), ST-MoE
(arXiv 2202.08906, z-loss), DeepSeek-V3 (arXiv 2412.19437, balancing by a bias of the selection). Of equal gates the
expert of the lowest index and the earliest token are taken. Everything is computed in the dtype of the logits.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from .errors import MoEConfigError
from .routing import Routing, build_routing, count_by_expert, keep_most_preferred

DropPolicy = Literal["probs", "position"]


class Gating(NamedTuple):
    """The result of gating: the routing, and the load-balancing loss (0-D, differentiable)."""

    routing: Routing
    l_aux: torch.Tensor


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int = 4) -> int:
    """Number of tokens that one expert takes: max(ceil(num_tokens / num_experts * capacity_factor), min_capacity)."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity)


def gumbel_noise_like(logits: torch.Tensor) -> torch.Tensor:
    """Samples of the standard Gumbel distribution, shaped like `logits`. argmax(logits + noise) samples the softmax."""
    uniform = torch.rand_like(logits).clamp_(min=torch.finfo(logits.dtype).tiny)
    return -torch.log((-torch.log(uniform)).clamp_(min=torch.finfo(logits.dtype).tiny))


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """mean_t(logsumexp(logits[t])^2) of logits [T, E], a loss that keeps logits small (0-D; 0 without tokens)."""
    return torch.logsumexp(logits, dim=1).square().sum() / max(logits.shape[0], 1)


def top1_gating(
    logits: torch.Tensor,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    *,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    selection_bias: torch.Tensor | None = None,
    cut: bool = True,
) -> Gating:
    """Route every token to one expert.

    Args:
        logits: [T, E], floating point.
        capacity_factor, min_capacity: see `expert_capacity`.
        used_token: [T]; tokens whose entry is 0 or False are not routed. None: all are routed.
        noisy_gate_policy: "RSample" draws the expert from the softmax; None takes the largest gate.
        drop_tokens: drop tokens above the capacity; False: every expert takes all tokens that request it.
        use_rts: an expert over capacity keeps random tokens; False: it keeps the earliest.
        selection_bias: [E], added to the gates for the choice of the expert, and not to the weights.
        cut: see `build_routing`.

    Raises:
        MoEConfigError: shapes do not fit.
    """
    num_tokens, num_experts = _check_logits(logits, 1)
    gates = F.softmax(logits, dim=1)
    if noisy_gate_policy == "RSample":
        scores = logits + gumbel_noise_like(logits)
    else:
        scores = gates
    if selection_bias is not None:
        scores = scores.detach() + selection_bias.to(scores.dtype)
    chosen = scores.argmax(dim=1, keepdim=True)
    wanted = _requested_mask(used_token, chosen)
    l_aux = _balance_loss(gates, chosen, wanted, num_experts)
    kept, capacity = None, None
    if drop_tokens:
        capacity = expert_capacity(num_tokens, num_experts, capacity_factor, min_capacity)
        preference = torch.rand(num_tokens, device=logits.device) if use_rts else None
        kept = keep_most_preferred(chosen.view(-1), wanted.view(-1), preference, num_experts, capacity)
    weights = gates.gather(1, chosen)
    asked = None if used_token is None else wanted  # None: the number of routes is known from the shapes
    routing = build_routing(chosen, weights, num_experts, wanted=asked, kept=kept, capacity=capacity, cut=cut)
    return Gating(routing, l_aux)


def top2_gating(
    logits: torch.Tensor,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    *,
    used_token: torch.Tensor | None = None,
    drop_tokens: bool = True,
    top2_2nd_expert_sampling: bool = True,
    cut: bool = True,
) -> Gating:
    """Route every token to two experts. Other arguments are as for `top1_gating`.

    Args:
        top2_2nd_expert_sampling: draw the second expert from the softmax over the other experts; False: take the one
            with the second largest gate.

    Raises:
        MoEConfigError: shapes do not fit, or there are fewer than 2 experts.
    """
    num_tokens, num_experts = _check_logits(logits, 2)
    gates = F.softmax(logits, dim=1)
    first = gates.argmax(dim=1, keepdim=True)
    scores = logits.detach() + gumbel_noise_like(logits) if top2_2nd_expert_sampling else logits.detach()
    second = scores.scatter(1, first, float("-inf")).argmax(dim=1, keepdim=True)
    # A row whose other logits are all -inf gives the first expert twice; any other expert has the gate 0.
    second = torch.where(second == first, (first + 1) % num_experts, second)
    chosen = torch.cat([first, second], dim=1)
    wanted = _requested_mask(used_token, chosen)
    l_aux = _balance_loss(gates, first, wanted[:, :1], num_experts)
    kept, capacity = None, None
    if drop_tokens:
        capacity = expert_capacity(num_tokens, num_experts, capacity_factor * 2, min_capacity)
        queue, requested = chosen.t().reshape(-1), wanted.t().reshape(-1)  # all first choices, then all second ones
        kept = keep_most_preferred(queue, requested, None, num_experts, capacity).view(2, num_tokens).t()
    weights = _normalised_weights(gates.gather(1, chosen), kept)
    asked = None if used_token is None else wanted  # None: the number of routes is known from the shapes
    routing = build_routing(chosen, weights, num_experts, wanted=asked, kept=kept, capacity=capacity, cut=cut)
    return Gating(routing, l_aux)


def topk_gating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    *,
    used_token: torch.Tensor | None = None,
    drop_tokens: bool = True,
    drop_policy: DropPolicy = "probs",
    selection_bias: torch.Tensor | None = None,
    cut: bool = True,
) -> Gating:
    """Route every token to the k experts of its largest gates. Other arguments are as for `top1_gating`.

    Args:
        k: experts per token, at most E.
        drop_policy: which tokens an expert over capacity keeps: those of the largest gates ("probs"), or the earliest
            ("position").

    Raises:
        MoEConfigError: shapes do not fit, k is above E, or the policy is unknown.
    """
    num_tokens, num_experts = _check_logits(logits, k)
    if drop_policy not in ("probs", "position"):
        raise MoEConfigError(f"drop_policy: got {drop_policy!r}, expected 'probs' or 'position'")
    gates = F.softmax(logits, dim=1)
    scores = gates.detach() if selection_bias is None else gates.detach() + selection_bias.to(gates.dtype)
    chosen = largest_indices(scores, k)
    wanted = _requested_mask(used_token, chosen)
    l_aux = _balance_loss(gates, chosen, wanted, num_experts) / k
    kept, capacity = None, None
    top = gates.gather(1, chosen)
    if drop_tokens:
        capacity = expert_capacity(num_tokens, num_experts, capacity_factor * k, min_capacity)
        preference = top.detach().reshape(-1) if drop_policy == "probs" else None
        kept = keep_most_preferred(chosen.view(-1), wanted.reshape(-1), preference, num_experts, capacity).view_as(
            chosen
        )
    weights = _normalised_weights(top, kept)
    asked = None if used_token is None else wanted  # None: the number of routes is known from the shapes
    routing = build_routing(chosen, weights, num_experts, wanted=asked, kept=kept, capacity=capacity, cut=cut)
    return Gating(routing, l_aux)


def largest_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k]: indices of the k largest entries of each row, largest first; of equal entries the lower index.

    `torch.topk` does not define the order of equal entries; a stable sort does.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


def _balance_loss(gates: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_experts: int) -> torch.Tensor:
    num_tokens = max(gates.shape[0], 1)
    requests = count_by_expert(chosen.reshape(-1), wanted.reshape(-1), num_experts).to(gates.dtype)
    return (gates.sum(0) / num_tokens * (requests / num_tokens)).sum() * num_experts


def _normalised_weights(top: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    masked = top if kept is None else top * kept
    return masked / masked.sum(dim=1, keepdim=True).clamp(min=torch.finfo(top.dtype).eps)


def _requested_mask(used_token: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    if used_token is None:
        return torch.ones_like(chosen, dtype=torch.bool)
    if used_token.numel() != chosen.shape[0]:
        raise MoEConfigError(
            f"used_token: got shape {tuple(used_token.shape)}, expected one entry for each of {chosen.shape[0]} tokens"
        )
    return used_token.reshape(-1, 1).to(chosen.device).bool().expand_as(chosen)


def _check_logits(logits: torch.Tensor, k: int) -> tuple[int, int]:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise MoEConfigError(
            f"logits: got {logits.dtype} of shape {tuple(logits.shape)}, expected floating point [tokens, experts]"
        )
    if not 1 <= k <= logits.shape[1]:
        raise MoEConfigError(f"k: got {k}, expected 1 to {logits.shape[1]} (the number of experts)")
    return logits.shape[0], logits.shape[1]
