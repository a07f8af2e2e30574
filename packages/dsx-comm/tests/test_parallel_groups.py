"""The process groups of hybrid parallelism by name: layouts, sizes without groups, experts, an mpu, and what a group
really connects.
"""

import dsx_comm
import pytest
import torch
from dsx_comm import GroupRegistry, Mpu, ProcessTopology
from dsx_comm import parallel_groups as groups
from dsx_comm.errors import TopologyError
from dsx_testkit import run_ranks


def members(group):
    """The ranks that really add up in a group."""
    ones = torch.zeros(dsx_comm.get_world_size())
    ones[dsx_comm.get_rank()] = 1
    dsx_comm.all_reduce(ones, group=group)
    return ones.nonzero().view(-1).tolist()


def plain(rank, world):
    assert groups.get_data_parallel_world_size() == world and groups.get_data_parallel_rank() == rank
    assert groups.get_model_parallel_world_size() == groups.get_sequence_parallel_world_size() == 1
    assert groups.get_model_parallel_rank() == groups.get_sequence_parallel_rank() == 0
    assert groups.get_sequence_data_parallel_world_size() == world and groups.get_sequence_data_parallel_rank() == rank
    assert groups.get_data_parallel_group() is groups.clone_world_group() is dsx_comm.get_world_group()
    assert members(groups.get_sequence_parallel_group()) == [rank]
    assert groups.get_broadcast_src_rank() == 0 and groups.get_tensor_model_parallel_src_rank() == rank
    assert not groups.zero_param_parallel_is_initialized() and groups.get_zero_param_intra_parallel_group() is None
    assert groups.get_zero_param_intra_parallel_group_ranks() == [rank]
    with pytest.raises(TopologyError, match="no expert groups yet"):
        groups.get_max_expert_size()
    with pytest.raises(
        TopologyError, match="got the expert group 'ep_size_2', expected one of those made so far: none"
    ):
        groups.get_expert_parallel_group("ep_size_2")


def test_without_a_word_all_ranks_are_data_parallel():
    run_ranks(plain, 2)


