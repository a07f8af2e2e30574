"""Process groups under the names of `deepspeed.utils.groups`: the functions of `dsx_comm.parallel_groups`, with and
without the underscore.

This module defines no functions; its names are the same function objects as in dsx_comm.
"""

from dsx_comm.parallel_groups import (
    ParallelGroups,
    clone_world_group,
    create_expert_and_data_parallel,
    create_expert_data_and_model_parallel,
    create_zero_param_parallel_group,
    current,
    get_broadcast_src_rank,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_expert_broadcast_src_rank,
    get_expert_data_parallel_group,
    get_expert_data_parallel_group_dict,
    get_expert_data_parallel_rank,
    get_expert_data_parallel_world_size,
    get_expert_model_parallel_world_size,
    get_expert_parallel_group,
    get_expert_parallel_group_dict,
    get_expert_parallel_rank,
    get_expert_parallel_src_rank,
    get_expert_parallel_world_size,
    get_local_all_to_all_group,
    get_max_expert_parallel_group,
    get_max_expert_size,
    get_max_expert_size_name,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_world_size,
    get_sequence_data_parallel_group,
    get_sequence_data_parallel_rank,
    get_sequence_data_parallel_world_size,
    get_sequence_parallel_group,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    get_zero_param_intra_parallel_group,
    get_zero_param_intra_parallel_group_ranks,
    get_zero_param_intra_parallel_group_world_size,
    get_zero_param_intra_parallel_rank_in_mygroup,
    use,
    zero_param_parallel_is_initialized,
)

_clone_world_group = clone_world_group
_create_expert_and_data_parallel = create_expert_and_data_parallel
_create_expert_data_and_model_parallel = create_expert_data_and_model_parallel
_create_zero_param_parallel_group = create_zero_param_parallel_group
_get_broadcast_src_rank = get_broadcast_src_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_expert_broadcast_src_rank = get_expert_broadcast_src_rank
_get_expert_data_parallel_group = get_expert_data_parallel_group
_get_expert_data_parallel_group_dict = get_expert_data_parallel_group_dict
_get_expert_data_parallel_rank = get_expert_data_parallel_rank
_get_expert_data_parallel_world_size = get_expert_data_parallel_world_size
_get_expert_model_parallel_world_size = get_expert_model_parallel_world_size
_get_expert_parallel_group = get_expert_parallel_group
_get_expert_parallel_group_dict = get_expert_parallel_group_dict
_get_expert_parallel_rank = get_expert_parallel_rank
_get_expert_parallel_src_rank = get_expert_parallel_src_rank
_get_expert_parallel_world_size = get_expert_parallel_world_size
_get_local_all_to_all_group = get_local_all_to_all_group
_get_max_expert_parallel_group = get_max_expert_parallel_group
_get_max_expert_size = get_max_expert_size
_get_max_expert_size_name = get_max_expert_size_name
_get_model_parallel_group = get_model_parallel_group
_get_model_parallel_rank = get_model_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_data_parallel_group = get_sequence_data_parallel_group
_get_sequence_data_parallel_rank = get_sequence_data_parallel_rank
_get_sequence_data_parallel_world_size = get_sequence_data_parallel_world_size
_get_sequence_parallel_group = get_sequence_parallel_group
_get_sequence_parallel_rank = get_sequence_parallel_rank
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_tensor_model_parallel_group = get_tensor_model_parallel_group
_get_tensor_model_parallel_rank = get_tensor_model_parallel_rank
_get_tensor_model_parallel_src_rank = get_tensor_model_parallel_src_rank
_get_tensor_model_parallel_world_size = get_tensor_model_parallel_world_size
_get_zero_param_intra_parallel_group = get_zero_param_intra_parallel_group
_get_zero_param_intra_parallel_group_ranks = get_zero_param_intra_parallel_group_ranks
_get_zero_param_intra_parallel_group_world_size = get_zero_param_intra_parallel_group_world_size
_get_zero_param_intra_parallel_rank_in_mygroup = get_zero_param_intra_parallel_rank_in_mygroup
_zero_param_parallel_is_initialized = zero_param_parallel_is_initialized

__all__ = [
    "ParallelGroups",
    "clone_world_group",
    "create_expert_and_data_parallel",
    "create_expert_data_and_model_parallel",
    "create_zero_param_parallel_group",
    "current",
    "get_broadcast_src_rank",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_expert_broadcast_src_rank",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_dict",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_world_size",
    "get_expert_parallel_group",
    "get_expert_parallel_group_dict",
    "get_expert_parallel_rank",
    "get_expert_parallel_src_rank",
    "get_expert_parallel_world_size",
    "get_local_all_to_all_group",
    "get_max_expert_parallel_group",
    "get_max_expert_size",
    "get_max_expert_size_name",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_zero_param_intra_parallel_group",
    "get_zero_param_intra_parallel_group_ranks",
    "get_zero_param_intra_parallel_group_world_size",
    "get_zero_param_intra_parallel_rank_in_mygroup",
    "use",
    "zero_param_parallel_is_initialized",
]
