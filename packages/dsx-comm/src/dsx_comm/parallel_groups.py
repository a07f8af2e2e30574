"""The process groups of hybrid parallelism (data, model, experts) by name, for code that has no `GroupRegistry`.

    parallel_groups.use(GroupRegistry(ProcessTopology(("data", "sequence"), (4, 2))))
    get_data_parallel_group(), get_sequence_parallel_rank(), get_sequence_data_parallel_world_size()

The names are those of `deepspeed.utils.groups` without the underscore that most of them begin with there
(`dsx.utils.groups` has both). They give the groups of one `ParallelGroups` per process, the `current` one: see
`groups_in_use`.

Ranks and sizes are arithmetic. A group is made the first time it is asked for: all ranks of the world ask for the same
groups, in the same order. An axis that the topology does not have has one rank. Left out: device meshes
(`GroupRegistry.device_mesh`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .errors import TopologyError
from .groups import get_rank, get_world_group, get_world_size
from .groups_in_use import ParallelGroups as ParallelGroups  # `as`: these are names of this module too
from .groups_in_use import current as current
from .groups_in_use import forget as forget
from .groups_in_use import given as given
from .groups_in_use import groups_of as groups_of
from .groups_in_use import hold as hold
from .groups_in_use import is_in_use as is_in_use
from .groups_in_use import speaking_of as speaking_of
from .groups_in_use import use as use
from .registry import AxisGroup

# - data, model, sequence


def get_data_parallel_group() -> Any:
    """The group over which gradients of one model are averaged (with sequence parallelism: without the sequence
    axis).
    """
    return current().axis("data").group


def get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return current().rank("data")


def get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    return current().size("data")


def get_model_parallel_group() -> Any:
    """The group of the ranks that share one copy of the model: those that hold slices of the same tensors. Of a
    pipeline's or Megatron's mpu, which counts the stages too, that group.
    """
    return current().axis("model").group


def get_model_parallel_rank() -> int:
    """This rank's place in the model-parallel group."""
    return current().rank("model")


def get_model_parallel_world_size() -> int:
    """Number of model-parallel ranks."""
    return current().size("model")


def get_tensor_model_parallel_group() -> Any:
    """The group of the ranks that hold slices of the same tensors."""
    return current().axis("tensor").group


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among the ranks that hold slices of the same tensors."""
    return current().rank("tensor")


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that hold slices of the same tensors."""
    return current().size("tensor")


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of the ranks that hold slices of the same tensors."""
    return current().axis("tensor").ranks[0]


def get_sequence_parallel_group() -> Any:
    """The group of the ranks that hold parts of the same sequences."""
    return current().axis("sequence").group


def get_sequence_parallel_rank() -> int:
    """This rank's place in the sequence-parallel group."""
    return current().rank("sequence")


def get_sequence_parallel_world_size() -> int:
    """Number of sequence-parallel ranks."""
    return current().size("sequence")


def get_sequence_data_parallel_group() -> Any:
    """The group of data and sequence axes together: over it gradients are averaged and ZeRO shards."""
    return current().axis("sequence_data").group


def get_sequence_data_parallel_rank() -> int:
    """This rank's place in the sequence-data-parallel group."""
    return current().rank("sequence_data")


def get_sequence_data_parallel_world_size() -> int:
    """Number of data-parallel times sequence-parallel ranks."""
    return current().size("sequence_data")


def get_broadcast_src_rank() -> int:
    """The global rank whose parameters all ranks of this rank's sequence-data-parallel group take."""
    return current().axis("sequence_data").ranks[0]


# - experts


def _with_experts(name: str | None = None) -> ParallelGroups:
    """The current groups, or those given to `use` if the current ones lack experts (of this name)."""
    there = current().expert_names()
    return current() if name in there or (name is None and there) else given()


def create_expert_and_data_parallel(expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False) -> None:
    """Make the groups of experts over `expert_parallel_size_` ranks, named "ep_size_{n}" (collective; a second call
    does nothing).
    """
    given().create_experts(expert_parallel_size_, data_before_expert=use_data_before_expert_parallel_)


def create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """As `create_expert_and_data_parallel` beside model parallelism, whose groups `mpu` knows and which are used from
    now on. Experts are slices over its tensor-parallel ranks.
    """
    use(mpu).slices_experts = True
    create_expert_and_data_parallel(expert_parallel_size_, use_data_before_expert_parallel_)


def get_expert_parallel_group(group_name: str) -> Any:
    """The group of the ranks that share the experts out, by name ("ep_size_4")."""
    return _with_experts(group_name).expert(group_name).group


