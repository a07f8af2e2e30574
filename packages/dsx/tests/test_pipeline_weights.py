"""Whole weights of a pipeline: `module_state_dict` and `save_16bit_model` give those of all stages."""

from __future__ import annotations

import copy

import dsx
import pytest
import torch
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

GATHER = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


class Scaled(nn.Module):
    """With a buffer, a frozen parameter and one without elements."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.full((), 0.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.linear(x) * self.factor


def layers():
    torch.manual_seed(0)
    embedding, middle = Embedding(), [Scaled() for _ in range(4)]
    tied = dsx_pipe.TiedLayerSpec("embedding", lambda: copy.deepcopy(embedding))
    head = dsx_pipe.TiedLayerSpec("embedding", lambda: copy.deepcopy(embedding), forward_fn=logits)
    return embedding, middle, [tied, *middle, head]


def logits(embedding, x):
    return x @ embedding.weight.T


def expected():
    embedding, middle, _ = layers()
    found = {"tied_modules.embedding.weight": embedding.weight.detach()}
    for index, layer in enumerate(middle, 1):
        found |= {f"{index}.{name}": value for name, value in layer.state_dict().items()}
    return found


def saved(rank, world, stages, stage, schedule, folder):
    module = dsx_pipe.PipelineModule(layers()[2], num_stages=stages, schedule=schedule, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **GATHER}}
    engine = dsx.initialize(model=module, config={**config, "optimizer": {"type": "AdamW"}})[0]
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(folder, "model.safetensors", exclude_frozen_parameters=True)
    only_first = engine.module_state_dict(rank0_only=True)
    assert (only_first is None) == (rank > 0)
    return engine.module_state_dict()


@pytest.mark.parametrize(
    ("world", "stages", "stage", "schedule"),
    [(2, 2, 1, "1f1b"), (2, 2, 3, "zbv"), pytest.param(4, 2, 2, "1f1b", marks=pytest.mark.slow)],
)
def test_whole_weights_are_those_of_all_stages_on_every_rank(world, stages, stage, schedule, tmp_path):
    from safetensors.torch import load_file

    want = expected()
    states = run_ranks(saved, world, stages, stage, schedule, str(tmp_path))
    states.append(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    for state in states:
        assert set(state) == set(want)
        for name, value in want.items():
            assert torch.equal(state[name], value), name
    safe = load_file(tmp_path / "model.safetensors")
    assert set(safe) == {name for name in want if "frozen" not in name}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]


def experts_on_one_stage(rank, world, folder):
    from dsx_moe import MoE

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE(4, lambda i: nn.Linear(4, 4), 2, ep_size=2)

        def forward(self, x):
            return self.moe(x)[0]

    module = dsx_pipe.PipelineModule(
        [dsx_pipe.LayerSpec(nn.Linear, 4, 4), dsx_pipe.LayerSpec(Layer)], num_stages=2, partition_method="uniform"
    )
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    dsx.initialize(model=module, config=config)[0].save_16bit_model(folder)


def test_tensors_of_which_one_stage_has_a_part_only_are_refused_on_all_ranks(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(experts_on_one_stage, 4, str(tmp_path))
    assert str(caught.value).count("save_checkpoint writes them all") >= 4
    assert not list(tmp_path.iterdir())
