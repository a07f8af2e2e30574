"""Mixture-of-experts layers and expert parallelism for any PyTorch model."""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .balancing import update_router_bias
from .errors import ConversionError, ExpertStateError, MoEConfigError, RoutingError
from .exchange import DirectExchange, Exchange, HierarchicalExchange, Transfer
from .experts import Experts, PackedExperts
from .gate import TopKGate
from .gating import Gating, expert_capacity, router_z_loss, top1_gating, top2_gating, topk_gating
from .gradients import average_gradients, broadcast_parameters, clip_grad_norm_
from .groups import ExpertGroups, check_groups, expert_groups_of, make_exchange
from .huggingface import ListedExpertBlock, PackedExpertShard, apply_expert_parallel, restore_experts
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
from .rules import RouterRule
from .segments import segment_matmul
from .state import (
    ExpertSlice,
    expert_slices,
    full_optimizer_state_dict,
    full_state_dict,
    has_expert_layers,
    load_full_optimizer_state_dict,
)
from .stats import LayerStats
from .watching import LoadHistory, layer_stats, moe_events
from .wrappers import ignore_experts_in_ddp

if TYPE_CHECKING:
    from .config import ExpertParallelConfig, apply_config

__all__ = [
    "ConversionError",
    "DirectExchange",
    "Exchange",
    "ExpertGroups",
    "ExpertParallelConfig",
    "ExpertSlice",
    "ExpertStateError",
    "Experts",
    "Gating",
    "HierarchicalExchange",
    "LayerStats",
    "ListedExpertBlock",
    "LoadHistory",
    "MoE",
    "MoEConfigError",
    "MoEOutput",
    "PackedExpertShard",
    "PackedExperts",
    "RouterRule",
    "Routing",
    "RoutingError",
    "TopKGate",
    "Transfer",
    "__version__",
    "apply_config",
    "apply_expert_parallel",
    "average_gradients",
    "broadcast_parameters",
    "check_groups",
    "clip_grad_norm_",
    "configure_moe_param_groups",
    "expert_capacity",
    "expert_groups_of",
    "expert_slices",
    "full_optimizer_state_dict",
    "full_state_dict",
    "has_expert_layers",
    "has_moe_layers",
    "ignore_experts_in_ddp",
    "is_moe_param",
    "is_moe_param_group",
    "layer_stats",
    "load_full_optimizer_state_dict",
    "make_exchange",
    "mark_expert_parameters",
    "moe_events",
    "name_layers",
    "restore_experts",
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


def __getattr__(name: str) -> Any:
    """Load `apply_config` and `ExpertParallelConfig` on first use, because they need pydantic."""
    if name in ("ExpertParallelConfig", "apply_config"):
        return getattr(importlib.import_module(f"{__name__}.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
