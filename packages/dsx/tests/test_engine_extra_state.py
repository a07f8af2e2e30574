"""Engine checkpoints have what modules keep by `get_extra_state`, at stage 3 and in the background too."""

from __future__ import annotations

import dsx
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Counting(nn.Linear):
    """Keeps how often it was called, and the largest input, outside of parameters and buffers."""

    calls, amax = 0, torch.zeros(1)

    def forward(self, x):
        self.calls, self.amax = self.calls + 1, torch.maximum(self.amax, x.detach().abs().max())
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls, "amax": self.amax}

    def set_extra_state(self, state):
        self.calls, self.amax = state["calls"], state["amax"]


def engine(stage: int, *, asynchronous: bool) -> dsx.Engine:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"asynchronous": asynchronous},
    }
    made, *_ = dsx.initialize(model=nn.Sequential(Counting(4, 4), Counting(4, 1)), config=config)
    return made


def train(made: dsx.Engine, steps: int) -> None:
    for step in range(steps):
        made.backward(made(torch.full((2, 4), step + 1.0)).square().mean())
        made.step()


def write(rank, world, folder, stage, asynchronous):
    made = engine(stage, asynchronous=asynchronous)
    train(made, 3)
    made.save_checkpoint(folder, tag="three")
    train(made, 2)  # what changes while the save is under way is not in it
    made.destroy()


def read(rank, world, folder, stage):
    made = engine(stage, asynchronous=False)
    made.load_checkpoint(folder)
    first = made.module[0]
    assert first.calls == 3 and first.amax.item() == 3.0 and made.module[1].calls == 3
    train(made, 1)
    assert first.calls == 4


@pytest.mark.parametrize(("stage", "asynchronous"), [(3, False), (1, True)])
def test_it_is_that_of_the_save(tmp_path, stage, asynchronous):
    run_ranks(write, 2, tmp_path, stage, asynchronous)
    run_ranks(read, 1, tmp_path, 3 - stage)
