"""DeepSpeed's format of one file per layer: any split reads what any other wrote, with shared weights and slices."""

import dsx_comm
import pytest
import torch
from dsx_pipe import (
    LayerSpec,
    PipelineError,
    PipelineModule,
    PipeModelDataParallelTopology,
    RankGrid,
    TiedLayerSpec,
)
from dsx_pipe.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, whole_state
from dsx_testkit import run_ranks
from torch import nn


def project(embedding, x):
    return x @ embedding.weight.T


def layers():
    return [
        TiedLayerSpec("embedding", nn.Embedding, 11, 4),
        LayerSpec(nn.Linear, 4, 4),
        torch.tanh,
        LayerSpec(nn.BatchNorm1d, 4),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("embedding", nn.Embedding, 11, 4, forward_fn=project),
    ]


def state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def write(rank, world, folder, parallel):
    torch.manual_seed(0)
    module = PipelineModule(layers(), num_stages=2, seed_layers=True, base_seed=7)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("1."))
    module.save_state_dict(folder, parallel_write=parallel)
    module.save_state_dict(f"{folder}/trained", exclude_frozen_params=True)
    return state(module)


def read(rank, world, folder, stages, schedule):
    module = PipelineModule(layers(), num_stages=stages, seed_layers=True, base_seed=99, schedule=schedule)
    module.load_state_dir(folder)
    return state(module)


@pytest.mark.parametrize("world, parallel", [(2, False), (4, True)])
def test_files_of_two_stages_are_read_by_any_split(tmp_path, world, parallel):
    written = {k: v for part in run_ranks(write, world, str(tmp_path), parallel) for k, v in part.items()}
    names = sorted(p.name for p in tmp_path.glob("*.pt"))
    assert names == [f"layer_{i:02d}-model_states.pt" for i in (0, 1, 3, 4)]  # functions and later uses have none
    first = torch.load(tmp_path / names[0], weights_only=True)
    assert list(first) == ["weight"] and torch.equal(first["weight"], written["tied_modules.embedding.weight"])
    assert list(torch.load(tmp_path / "trained" / names[1], weights_only=True)) == []
    for ranks, stages, schedule in ((1, 1, "1f1b"), (3, 3, "1f1b"), (2, 2, "zbv")):
        seen = set()
        for part in run_ranks(read, ranks, str(tmp_path), stages, schedule):
            for name, value in part.items():
                assert torch.equal(value, written[name]), name
            seen |= set(part)
        assert seen == set(written)


def refused(rank, world, folder):
    module = PipelineModule(layers(), num_stages=1, seed_layers=True)
    before = state(module)
    with pytest.raises(PipelineError, match="layer 0: there is no file"):
        module.load_state_dir(f"{folder}/nothing")
    wide = PipelineModule([nn.Linear(2, 2), *layers()[1:5]], num_stages=1)
    with pytest.raises(PipelineError, match=r"missing are \['bias'\]"):
        wide.load_state_dir(folder)
    with pytest.raises(PipelineError, match=r"weight has the shape \[11, 4\], expected \[2, 2\]"):
        wide.load_state_dir(folder, strict=False)
    module.load_state_dir(f"{folder}/trained", strict=False)  # a layer that was left out keeps its values
    assert torch.equal(module.state_dict()["1.weight"], before["1.weight"])
    assert not torch.equal(module.state_dict()["4.weight"], before["4.weight"])

    class Fails:
        def save(self, state_dict, path):
            raise OSError("disk full")

    with pytest.raises(PipelineError, match="rank 0: OSError: disk full"):
        module.save_state_dict(folder, checkpoint_engine=Fails())
    assert module.ckpt_layer_path_list(folder, 1) == [module.ckpt_layer_path(folder, 1)]


def test_files_that_do_not_fit_are_named_and_change_nothing(tmp_path):
    run_ranks(write, 2, str(tmp_path), False)
    run_ranks(refused, 1, str(tmp_path))


def one_file_is_gone(rank, world, folder):
    module = PipelineModule(layers(), num_stages=2, seed_layers=True)
    before = state(module)
    with pytest.raises(PipelineError, match="could not be read: rank 1: layer 4: there is no file"):
        module.load_state_dir(folder)
    for name, value in state(module).items():
        assert torch.equal(value, before[name])


def test_no_rank_loads_if_another_rank_cannot(tmp_path):
    run_ranks(write, 2, str(tmp_path), False)
    (tmp_path / "layer_04-model_states.pt").unlink()
    run_ranks(one_file_is_gone, 2, str(tmp_path))


def sliced(rank, world, folder, pipe, model, save):
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=1)
    group = RankGrid(topology).model.group
    torch.manual_seed(3 if save else 4)
    built = [
        VocabParallelEmbedding(11, 4, group=group),
        ColumnParallelLinear(4, 24, parts=3, group=group),
        RowParallelLinear(24, 4, group=group),
    ]
    module = PipelineModule(built, topology=topology)
    if save:
        module.save_state_dict(folder)
    else:
        module.load_state_dir(folder)
    return {name: value.clone() for name, value in whole_state(module, group).items()}


@pytest.mark.parametrize("after", [(2, 1, 2), (4, 1, 4), (1, 1, 1), (4, 2, 2)])
def test_slices_are_joined_and_cut_for_another_layout(tmp_path, after):
    """`after` is (ranks, stages, slices). No number of slices above 1 divides the vocabulary of 11."""
    written = {k: v for p in run_ranks(sliced, 2, str(tmp_path), 1, 2, True) for k, v in p.items()}
    assert (tmp_path / "layer_00-model_01-model_states.pt").exists()
    world, pipe, model = after
    for part in run_ranks(sliced, world, str(tmp_path), pipe, model, False):
        for name, value in part.items():
            assert torch.equal(value, written[name]), name


def gpt2(seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=4, n_head=2)
    )


def hugging_face(rank, world, folder, stages, save):
    model = gpt2(0 if save else 1)
    module = PipelineModule(model, num_stages=stages)
    if save:
        module.save_state_dict(folder)
    else:
        module.load_state_dir(folder)
    dsx_comm.barrier()
    return state(module)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_hugging_face_models_with_shared_weights(tmp_path, before, after):
    run_ranks(hugging_face, before, str(tmp_path), before, True)
    expected = gpt2(0).state_dict()
    for part in run_ranks(hugging_face, after, str(tmp_path), after, False):
        for name, value in part.items():
            assert torch.equal(value, expected[name]), name
