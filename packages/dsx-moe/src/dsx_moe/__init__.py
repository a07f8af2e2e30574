"""Mixture-of-experts layers and expert parallelism for any PyTorch model."""

from ._version import __version__
from .balancing import update_router_bias
from .experts import Experts, PackedExperts
from .gating import top1_gating, top2_gating, topk_gating
from .gradients import average_gradients, broadcast_parameters, clip_grad_norm_
from .huggingface import apply_expert_parallel, restore_experts
from .layer import MoE, has_moe_layers, name_layers
from .marks import (
    is_moe_param,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from .state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict
from .watching import moe_events
from .wrappers import ignore_experts_in_ddp

__all__ = [
    "Experts",
    "MoE",
    "PackedExperts",
    "__version__",
    "apply_expert_parallel",
    "average_gradients",
    "broadcast_parameters",
    "clip_grad_norm_",
    "full_optimizer_state_dict",
    "full_state_dict",
    "has_moe_layers",
    "ignore_experts_in_ddp",
    "is_moe_param",
    "load_full_optimizer_state_dict",
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
