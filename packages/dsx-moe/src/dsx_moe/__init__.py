"""Mixture-of-experts layers and expert parallelism for any PyTorch model."""

from ._version import __version__
from .balancing import update_router_bias
from .errors import ConversionError, ExpertStateError, MoEConfigError, RoutingError
from .exchange import DirectExchange, Exchange, HierarchicalExchange, Transfer
from .experts import Experts, PackedExperts
from .gate import TopKGate
from .gating import Gating, expert_capacity, router_z_loss, top1_gating, top2_gating, topk_gating
from .gradients import average_gradients, broadcast_parameters, clip_grad_norm_
from .groups import ExpertGroups, expert_groups_of, make_exchange
from .layer import MoE, MoEOutput, has_moe_layers, name_layers
from .marks import (
    configure_moe_param_groups,
    is_moe_param,
    is_moe_param_group,
    mark_expert_parameters,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from .routing import Routing
from .segments import segment_matmul
from .stats import LayerStats

__all__ = [
    "ConversionError",
    "DirectExchange",
    "Exchange",
    "ExpertGroups",
    "ExpertStateError",
    "Experts",
    "Gating",
    "HierarchicalExchange",
    "LayerStats",
    "MoE",
    "MoEConfigError",
    "MoEOutput",
    "PackedExperts",
    "Routing",
    "RoutingError",
    "TopKGate",
    "Transfer",
    "__version__",
    "average_gradients",
    "broadcast_parameters",
    "clip_grad_norm_",
    "configure_moe_param_groups",
    "expert_capacity",
    "expert_groups_of",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "make_exchange",
    "mark_expert_parameters",
    "name_layers",
    "router_z_loss",
    "segment_matmul",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
    "top1_gating",
    "top2_gating",
    "topk_gating",
    "update_router_bias",
]
