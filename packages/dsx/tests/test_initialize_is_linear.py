"""`dsx.initialize` and the first step take work in proportion to the modules and parameters of a model, not to their
square. Calls are counted, of Python and of C functions, so that the machine does not matter.
"""

import sys

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

MANY, TIMES = 150, 4
MOST = 1.1  # times as many calls per module in the large model as in the small one


class Modules(nn.Module):
    """`count` small layers, one behind the other."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Parameters(nn.Module):
    """Twice `count` parameters of one module."""

    def __init__(self, count):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(2 * count))

    def forward(self, x):
        return torch.cat(list(self.all)).sum() * x.sum()


def calls(build, count, stage):
    import dsx

    model, found = build(count), [0]

    def profile(_frame, event, _argument):
        found[0] += event in ("call", "c_call")

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    sys.setprofile(profile)
    try:
        engine = dsx.initialize(model=model, config=config)[0]
        engine.backward(engine(torch.ones(1, 1)))
        engine.step()
    finally:
        sys.setprofile(None)
    engine.destroy()
    return found[0]


def growth(rank, world, build, stage):
    """How many times as many calls each module of the larger model takes."""
    calls(build, 4, stage)  # what is imported and made once
    few, many = calls(build, MANY, stage), calls(build, TIMES * MANY, stage)
    return many / few / TIMES


@pytest.mark.parametrize("build", [Modules, Parameters])
def test_calls_of_one_rank_grow_with_the_model(build):
    assert growth(0, 1, build, 0) < MOST


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("build", [Modules, Parameters])
def test_calls_of_several_ranks_grow_with_the_model(build, stage):
    assert max(run_ranks(growth, 2, build, stage)) < MOST
