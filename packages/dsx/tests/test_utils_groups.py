"""`dsx.utils.groups`: the names of `deepspeed.utils.groups` over those of dsx_comm, and the mpu that `initialize` is
given.
"""

import dsx
import dsx_comm
import torch
from dsx.utils import groups
from dsx_comm import GroupRegistry, Mpu
from dsx_testkit import run_ranks


def test_names_with_and_without_the_underscore_are_one_function():
    for name in (
        "get_data_parallel_group",
        "get_sequence_parallel_rank",
        "get_expert_parallel_group_dict",
        "get_local_all_to_all_group",
    ):
        assert getattr(groups, f"_{name}") is getattr(groups, name) is getattr(dsx_comm.parallel_groups, name)


def given(rank, world):
    assert groups._get_data_parallel_world_size() == world
    pairs = [dsx_comm.new_group([0]), dsx_comm.new_group([1])]

    class Alone(Mpu):
        """Every rank trains a model of its own."""

        def get_data_parallel_group(self):
            return pairs[rank]

        def get_data_parallel_world_size(self):
            return 1

        def get_data_parallel_rank(self):
            return 0

    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = dsx.initialize(model=model, config=config, mpu=Alone(GroupRegistry()))
    assert groups._get_data_parallel_group() is pairs[rank] and groups._get_data_parallel_world_size() == 1
    engine.destroy()


def test_initialize_with_an_mpu_says_who_is_who():
    run_ranks(given, 2)
