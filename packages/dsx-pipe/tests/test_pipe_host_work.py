"""The runtime's own work for one micro-batch stays small. It is counted in Python calls."""

import sys

import torch
from dsx_pipe import Pipeline, build
from dsx_testkit import run_ranks
from torch import nn

MOST_CALLS = 600  # for two sends, two receives, forward and backward; 453 when this test was written


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def calls_of_a_step(micro_batches, stage, counts):
    pipe = Pipeline(stage, build("1f1b", 2, micro_batches), loss_fn=nn.functional.mse_loss)
    x, count = torch.randn(micro_batches, 4), 0
    for _ in range(2):
        pipe.step(x, x)

    def profile(frame, event, _argument):
        nonlocal count
        count += event == "call" and counts(frame.f_code)

    sys.setprofile(profile)
    pipe.step(x, x)
    sys.setprofile(None)
    return count


def per_micro_batch(rank, world):
    return (calls_of_a_step(16, Scale(), lambda code: True) - calls_of_a_step(8, Scale(), lambda code: True)) / 8


def test_python_calls_per_micro_batch():
    assert all(0 < calls < MOST_CALLS for calls in run_ranks(per_micro_batch, 2, backend="dsx"))


def walks(rank, world):
    """How often a step goes through the modules of a stage."""

    def walk(code):
        return code.co_name == "named_modules"

    return [calls_of_a_step(count, nn.Sequential(*(Scale() for _ in range(20))), walk) for count in (4, 8)]


def test_the_layers_of_a_stage_are_not_listed_for_every_micro_batch():
    for few, many in run_ranks(walks, 2, backend="dsx"):
        assert few == many
