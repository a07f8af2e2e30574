"""A replicated parameter beside slices of tensors: it counts once in the norm, and one bad replica stops all ranks.

Both ranks hold `bias`, and each computes its gradient itself, so that one of them alone can get a value that is not
finite. The norm counts rank 0's replica only. If the other one were left out altogether, rank 0 would step, and rank 1
would write a NaN into its own replica.
"""

from __future__ import annotations

import math

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WIDTH = 6
STAGES = (0, 1, 2, 3)


class Scaled(torch.autograd.Function):
    """The value itself; its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Half(nn.Module):
    """One of the halves of a matrix that is cut by columns, and a replicated bias of the input."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(2 * WIDTH, WIDTH, generator=generator)
        self.weight = nn.Parameter(whole.chunk(parts)[part].clone())
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.weight.tensor_model_parallel = parts > 1
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + Scaled.apply(self.bias, self.factor)) @ self.weight.T


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def expected_norm(step: int) -> float:
    """Of one process: the squares of both halves, and of the bias once, with the gradient that rank 0 computes."""
    halves = [Half(part, 2) for part in range(2)]
    for half in halves:
        half(batch(step)).square().sum().backward()
    squares = [half.weight.grad.square().sum() for half in halves] + [halves[0].bias.grad.square().sum()]
    return sum(squares).sqrt().item()


def one_bad_replica(rank, world, bad):
    axes = dsx_comm.ProcessTopology(("data", "model"), (1, 2))
    dsx_comm.parallel_groups.use(dsx_comm.GroupRegistry(axes))
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            Half(rank, 2),
            lambda p: torch.optim.SGD(p, lr=0.1),
            stage=stage,
            precision=dsx_zero.Precision(check_overflow=True),
            config={"stage3_param_persistence_threshold": 0},
        )
        for step, factor in enumerate((1.0, bad, 1.0)):
            optimizer.zero_grad()
            before = {part.name: part.param.clone() for part in optimizer.slices()}
            model.factor = factor if rank == 1 else 1.0
            model(batch(step)).square().sum().backward()
            outcome = optimizer.step()
            now = {part.name: part.param for part in optimizer.slices()}
            same = all(torch.equal(before[name], value) for name, value in now.items())
            assert (outcome.overflow, same) == (step == 1, step == 1), (stage, step)
            if step == 0:
                assert outcome.grad_norm == pytest.approx(expected_norm(0), rel=1e-5), stage
        optimizer.release()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_replica_that_is_not_finite_stops_the_step_of_all(bad):
    run_ranks(one_bad_replica, 2, bad)
