"""The grid of ranks under DeepSpeed's names: coordinates, groups, and the `mpu` of a `PipelineModule`."""

import dsx_comm
import dsx_compat
import dsx_pipe
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_compat.activate()


def grid(rank, world):
    from deepspeed.pipe import PipelineModule, PipelineParallelGrid, PipeModelDataParallelTopology

    pm = PipelineModule(
        [nn.Linear(2, 2) for _ in range(2)], topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    )
    g = pm.mpu()
    assert g is pm.grid and isinstance(g, PipelineParallelGrid)
    ranks = (
        g.get_stage_id(),
        g.get_data_parallel_rank(),
        g.get_slice_parallel_rank(),
        g.get_slice_parallel_world_size(),
    )
    # DeepSpeed's "model parallel" is stages and slices together
    assert (g.get_model_parallel_rank(), g.get_model_parallel_world_size()) == (rank, 4)
    assert dsx_comm.get_all_ranks_from_group(g.get_model_parallel_group()) == [0, 1, 2, 3]
    assert dsx_comm.get_all_ranks_from_group(g.get_tensor_model_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (g.is_first_stage, g.is_last_stage) == (rank < 2, rank >= 2)
    assert (g.pipe_parallel_size, g.data_parallel_size, g.model_parallel_size, g.slice_parallel_size) == (2, 1, 2, 2)
    assert (g.stage_id, g.data_parallel_id, g.get_global_rank()) == (rank // 2, 0, rank)
    assert (g.get_pipe_parallel_rank(), g.get_pipe_parallel_world_size()) == (rank // 2, 2)
    found = dsx_comm.read_mpu(g)
    assert (found.pipe.size, found.tensor.size, found.model.size) == (2, 2, 4)
    return ranks, g.stage_to_global(0), g.p2p_groups


def test_the_grid_is_an_mpu():
    results = run_ranks(grid, 4, backend="dsx")
    assert [r[0] for r in results] == [(0, 0, 0, 2), (0, 0, 1, 2), (1, 0, 0, 2), (1, 0, 1, 2)]
    assert [r[1] for r in results] == [0, 1, 0, 1]
    assert results[0][2] == [[0, 2], [0, 2], [1, 3], [1, 3]]


def cut_by_the_configuration(rank, world):
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "pipeline": {"stages": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine.module, deepspeed.PipelineModule)
    return engine.module.mpu().get_stage_id(), engine.module.grid.is_last_stage


def test_a_pipeline_that_dsx_has_made_has_the_names_too():
    assert run_ranks(cut_by_the_configuration, 2, backend="dsx") == [(0, False), (1, True)]


def test_who_replaces_how_layers_are_divided_is_told_the_way():
    """Nothing of dsx calls DeepSpeed's functions for it: layers would be divided as if they had not been replaced."""
    from deepspeed.pipe import PipelineModule

    with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match=r'PipelineModule\._partition_layers.*"time"'):

        class Manual(PipelineModule):
            def _partition_layers(self, method="uniform"):
                self.parts = [0, 1, 2]

    with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match="_count_layer_params"):
        PipelineModule._count_layer_params = lambda self: [1, 2]
    assert not hasattr(PipelineModule, "_count_layer_params")

    class Fine(PipelineModule):
        def get_additional_losses(self):
            return {}

    assert issubclass(Fine, dsx_pipe.PipelineModule)


def alone(rank, world):
    found = dsx_pipe.RankGrid()
    assert not hasattr(found, "get_stage_id")  # the names are DeepSpeed's, and of dsx-compat
    import dsx

    assert dsx.pipe.PipelineParallelGrid().get_data_parallel_world_size() == world
    return found.pipe.size, found.data.size


def test_the_default_grid_is_data_parallel():
    assert run_ranks(alone, 2, backend="dsx") == [(1, 2), (1, 2)]
