"""A parameter that is replaced under an engine is named by the next step, save and load, before anything changes."""

import dsx
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


def build(stage, world):
    torch.manual_seed(0)
    config = {
        "train_batch_size": world,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    return dsx.initialize(model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), config=config)[0]


def load_assigned(module):
    whole = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4), "1.bias": (2,)}
    module.load_state_dict({name: torch.ones(shape) for name, shape in whole.items()}, assign=True)


def replace_layer(module):
    module[1] = nn.Linear(4, 2)


def add_parameter(module):
    module.extra = nn.Parameter(torch.ones(2))


CHANGES = {
    "assigned": (load_assigned, "'0.weight'"),
    "layer": (replace_layer, "'1.weight'"),
    "added": (add_parameter, "'extra'"),
}


def changed(rank, world, stage, change, folder):
    engine = build(stage, world)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(folder, tag="before")
    engine.backward(engine(torch.ones(1, 3)).sum())
    CHANGES[change][0](engine.module)
    for call in (
        engine.step,
        lambda: engine.save_checkpoint(folder, tag="after"),
        lambda: engine.load_checkpoint(folder),
    ):
        with pytest.raises(RuntimeError, match="the model is not the one that was sharded") as caught:
            call()
        assert CHANGES[change][1] in str(caught.value)
    assert engine.global_steps == 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("world, stage", [(1, 0), (2, 2), (2, 3)])
def test_what_differs_is_named(change, world, stage, tmp_path):
    run_ranks(changed, world, stage, change, str(tmp_path))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["before", "latest"]
