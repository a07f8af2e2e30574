"""A hang inside a sharded model names the unit whose parameters or gradients the waiting rank is after."""

from __future__ import annotations

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def one_sleeps(rank, world, stage, steps, late):
    """Rank 1 does not go on, before the forward or the backward of its last step; the others must say what they wait
    for.
    """
    import time

    model, optimizer = dsx_zero.shard(
        Blocks(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        stage=stage,
        config={"stage3_param_persistence_threshold": 0},
    )
    dsx_comm.explain_hangs(limit=1.0, notice=0.5)
    x = torch.ones(2, 6)
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def last():
        if rank == 1 and late == "forward":
            return time.sleep(3.0)
        loss = model(x).sum()
        if rank == 1:
            return time.sleep(3.0)
        loss.backward()

    if rank == 1:
        return last()
    with pytest.raises(dsx_comm.errors.HangError) as caught:
        last()
    lines = str(caught.value).splitlines()
    return next(line for line in lines if line.startswith("  rank 0:"))


@pytest.mark.parametrize(
    "stage, steps, late, expected",
    [
        (3, 0, "forward", " for unit 0 (blocks.0) "),  # the ranks still agree on every gather
        (3, 4, "forward", " for unit 0 (blocks.0) "),  # the schedule is known, the gather itself waits
        (3, 4, "backward", " for unit 2 (blocks.2) "),
        (2, 4, "backward", " for unit 0 (root), gradients "),
    ],
)
def test_the_unit_is_named(stage, steps, late, expected):
    assert expected in run_ranks(one_sleeps, 2, stage, steps, late)[0]
