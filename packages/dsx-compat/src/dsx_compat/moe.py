"""Mixture of experts under DeepSpeed's names: `MoE` with DeepSpeed's module tree, and the gating functions.

DeepSpeed's names of parameters are those of its tree of modules: `deepspeed_moe.gate.wg.weight`,
`deepspeed_moe.experts.deepspeed_experts.0.weight`. Programs select experts by them, and state dicts have them. So `MoE`
here is a module with the same tree around the layer of dsx-moe.
"""

from __future__ import annotations

from typing import Any, Literal

import dsx_comm
import dsx_moe
from torch import Tensor, nn

from .errors import NotSupportedError

__all__ = ["MoE", "top1gating", "top2gating", "topkgating"]

_DENSE = ("mlp", "coefficient")  # of a residual layer; DeepSpeed has them beside `deepspeed_moe`


class _NamedExperts(nn.Module):
    """Experts under the name `deepspeed_experts`."""

    def __init__(self, experts: dsx_moe.Experts) -> None:
        super().__init__()
        self.deepspeed_experts = experts

    def forward(self, *args: Any) -> Tensor:
        return self.deepspeed_experts(*args)


class _Layer(dsx_moe.MoE):
    """The layer of dsx-moe whose experts have DeepSpeed's names."""

    def _own_experts(self, expert: Any, groups: Any, sliced: Any) -> Any:
        found = super()._own_experts(expert, groups, sliced)
        return _NamedExperts(found) if isinstance(found, dsx_moe.Experts) else found


class MoE(nn.Module):
    """`dsx_moe.MoE` with the names of modules and parameters that DeepSpeed's `MoE` has.

    The arguments are those of `dsx_moe.MoE`. State dicts have DeepSpeed's names, with the numbers that experts have in
    the whole model; those with the names of `dsx_moe.MoE` are loaded, too.

    Attributes:
        deepspeed_moe: the layer, with `gate.wg` and `experts.deepspeed_experts`.
        mlp, coefficient: with `use_residual`, the dense expert and the map that gives the weights of both parts.
    """

    def __init__(self, hidden_size: int, expert: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        layer = _Layer(hidden_size, expert, *args, **kwargs)
        self.deepspeed_moe = layer
        for name in _DENSE:
            if name in layer._modules:
                setattr(self, name, layer._modules[name])
        self._share_dense()
        self.register_load_state_dict_pre_hook(_rename_plain)

    def _share_dense(self) -> None:
        """The dense modules are registered here; the layer uses the same objects."""
        for name in _DENSE:
            if name in self._modules:
                self.deepspeed_moe._modules.pop(name, None)
                self.deepspeed_moe.__dict__[name] = self._modules[name]

    def __getattr__(self, name: str) -> Any:
        """Attributes that are not registered here are the layer's: `num_experts`, `ep_size`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_modules", {}).get("deepspeed_moe")
            if layer is None or name.startswith("__"):
                raise
            return getattr(layer, name)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> dsx_moe.layer.MoEOutput:
        """See `dsx_moe.MoE.forward`."""
        self._share_dense()  # a program may have replaced them, as adapters do
        return self.deepspeed_moe(hidden_states, used_token)


def _rename_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Give entries with the names of `dsx_moe.MoE` those of this module, before they are loaded."""
    for plain, named in (("gate.", "deepspeed_moe.gate."), ("experts.", "deepspeed_moe.experts.deepspeed_experts.")):
        start = prefix + plain
        for key in [key for key in state_dict if key.startswith(start)]:
            state_dict[prefix + named + key[len(start) :]] = state_dict.pop(key)


Gated = tuple[Tensor, Tensor, Tensor, Tensor]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gated:
    """`dsx_moe.top1_gating` in the dense form of DeepSpeed.

    Args:
        logits: [T, E] of T tokens and E experts; they are taken as float32.
        capacity_factor, min_capacity, used_token, noisy_gate_policy, drop_tokens, use_rts: see `dsx_moe.gating`.
        ep_group: without `drop_tokens`, the capacity is the largest count of these ranks (collective).
        sparse_routes: refused.
        use_tutel: has no effect.

    Returns:
        (loss 0-D, combine weights [T, E, C], dispatch mask [T, E, C], requests [E] before dropping).
    """
    found = dsx_moe.top1_gating(
        logits.float(), capacity_factor, min_capacity, used_token=used_token, noisy_gate_policy=noisy_gate_policy,
        drop_tokens=drop_tokens, use_rts=use_rts,
    )  # fmt: skip
    return _dense(found, ep_group, sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """`dsx_moe.top2_gating` in the dense form of DeepSpeed; see `top1gating`. Inside an expert tokens are in the order
    of the sequence, where DeepSpeed puts first choices before second ones.
    """
    found = dsx_moe.top2_gating(
        logits.float(), capacity_factor, min_capacity, drop_tokens=drop_tokens,
        top2_2nd_expert_sampling=top2_2nd_expert_sampling,
    )  # fmt: skip
    return _dense(found, ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: Literal["probs", "position"] = "probs",
    sparse_routes: bool = False,
) -> Gated:
    """`dsx_moe.topk_gating` in the dense form of DeepSpeed; see `top1gating`."""
    found = dsx_moe.topk_gating(
        logits.float(), k, capacity_factor, min_capacity, drop_tokens=drop_tokens, drop_policy=drop_policy
    )
    return _dense(found, ep_group, sparse_routes)


def _dense(found: dsx_moe.gating.Gating, ep_group: Any, sparse_routes: bool) -> Gated:
    if sparse_routes:
        raise NotSupportedError(
            "sparse_routes: dsx gives the dense form only; use dsx_moe.top1_gating, whose `routing` lists the routes",
            name="deepspeed.moe.sharded_moe",
        )
    routing, capacity = found.routing, found.routing.capacity
    if capacity is None:
        largest = routing.counts.max().clamp(min=1)
        if dsx_comm.is_initialized():
            dsx_comm.all_reduce(largest, op=dsx_comm.ReduceOp.MAX, group=ep_group)
        capacity = int(largest)
    combine = routing.combine_weights(capacity)
    return found.l_aux, combine, combine.detach().bool(), routing.requested
