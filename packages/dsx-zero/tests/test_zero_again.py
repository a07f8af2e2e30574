"""A model that is sharded already can be sharded again: at any stage after any other, after the first optimizer or
instead of it.
"""

import gc
import logging

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

CONFIGS = [{}, {"stage3_param_persistence_threshold": 0}]


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


def values(net):
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in net.parameters()]


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("dsx_zero").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def again(rank, world, pairs, how):
    """For each pair of stages: train, shard again, train on; the values of each."""
    import dsx_zero

    found = []
    for number, (first_stage, second_stage) in enumerate(pairs):
        log = Lines()
        config = CONFIGS[number % 2]
        net, optimizer = dsx_zero.shard(model(), sgd, stage=first_stage, config=config)
        steps(net, optimizer)
        early = list(net.parameters())
        if how == "released":
            optimizer.release()
        elif how == "dropped":
            del optimizer
            gc.collect()
        net, second = dsx_zero.shard(net, sgd, stage=second_stage, config=config)
        warned = [
            line
            for line in log.lines
            if f"at stage {first_stage if world > 1 or first_stage == 3 else 0} is released" in line
        ]
        assert len(warned) == (how == "in use" and rank == 0), log.lines
        if how != "dropped":
            assert optimizer.released
            with pytest.raises(dsx_zero.ZeroStateError, match="this optimizer was released"):
                optimizer.step()
        steps(net, second)
        if second_stage == 3 or first_stage != 3:  # no other objects, whoever kept them
            assert all(a is b for a, b in zip(early, net.parameters(), strict=True)) or first_stage != second_stage
        found.append(values(net))
    return found


@pytest.mark.parametrize("how", ["in use", "released", "dropped"])
@pytest.mark.parametrize("world", [1, 2])
def test_any_stage_after_any_other(world, how):
    plain = model()
    steps(plain, sgd(plain.parameters()), 2)
    steps(plain, sgd(plain.parameters()), 2)
    pairs = [(first, second) for first in range(4) for second in (0, 2, 3)]
    for results in run_ranks(again, world, pairs, how):
        for got in results:
            for value, want in zip(got, plain.parameters(), strict=True):
                torch.testing.assert_close(value, want.detach(), rtol=1e-5, atol=1e-6)


def converted(rank, world, stage):
    """A model that was sharded in fp32 is converted and sharded again in bf16."""
    import dsx_zero

    net, optimizer = dsx_zero.shard(model(), sgd, stage=stage, config=CONFIGS[1])
    steps(net, optimizer)
    kept = values(net)
    assert dsx_zero.release_model(net) and not dsx_zero.release_model(net)
    net.to(torch.bfloat16)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(kept, values(net), strict=True))
    net, optimizer = dsx_zero.shard(net, sgd, stage=3, config=CONFIGS[1])
    net(torch.ones(1, 4).bfloat16()).float().square().sum().backward()
    optimizer.step()
    assert all(p.dtype == torch.bfloat16 for p in net.parameters())
    assert not all(torch.equal(a.bfloat16(), b) for a, b in zip(kept, values(net), strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_released_models_can_be_converted(stage):
    run_ranks(converted, 2, stage)


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


def trunk(rank, world, stage):
    """Two models that both train one layer are refused, and the first trains on."""
    import dsx_zero

    shared = nn.Linear(4, 5)
    first, optimizer = dsx_zero.shard(nn.Sequential(shared, nn.Linear(5, 2)), sgd, stage=stage, config=CONFIGS[1])
    with pytest.raises(dsx_zero.ZeroModelError, match=r"0\.weight: is sharded already, as part of another model"):
        dsx_zero.shard(nn.Sequential(shared, nn.Linear(5, 3)), sgd, stage=stage, config=CONFIGS[1])
    before = values(first)
    steps(first, optimizer, 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, values(first), strict=True))
    optimizer.release()
    dsx_zero.shard(nn.Sequential(shared, nn.Linear(5, 3)), sgd, stage=stage, config=CONFIGS[1])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_part_that_another_model_trains_is_refused(stage):
    run_ranks(trunk, 2, stage)


def same_optimizer(rank, world, stage):
    """One optimizer object shards a model twice: it begins again, and keeps nothing of the first time."""
    import dsx_zero

    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, first = dsx_zero.shard(net, inner, stage=stage, config=CONFIGS[1])
    steps(net, first)
    held = first.state_bytes()["optimizer"]
    net, second = dsx_zero.shard(net, inner, stage=stage, config=CONFIGS[1])
    assert second.state_bytes()["optimizer"] == 0
    steps(net, second)
    assert second.state_bytes()["optimizer"] == held > 0
    return values(net)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_optimizer_object_may_shard_its_model_again(stage):
    plain = model()
    for _ in range(2):
        steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    for got in run_ranks(same_optimizer, 2, stage):
        for value, want in zip(got, plain.parameters(), strict=True):
            torch.testing.assert_close(value, want.detach(), rtol=1e-5, atol=1e-6)
