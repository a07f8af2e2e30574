"""The calls of a start grow as the number of modules and parameters, and no faster."""

import dsx_zero
import pytest
import torch
from dsx_comm import RankSet
from dsx_testkit.pycalls import count_calls
from dsx_zero.plan.units import Persistence, find_parameters, plan_units
from torch import nn


class Root(nn.Module):
    """Parameters of the root itself and of many small modules: all of them go into buckets."""

    def __init__(self, count):
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(count))
        for number in range(count):
            self.add_module(f"layer{number}", nn.Linear(2, 2))

    def forward(self, x):
        for child in self.children():
            x = child(x) if isinstance(child, nn.Linear) else x
        return x + sum(p.sum() for p in self.own)


def calls_of_a_start(count, stage):
    model = Root(count)
    with count_calls("dsx_zero", "dsx_core", "dsx_comm") as counted:
        _, optimizer = dsx_zero.shard(
            model, torch.optim.Adam, stage=stage, config={"stage3_param_persistence_threshold": 0}
        )
    optimizer.release()
    return counted


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_start_is_linear_in_modules_and_parameters(stage):
    calls_of_a_start(50, stage)  # lazy imports
    small, large = calls_of_a_start(100, stage), calls_of_a_start(400, stage)
    assert large.total <= 4.2 * small.total, f"{small.table()}\n{large.table()}"


def calls_of_buckets(count):
    model = Root(count)
    infos = find_parameters(model)
    with count_calls("dsx_zero") as counted:
        plans = plan_units(
            model, infos, stage=3, ranks_of=lambda _: RankSet(), persistence=Persistence(0, 1), bucket_size=5 * count
        )
    assert len(plans) > 1, "what lies outside all blocks is divided into buckets"
    return counted


def test_buckets_are_filled_in_one_pass():
    small, large = calls_of_buckets(100), calls_of_buckets(400)
    assert large.total <= 4.2 * small.total, f"{small.table()}\n{large.table()}"
