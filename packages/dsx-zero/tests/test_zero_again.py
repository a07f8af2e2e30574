"""A model is sharded once at a time: a second time is refused while the first is in use, and trains rightly when that is over."""

import gc

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def steps(net, optimizer, count=2):
    for step in range(count):
        net(torch.full((1, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def again(rank, world, stage, how):
    import dsx_zero

    net, optimizer = dsx_zero.shard(model(), sgd, stage=stage)
    steps(net, optimizer)
    with pytest.raises(dsx_zero.ZeroModelError, match=r"0\.weight: is sharded already"):
        dsx_zero.shard(net, sgd, stage=stage)
    if how == "released":
        optimizer.release()
    else:
        del optimizer
        gc.collect()
    net, second = dsx_zero.shard(net, sgd, stage=stage)
    steps(net, second)
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("how", ["released", "dropped"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_sharded_once_at_a_time(world, how):
    plain = model()
    steps(plain, sgd(plain.parameters()), 2)
    steps(plain, sgd(plain.parameters()), 2)
    for stage in (0, 1, 2):
        for got in run_ranks(again, world, stage, how):
            for value, want in zip(got, plain.parameters(), strict=True):
                torch.testing.assert_close(value, want.detach(), rtol=1e-5, atol=1e-6)


def share(rank, world, stage):
    """Two models over one frozen layer, each with a head of its own."""
    import dsx_zero

    torch.manual_seed(0)
    base = nn.Linear(4, 5).requires_grad_(False)
    heads = [nn.Sequential(base, nn.Linear(5, 2)) for _ in range(2)]
    pairs = [dsx_zero.shard(net, sgd, stage=stage) for net in heads]
    for net, optimizer in pairs:
        steps(net, optimizer)
    return [p.detach().clone() for net, _ in pairs for p in net.parameters()]


def test_a_frozen_part_may_be_shared_by_two_models():
    torch.manual_seed(0)
    base = nn.Linear(4, 5).requires_grad_(False)
    heads = [nn.Sequential(base, nn.Linear(5, 2)) for _ in range(2)]
    for net in heads:
        steps(net, sgd(net[1].parameters()))
    want = [p.detach() for net in heads for p in net.parameters()]
    for stage in (0, 2):
        for got in run_ranks(share, 2, stage):
            for value, expected in zip(got, want, strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
