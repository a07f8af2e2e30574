"""ZeRO stages 0-3 for any PyTorch model and optimizer.

model, optimizer = dsx_zero.shard(model, lambda params: torch.optim.AdamW(params, lr=3e-4), stage=2)
loss = model(x).mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()

Where things are (each folder has a map of its own): `api` builds, `runtime` names the parts, `optimizer` is what users
call, `update` one step, `held` this rank's values, `control` for an engine, `replanning` another layout;
`plan` who owns what, `params` flat buffers and parameters, `order` of the collectives, `grads` reduction, `gather` at
stage 3 and after a step, `step` masters and norms, `state` slices by name, `full_state` all of it whole,
`checkpoints` all of it in a folder, `torch_state` and `torch_forms` the form of torch's checkpoints, `copies` an EMA
or a reference, `access` single parameters of a sharded model. What `shard` refuses is in `checks`.
"""

from . import export as export
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
from .checkpoints import load, save
from .compiling import compile_units
from .errors import ZeroConfigError, ZeroError, ZeroLoadError, ZeroModelError, ZeroOptimizerError, ZeroStateError
from .estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from .from_hooks import gather_as
from .full_state import full_state_dict, load_full_state_dict
from .gather.external import register_external_parameter, unit_index, unregister_external_parameter
from .gathered import GatheredParameters, UnownedEditError
from .generation import gather_hooks_paused, unwrap_model_for_generation
from .grads.reduction import Reduction
from .inspection import partition_of
from .optimizer import ZeroOptimizer
from .order.agreed import ScheduleDivergence
from .params.init import Init, MiCS_Init
from .params.partitioned import PartitionedParameter, PartitionedParameterError
from .params.restored import z3_leaf_parameter
from .plan.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from .precision import Precision
from .resharding import release_model
from .state.moving import OffloadDeviceEnum, OffloadStateTypeEnum
from .state.slices import Reader
from .tiled import TiledLinear, TiledLinearReturnBias
from .uneven import uneven_forwards
from .update import StepOutcome
from .weights import load_weights

__all__ = [
    "agree",
    "compile_units",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "load",
    "load_weights",
    "save",
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
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "Precision",
    "RanksDifferError",
    "Reader",
    "Reduction",
    "StepOutcome",
    "ZeroConfigError",
    "ZeroError",
    "ZeroLoadError",
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
    "full_state_dict",
    "gather_as",
    "gather_hooks_paused",
    "load_full_state_dict",
    "partition_of",
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