def sequences(rank, world):
    """World 4 as 2 data x 2 sequence: ranks (0, 1) share sequences, (0, 2) do not."""
    groups.use(GroupRegistry(ProcessTopology(("data", "sequence"), (2, 2))))
    assert (groups.get_data_parallel_rank(), groups.get_sequence_parallel_rank()) == divmod(rank, 2)
    assert groups.get_data_parallel_world_size() == groups.get_sequence_parallel_world_size() == 2
    assert groups.get_sequence_data_parallel_world_size() == 4 and groups.get_sequence_data_parallel_rank() == rank
    assert members(groups.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert members(groups.get_sequence_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(groups.get_sequence_data_parallel_group()) == [0, 1, 2, 3]
    assert groups.get_broadcast_src_rank() == 0


def test_the_sequence_and_sequence_data_parallel_pair():
    run_ranks(sequences, 4)


def experts(rank, world):
    groups.create_expert_and_data_parallel(2)
    groups.create_expert_and_data_parallel(2)  # nothing more
    groups.create_expert_and_data_parallel(4)
    assert members(groups.get_expert_parallel_group("ep_size_2")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(groups.get_expert_data_parallel_group("ep_size_2")) == [rank % 2, rank % 2 + 2]
    assert groups.get_expert_parallel_rank("ep_size_2") == rank % 2
    assert groups.get_expert_data_parallel_rank("ep_size_2") == rank // 2
    assert (
        groups.get_expert_parallel_world_size("ep_size_2")
        == groups.get_expert_data_parallel_world_size("ep_size_2")
        == 2
    )
    assert groups.get_expert_parallel_src_rank("ep_size_2") == rank // 2 * 2
    assert groups.get_expert_broadcast_src_rank("ep_size_2") == rank % 2
    assert (
        list(groups.get_expert_parallel_group_dict())
        == list(groups.get_expert_data_parallel_group_dict())
        == ["ep_size_2", "ep_size_4"]
    )
    assert groups.get_max_expert_size() == 4 and groups.get_max_expert_size_name() == "ep_size_4"
    assert members(groups.get_max_expert_parallel_group()) == [0, 1, 2, 3]
    groups.use()
    groups.create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    assert members(groups.get_expert_parallel_group("ep_size_2")) == [rank % 2, rank % 2 + 2]
    groups.create_zero_param_parallel_group(2)
    assert groups.zero_param_parallel_is_initialized() and groups.get_zero_param_intra_parallel_group_world_size() == 2
    assert groups.get_zero_param_intra_parallel_rank_in_mygroup() == rank % 2
    assert members(groups.get_zero_param_intra_parallel_group()) == groups.get_zero_param_intra_parallel_group_ranks()
    found = groups.get_local_all_to_all_group(2)
    assert sorted(found) == ["global_0", "global_1", "local_0", "local_1"]
    assert members(found[f"local_{rank // 2}"]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(found[f"global_{rank % 2}"]) == [rank % 2, rank % 2 + 2]
    assert groups.get_local_all_to_all_group(2)["local_0"] is found["local_0"], "made once"


def test_experts_blocks_and_nodes():
    run_ranks(experts, 4)


class Megatron:
    """An mpu of tensor-parallel neighbours, with Megatron's functions only."""

    def __init__(self):
        rank = dsx_comm.get_rank()
        model = [dsx_comm.new_group([0, 1]), dsx_comm.new_group([2, 3])]
        data = [dsx_comm.new_group([0, 2]), dsx_comm.new_group([1, 3])]
        self.model, self.data = model[rank // 2], data[rank % 2]

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_group(self):
        return self.data


def through_mpu(rank, world):
    mpu = Megatron()
    groups.use(mpu)
    assert groups.get_data_parallel_group() is mpu.data and groups.get_sequence_data_parallel_group() is mpu.data
    assert groups.get_tensor_model_parallel_group() is mpu.model and groups.get_expert_model_parallel_world_size() == 1
    assert (groups.get_data_parallel_rank(), groups.get_tensor_model_parallel_rank()) == divmod(rank, 2)
    assert (
        groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2 and groups.get_sequence_parallel_world_size() == 1
    )
    with pytest.raises(TopologyError, match="the mpu has no sequence-parallel group"):
        groups.get_sequence_parallel_group()
    groups.create_expert_data_and_model_parallel(2, mpu)
    assert members(groups.get_expert_parallel_group("ep_size_2")) == [rank % 2, rank % 2 + 2]
    assert groups.get_expert_model_parallel_world_size() == 2
    ours = Mpu(GroupRegistry(ProcessTopology(("data", "sequence"), (2, 2))))
    groups.use(ours)
    assert groups.get_sequence_data_parallel_world_size() == 4 and groups.get_sequence_parallel_rank() == rank % 2
    pairs = [dsx_comm.new_group([0, 3]), dsx_comm.new_group([1, 2])]
    mpu.model = pairs[rank in (1, 2)]
    groups.use(mpu)
    with pytest.raises(TopologyError, match="expected neighbours"):
        groups.create_expert_and_data_parallel(2)


def test_an_mpu():
    run_ranks(through_mpu, 4)


def test_a_new_world_begins_anew():
    with pytest.raises(dsx_comm.CommError, match="no process group"):
        groups.get_data_parallel_world_size()
    for _ in range(2):
        dsx_comm.init_distributed()
        try:
            assert groups.get_data_parallel_world_size() == 1
            first = groups.current()
            groups.create_expert_and_data_parallel(1)
        finally:
            dsx_comm.destroy_process_group()
        dsx_comm.init_distributed()
        try:
            assert groups.current() is not first and not groups.get_expert_parallel_group_dict()
        finally:
            dsx_comm.destroy_process_group()


def held_and_used(rank, n):
    first = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (1, n)))
    second = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("pipe", "data"), (n, 1)))
    end = groups.hold(first)
    again = groups.hold(first)
    assert groups.current().size("model") == n
    end()
    end()  # nothing the second time
    assert groups.current().size("model") == n
    other = groups.hold(second)
    again()
    assert groups.current().size("pipe") == n
    other()
    assert (groups.current().size("data"), groups.current().size("pipe")) == (n, 1)
    groups.use(second)  # asked for by name: stays
    groups.hold(second)()
    assert groups.current().size("pipe") == n


def test_groups_that_are_held_end_with_the_last_holder():
    run_ranks(held_and_used, 2)
