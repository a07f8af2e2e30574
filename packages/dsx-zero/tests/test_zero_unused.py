"""`ignore_unused_parameters: false` names what got no gradient, on every rank alike, and changes nothing."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, *, right):
        return self.left(x) + (self.right(x) if right else 0)


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def check(rank, world, stage):
    model, optimizer = dsx_zero.shard(
        Branches(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        stage=stage,
        config={"ignore_unused_parameters": False, "stage3_param_persistence_threshold": 0},
    )
    x = torch.ones(2, 5)
    for _ in range(2):
        model(x, right=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [whole(p) for p in model.parameters()]
    used_here = rank == 0 and world > 1
    model(x, right=used_here).sum().backward()
    with pytest.raises(dsx_zero.ZeroStateError, match=rf"right.weight \(rank {world - 1}\); right.bias"):
        optimizer.step()
    assert all(torch.equal(a, whole(p)) for a, p in zip(before, model.parameters()))
    optimizer.zero_grad()
    with optimizer.no_sync():  # a parameter needs a gradient once in a step, whichever backward brings it
        model(x, right=True).sum().backward()
    model(x, right=False).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("world", [1, 2])
def test_unused_parameters_are_named(world):
    for stage in range(4):
        run_ranks(check, world, stage)


class Many(nn.Module):
    """Twelve layers, of which each rank uses those of which the number is not a multiple of `rank + 2`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(12))

    def forward(self, x, rank):
        for number, layer in enumerate(self.layers):
            x = x if number % (rank + 2) == 0 else layer(x)
        return x


def many(rank, world):
    model, optimizer = dsx_zero.shard(
        Many(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        stage=1,
        config={"ignore_unused_parameters": False},
    )
    model(torch.ones(2, 3), rank).sum().backward()
    with pytest.raises(dsx_zero.ZeroStateError) as caught:
        optimizer.step()
    return str(caught.value)


def test_what_ranks_miss_is_put_together_and_cut():
    one, *others = run_ranks(many, 3)
    assert others == [one, one]
    named = {n: [r for r in range(3) if n % (r + 2) == 0] for n in range(12)}
    first = [n for n, ranks in named.items() if ranks][:8]
    expected = "; ".join(f"layers.{n}.weight (rank {', '.join(map(str, named[n]))})" for n in first)
    assert expected in one and (("; and more." in one) == (sum(map(bool, named.values())) > 8))
