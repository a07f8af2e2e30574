"""ZeRO stages 0-3 for any PyTorch model and optimizer.

model, optimizer = dsx_zero.shard(model, lambda params: torch.optim.AdamW(params, lr=3e-4), stage=2)
loss = model(x).mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

from ._version import __version__
from .access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from .alike import RanksDifferError, agree, telling
from .api import shard
from .averaging import AveragesItself, averages_itself
from .compiling import compile_units
from .errors import ZeroConfigError, ZeroError, ZeroModelError, ZeroOptimizerError, ZeroStateError
from .estimate import (
    MemoryNeeds,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from .external import register_external_parameter, unit_index, unregister_external_parameter
from .gathered import GatheredParameters, UnownedEditError
from .generation import unwrap_model_for_generation
from .init import Init
from .leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from .loading import SliceLoad
from .optimizer import StepOutcome, ZeroOptimizer
from .order import ScheduleDivergence
from .partitioned import PartitionedParameter, PartitionedParameterError
from .precision import Precision
from .reduction import Reduction
from .resharding import release_model
from .slices import ParamSlice, Reader
from .tiled import TiledLinear, TiledLinearReturnBias
from .uneven import uneven_forwards

__all__ = [
    "AveragesItself",
    "agree",
    "averages_itself",
    "compile_units",
    "GatheredParameters",
    "Init",
    "PartitionedParameter",
    "PartitionedParameterError",
    "ScheduleDivergence",
    "TiledLinear",
    "TiledLinearReturnBias",
    "UnownedEditError",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "telling",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
    "MemoryNeeds",
    "ParamSlice",
    "Precision",
    "RanksDifferError",
    "Reader",
    "Reduction",
    "SliceLoad",
    "StepOutcome",
    "ZeroConfigError",
    "ZeroError",
    "ZeroModelError",
    "ZeroOptimizer",
    "ZeroOptimizerError",
    "ZeroStateError",
    "__version__",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "release_model",
    "shard",
    "uneven_forwards",
    "unit_index",
    "unwrap_model_for_generation",
]
