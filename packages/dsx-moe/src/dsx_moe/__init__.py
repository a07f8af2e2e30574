"""Mixture-of-experts layers and expert parallelism for any PyTorch model."""

from ._version import __version__
from .balancing import update_router_bias
from .errors import MoEConfigError, RoutingError
from .exchange import Exchange
from .experts import Experts, PackedExperts
from .gate import TopKGate
from .gating import Gating, expert_capacity, top1_gating, top2_gating, topk_gating
from .gradients import average_gradients, broadcast_parameters, clip_grad_norm_
from .groups import make_exchange
from .huggingface import apply_expert_parallel, restore_experts
from .layer import MoE, MoEOutput, has_moe_layers, name_layers
from .marks import (
    configure_moe_param_groups,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from .routing import Routing
from .rules import RouterRule
from .state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict
from .watching import LoadHistory, layer_stats, moe_events
from .wrappers import ignore_experts_in_ddp

__all__ = [
    "Exchange",
    "Experts",
    "Gating",
    "LoadHistory",
    "MoE",
    "MoEConfigError",
    "MoEOutput",
    "PackedExperts",
    "RouterRule",
    "Routing",
    "RoutingError",
    "TopKGate",
    "__version__",
    "apply_expert_parallel",
    "average_gradients",
    "broadcast_parameters",
    "clip_grad_norm_",
    "configure_moe_param_groups",
    "expert_capacity",
    "full_optimizer_state_dict",
    "full_state_dict",
    "has_moe_layers",
    "ignore_experts_in_ddp",
    "is_moe_param",
    "is_moe_param_group",
    "layer_stats",
    "load_full_optimizer_state_dict",
    "make_exchange",
    "moe_events",
    "name_layers",
    "restore_experts",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
    "top1_gating",
    "top2_gating",
    "topk_gating",
    "update_router_bias",
]
