"""How many of our Python calls a unit of stage 3 costs per pass. On a GPU each is host time between two kernels.

The limits are what is reached today with a margin for other Python versions; they are there so that nothing creeps in.
"""

import dsx_zero
import torch
from dsx_testkit import count_calls, run_ranks, tiny
from torch import nn


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(tiny.ResidualBlock() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _calls(rank, world_size, blocks):
    model, optimizer = dsx_zero.shard(
        Net(blocks).bfloat16(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        config={"stage": 3, "stage3_param_persistence_threshold": 0},
    )
    x = torch.randn(4, 8).bfloat16()
    for _ in range(13):  # the first ten collectives of a group are compared between ranks
        with count_calls("dsx_zero", "dsx_comm") as forward:
            loss = model(x).float().square().mean()
        with count_calls("dsx_zero", "dsx_comm") as backward:
            loss.backward()
        with count_calls("dsx_zero", "dsx_comm") as step:
            optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
    return forward.total, backward.total, step.total


def test_a_unit_costs_few_calls():
    few, many = run_ranks(_calls, 2, 2)[0], run_ranks(_calls, 2, 10)[0]
    forward, backward, step = ((more - less) / 8 for less, more in zip(few, many))
    assert forward <= 44  # 278 before schedules were indexed and gathers prepared, 75 before units knew their way
    assert backward <= 88  # 363, 169
    assert step <= 20
    assert forward + backward + step <= 151  # 149; 2 more where a reduction is asked before it is done
