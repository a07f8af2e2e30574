"""The router of a layer: a linear map without bias gives logits in float32, then top-1, top-2 or top-k gating.

It adds to the pure functions of `gating`: noise in training, the router z-loss, and the bias that balances the
experts without a loss (`balancing`). Noise, random token selection and sampling of the second expert are used only in
training, so evaluation is deterministic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .errors import MoEConfigError
from .gating import (
    DropPolicy,
    Gating,
    router_z_loss,
    top1_gating,
    top2_gating,
    topk_gating,
)
from .routing import Routing

NOISE = (None, "Jitter", "RSample", "None")
_JITTER = 1e-2


class TopKGate(nn.Module):
    """Chooses experts for tokens.

    Args:
        model_dim: h, the size of a token.
        num_experts: E.
        k: experts per token.
        capacity_factor, eval_capacity_factor: factors of the capacity in training and in evaluation.
        min_capacity: the smallest capacity, in tokens.
        noisy_gate_policy: "Jitter" multiplies the gate's input by uniform numbers in 1 +- 0.01; "RSample" (k = 1) draws
            the expert from the softmax. Both act in training only. None: no noise.
        drop_tokens: drop tokens above the capacity; False: there is no capacity.
        use_rts: for k = 1: an expert over capacity keeps random tokens in training; False: it keeps the earliest.
        top2_2nd_expert_sampling: for k = 2: draw the second expert in training.
        drop_policy: for k > 2: see `topk_gating`.
        z_loss_weight: factor of the router z-loss, which is added to the balancing loss.
        bias_update_rate: above 0: balance the experts by a bias for their choice, which `update_router_bias` changes by
            this amount per step. For k = 2 the second expert is then that of the second largest gate, and is not drawn.

    Attributes:
        wg: the linear map, with a weight [E, h].
        expert_bias: float32 [E], the bias for the choice of experts; None without `bias_update_rate`.
        assigned: float32 [E], requests for each expert in training since the last update of the bias; None without
            `bias_update_rate`.

    Raises:
        MoEConfigError: a value is out of its range, or options exclude each other.
    """

    expert_bias: torch.Tensor | None
    assigned: torch.Tensor | None

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
        *,
        drop_policy: DropPolicy = "probs",
        z_loss_weight: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        _check(num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy)
        if bias_update_rate and noisy_gate_policy == "RSample":
            raise MoEConfigError("bias_update_rate: RSample draws experts, a bias chooses them; use one of the two")
        if noisy_gate_policy == "RSample" and k != 1:
            raise MoEConfigError(f"noisy_gate_policy: RSample is for k = 1, got k = {k}")
        self.k, self.num_experts, self.model_dim = k, num_experts, model_dim
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens, self.use_rts = min_capacity, drop_tokens, use_rts
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.drop_policy: DropPolicy = drop_policy
        self.z_loss_weight, self.bias_update_rate = z_loss_weight, bias_update_rate
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        balanced = bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(num_experts) if balanced else None)
        self.register_buffer("assigned", torch.zeros(num_experts) if balanced else None, persistent=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [T, h] -> logits [T, E] in float32 (float64 for float64 tokens), even under autocast."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            wide_tokens = tokens.to(wide)
            if self.training and self.noisy_gate_policy == "Jitter":
                wide_tokens = wide_tokens * torch.empty_like(wide_tokens).uniform_(1 - _JITTER, 1 + _JITTER)
            return F.linear(wide_tokens, self.wg.weight.to(wide))

    def route(
        self, logits: torch.Tensor, used_token: torch.Tensor | None = None, *, cut: bool = True
    ) -> tuple[Routing, torch.Tensor]:
        """logits [T, E] -> (routing, loss). The loss is the balancing loss plus the weighted z-loss, 0-D. `cut`: see
        `build_routing`.
        """
        gating = self._gate(logits, used_token, cut)
        loss = gating.l_aux
        if self.z_loss_weight:
            loss = loss + self.z_loss_weight * router_z_loss(logits)
        if self.assigned is not None and self.training:
            with torch.no_grad():
                self.assigned += gating.routing.requested
        return gating.routing, loss

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> tuple[Routing, torch.Tensor]:
        """Route tokens [T, h]: `route` of their `logits`."""
        return self.route(self.logits(tokens), used_token)

    def _gate(self, logits: torch.Tensor, used_token: torch.Tensor | None, cut: bool) -> Gating:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        drops, limit = self.drop_tokens, self.min_capacity
        if self.k == 1:
            return top1_gating(
                logits,
                factor,
                limit,
                used_token=used_token,
                noisy_gate_policy=self.noisy_gate_policy if self.training else None,
                drop_tokens=drops,
                use_rts=self.use_rts and self.training,
                selection_bias=self.expert_bias,
                cut=cut,
            )
        if self.k == 2 and self.expert_bias is None:
            sampling = self.top2_2nd_expert_sampling and self.training
            return top2_gating(
                logits,
                factor,
                limit,
                used_token=used_token,
                drop_tokens=drops,
                top2_2nd_expert_sampling=sampling,
                cut=cut,
            )
        return topk_gating(
            logits,
            self.k,
            factor,
            limit,
            used_token=used_token,
            drop_tokens=drops,
            drop_policy=self.drop_policy,
            selection_bias=self.expert_bias,
            cut=cut,
        )


def _check(num_experts: int, k: int, factor: float, eval_factor: float, min_capacity: int, noise: str | None) -> None:
    if num_experts < 1 or not 1 <= k <= num_experts:
        raise MoEConfigError(f"k: got {k} of {num_experts} experts, expected 1 to num_experts")
    if factor <= 0 or eval_factor <= 0 or min_capacity < 0:
        raise MoEConfigError(
            f"capacity: got the factors {factor} and {eval_factor} and a least capacity of {min_capacity}, expected "
            "factors above 0 and a capacity from 0"
        )
    if noise not in NOISE:
        raise MoEConfigError(f"noisy_gate_policy: got {noise!r}, expected None, 'Jitter' or 'RSample'")