def get_expert_parallel_rank(group_name: str) -> int:
    """This rank's place in an expert-parallel group."""
    return _with_experts(group_name).expert(group_name).rank


def get_expert_parallel_world_size(group_name: str) -> int:
    """Number of ranks in an expert-parallel group."""
    return _with_experts(group_name).expert(group_name).size


def get_expert_parallel_src_rank(group_name: str) -> int:
    """The global rank of the first member of an expert-parallel group."""
    return _with_experts(group_name).expert(group_name).ranks[0]


def get_expert_parallel_group_dict() -> dict[str, Any]:
    """This rank's expert-parallel groups by name."""
    groups = _with_experts()
    return {name: groups.expert(name).group for name in groups.expert_names()}


def get_expert_data_parallel_group(group_name: str) -> Any:
    """The group of the ranks that hold the same experts, by the name of the expert-parallel group."""
    return _with_experts(group_name).expert_data(group_name).group


def get_expert_data_parallel_rank(group_name: str) -> int:
    """This rank's place in an expert-data-parallel group."""
    return _with_experts(group_name).expert_data(group_name).rank


def get_expert_data_parallel_world_size(group_name: str) -> int:
    """Number of ranks that hold the same experts."""
    return _with_experts(group_name).expert_data(group_name).size


def get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """This rank's expert-data-parallel groups by name."""
    groups = _with_experts()
    return {name: groups.expert_data(name).group for name in groups.expert_names()}


def get_expert_broadcast_src_rank(group_name: str) -> int:
    """The global rank whose experts all ranks of this rank's expert-data-parallel group take."""
    return _with_experts(group_name).expert_data(group_name).ranks[0]


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that hold slices of one expert: the tensor-parallel ranks if experts are sliced
    (`create_expert_data_and_model_parallel`, or a layer with `enable_expert_tensor_parallelism`), else 1.
    """
    groups = _with_experts()
    return groups.size("tensor") if groups.slices_experts else 1


def get_max_expert_size() -> int:
    """The largest number of ranks that experts are spread over.

    Raises:
        TopologyError: there are no expert groups yet.
    """
    name = get_max_expert_size_name()
    return _with_experts(name).expert(name).size


def get_max_expert_size_name() -> str:
    """The name of the largest expert-parallel group. Raises `TopologyError` without one."""
    names = _with_experts().expert_names()
    if not names:
        raise TopologyError("there are no expert groups yet: create_expert_and_data_parallel makes them")
    return names[-1]


def get_max_expert_parallel_group() -> Any:
    """The largest expert-parallel group. Raises `TopologyError` without one."""
    return get_expert_parallel_group(get_max_expert_size_name())


# - nodes, secondary shards, all ranks


def get_local_all_to_all_group(devices: int | None = None) -> dict[str, Any]:
    """Groups for an all-to-all in two hops: "local_i" is node i, "global_j" device j of every node (see
    `GroupRegistry`).

    Args:
        devices: ranks per node; None: LOCAL_WORLD_SIZE, which launchers set, else all ranks.
    """
    if devices is None:
        found = os.environ.get("LOCAL_WORLD_SIZE", "")
        devices = int(found) if found.isdigit() and int(found) else get_world_size()
    return current().registry.local_all_to_all(devices)


def create_zero_param_parallel_group(group_size: int) -> None:
    """Make blocks of `group_size` consecutive ranks, which hold secondary shards of parameters (hpZ; collective)."""
    current().create_blocks(group_size)


def zero_param_parallel_is_initialized() -> bool:
    """Whether `create_zero_param_parallel_group` was called."""
    return current().blocks is not None


def get_zero_param_intra_parallel_group() -> Any:
    """This rank's block; None before `create_zero_param_parallel_group`."""
    return _of_block(lambda block: block.group, None)


def get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """This rank's place in its block; 0 without blocks."""
    return _of_block(lambda block: block.rank, 0)


def get_zero_param_intra_parallel_group_world_size() -> int:
    """Number of ranks in a block; 1 without blocks."""
    return _of_block(lambda block: block.size, 1)


def get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """The global ranks of this rank's block; this rank alone without blocks."""
    return _of_block(lambda block: list(block.ranks), [get_rank()])


def _of_block(of: Callable[[AxisGroup], Any], otherwise: Any) -> Any:
    block = current().blocks
    return otherwise if block is None else of(block)


def clone_world_group() -> Any:
    """The group of all ranks. DeepSpeed copies it; here it is the default group itself."""
    return get_world_group()
