"""Shards on disk are read before their gathers ask for them, within a budget, and never stale."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.homes.tiers import DiskTier, HostRoom, HostTier, Placement
from torch import nn


class Shelf:
    """A store in a dictionary that notes what is read and when it is waited for."""

    def __init__(self):
        self.tensors, self.events = {}, []

    def __contains__(self, name):
        return name in self.tensors

    def put(self, name, tensor):
        self.tensors[name] = tensor.clone()
        return Waiting(lambda: None)

    def get(self, name, out=None):
        self.events.append(("read", name))
        found = self.tensors[name]  # a later `put` does not change it: stores keep the order of operations
        return Waiting(lambda: self._arrive(name, found, out))

    def _arrive(self, name, found, out):
        self.events.append(("wait", name))
        out.copy_(found)


class Waiting:
    def __init__(self, job):
        self.wait = job


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


EXACT = {"stage": 3, "stage3_param_persistence_threshold": 0}


def built(tier, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)):
    placement = Placement(tier, HostTier(), HostTier())
    return dsx_zero.shard(Net(), optimizer, config=EXACT, placement=placement)


def step(model, optimizer, number):
    model(torch.full((2, 16), 0.1 * (number + 1))).backward()
    optimizer.step()
    optimizer.zero_grad()


def distances(events):
    """How many reads had been started after the one that is waited for."""
    found = []
    for place, (kind, name) in enumerate(events):
        if kind == "wait":
            started = max(p for p in range(place) if events[p] == ("read", name))
            found.append(sum(kind == "read" for kind, _ in events[started + 1 : place]))
    return found


def trained(rank, world, ahead, count):
    shelf = Shelf()
    model, optimizer = built(DiskTier(shelf, ahead=ahead, ahead_count=count))
    for number in range(4):
        step(model, optimizer, number)
    return distances(shelf.events)[-12:], [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_reads_run_ahead_of_their_gathers(world):
    _, wanted = run_ranks(trained, world, 0, 0)[0]
    size = 256 // world
    for ahead, count, most in ((0, 0, 0), (size, 5, 1), (2 * size, 5, 2), (10**6, 3, 3)):
        found, values = run_ranks(trained, world, ahead, count)[0]
        assert max(found) == most
        assert sum(d == 0 for d in found) <= (2 if most else 12)  # the last read before shards change has none behind
        assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))


def edited(rank, world):
    shelf = Shelf()
    model, optimizer = built(DiskTier(shelf, ahead=10**6, ahead_count=3))
    for number in range(2):
        step(model, optimizer, number)
    with torch.no_grad():  # `model` has its first shards read ahead now
        model.blocks[1].weight.fill_(0.5)
        model(torch.ones(1, 16))
        assert (model.blocks[1].weight.full_tensor() == 0.5).all()
    with dsx_zero.GatheredParameters(model.blocks[0].weight, modifier_rank=0):
        model.blocks[0].weight.data.fill_(0.25)
    with dsx_zero.GatheredParameters(model):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_what_was_read_ahead_is_never_stale(world):
    found = run_ranks(edited, world)[0]
    assert (found[0] == 0.25).all()
    assert (found[1] == 0.5).all()


def evaluated_before_the_step(rank, world, tier):
    """Evaluations learn what follows on them, and read it ahead; then a step gives the shards new values."""
    model, optimizer = built(tier)
    losses = []
    for number in range(4):
        model(torch.full((2, 16), 0.1 * (number + 1))).backward()
        with torch.no_grad():
            for _ in range(2):
                losses.append(model(torch.ones(1, 16)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_makes_what_was_read_ahead_stale(world):
    losses, values = run_ranks(evaluated_before_the_step, world, HostTier())[0]
    got, found = run_ranks(evaluated_before_the_step, world, DiskTier(Shelf(), ahead=10**6, ahead_count=3))[0]
    assert got == losses
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


def test_forward_only_reads_ahead_over_the_end_of_a_pass():
    shelf = Shelf()
    model, _ = built(DiskTier(shelf, ahead=10**6, ahead_count=2), None)
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(1, 16))
    assert distances(shelf.events)[-12:] == [2] * 12


def test_what_fits_stays_in_host_memory():
    shelf = Shelf()
    model, optimizer = built(DiskTier(shelf, host=HostRoom(3 * 256)))
    nbytes = optimizer.state_bytes_by_tier()["params"]
    assert nbytes == {"host": 3 * 1024, "disk": 3 * 1024}
    step(model, optimizer, 0)
    assert len({name for _, name in shelf.events}) == 3


def test_a_budget_too_small_for_one_unit_is_refused():
    config = EXACT | {"offload_param": {"device": "nvme", "buffer_count": 2, "buffer_size": 100}}
    model = Net()
    with pytest.raises(dsx_zero.ZeroConfigError, match=r"= 200 elements of host memory, expected at least the 256 of"):
        dsx_zero.shard(model, None, config=config, store=Shelf())
    assert type(model.blocks[0].weight) is nn.Parameter


def waits_by_turn(rank, world):
    """For each read that a pass of the frozen order waited for: how many blocks before its own had not computed."""
    shelf = Shelf()
    model, _ = built(DiskTier(shelf, ahead=10**6, ahead_count=3), None)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: shelf.events.append(("computed", number)))
    with torch.no_grad():
        for _ in range(4):
            begin = len(shelf.events)
            model(torch.ones(1, 16))
    computed, early = 0, []
    for kind, _ in shelf.events[begin:]:
        computed += kind == "computed"
        if kind == "wait":
            early.append(len(early) - computed)
    return early


@pytest.mark.parametrize("world", [1, 2])
def test_a_pass_waits_for_the_disk_one_block_ahead_and_not_for_all_at_once(world):
    early = run_ranks(waits_by_turn, world)[0]
    assert len(early) == 6
    assert max(early) <= 1
