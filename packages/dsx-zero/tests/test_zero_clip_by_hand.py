"""`torch.nn.utils.clip_grad_norm_` where the ranks have different parameters: each would clip by a norm of its own, so
it is refused by name, and `step(max_norm=...)` clips by the norm of all.
"""

from __future__ import annotations

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Experts(nn.Module):
    """A layer that all ranks hold, and one of each rank's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.own = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.own(torch.tanh(self.dense(x))).square().mean()


def sharded(stage, mark):
    model = Experts()
    for parameter in model.own.parameters() if mark else ():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    return dsx_zero.shard(
        model, lambda p: torch.optim.SGD(p, lr=1.0), stage=stage, config={"stage3_param_persistence_threshold": 0}
    )


def clip(rank, world, stage):
    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    model, optimizer = sharded(stage, True)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    model(x).backward()
    with pytest.raises(dsx_zero.ZeroError, match=r"different parameters \(experts.*optimizer.step\(max_norm="):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    whole = dsx_zero.safe_get_full_grad(model.dense.weight)
    assert whole is not None and whole.norm() > 0
    outcome = optimizer.step(max_norm=0.1)
    with dsx_zero.GatheredParameters(model), torch.no_grad():
        return outcome.grad_norm, model.dense.weight.detach().clone()


def test_clipping_by_hand_is_refused_where_ranks_differ():
    for stage in (0, 1, 2, 3):
        (norm, dense), (other, same) = run_ranks(clip, 2, stage)
        assert norm == other and torch.equal(dense, same)


def alike(rank, world, stage):
    model, optimizer = sharded(stage, False)
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    optimizer.step()
    return norm


def test_where_all_ranks_hold_all_it_is_the_norm_of_the_model():
    norms = {norm for stage in (0, 1, 2, 3) for norm in run_ranks(alike, 2, stage)}
    assert max(norms) - min(norms) < 1e-6 * max(norms)
