"""The words of many ranks travel in few messages: training, late needs and evaluation are what they are with one
all-gather.
"""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny
from dsx_zero.order import channel


class Skips(tiny.MLP):
    """Rank 1 leaves out a layer in some steps: it needs other collectives than the others."""

    def forward(self, x, skip=False):
        for index, layer in enumerate(self.layers[:-1]):
            if not (skip and index == 1):
                x = torch.nn.functional.gelu(layer(x))
        return self.layers[-1](x)


def trained(rank, world, many):
    channel.MANY = 2 if many else 10**6
    model, optimizer = dsx_zero.shard(
        Skips(depth=4),
        lambda p: torch.optim.SGD(p, lr=0.1),
        config={"stage": 3, "stage3_param_persistence_threshold": 0},
    )
    kind = channel.ManyRanks if many else channel.ControlChannel
    assert type(optimizer.runtime.publisher.order._channel) is kind
    with dsx_comm.count_traffic() as traffic:
        for step in range(8):
            x, y = model.example(3, seed=10 * step + rank)
            skips = rank == 1 and step in (2, 5, 6)
            torch.nn.functional.mse_loss(model(x, skips), y).backward()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
            if step % 3 == 0:
                with torch.no_grad():
                    model(x)
    assert bool(traffic.calls("all_gather_in_rounds")) == many
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_training_is_the_same(world):
    (few, *_), (many, *others) = (run_ranks(trained, world, flag, timeout=90) for flag in (False, True))
    for found in (many, *others):
        for name, value in few.items():
            assert torch.equal(found[name], value), name


def channel_between_machines(rank, world):
    """The ranks do not share memory: a group that is asked for as "dsx" is a gloo group with that name."""
    from dsx_comm.shm import register, segment

    def nothing_in_common(member, options):
        raise segment.Unavailable("another machine")

    register.map_segment = nothing_in_common
    channel.MANY = 2
    group = dsx_comm.new_group(backend="dsx")
    assert dsx_comm.get_backend(group) == "dsx" and dsx_comm.can_gather_in_rounds(group)
    found = channel.channel_of(group, rank, world)
    assert type(found) is channel.ManyRanks
    with dsx_comm.count_traffic() as traffic:
        answers = [found.ask(True), found.ask(rank != 1), found.ask(True)]
        said = [answer.get() for answer in answers]
        alike, differing = found.exchange((7, -1)), found.exchange((rank, -rank))
    assert traffic.calls("all_gather_in_rounds") == 5 and not traffic.calls("all_reduce")
    return said, alike, differing


def test_a_group_between_machines_takes_few_messages_whatever_it_is_called():
    for said, alike, differing in run_ranks(channel_between_machines, 3, timeout=60):
        assert said == [True, False, True]
        assert alike == [(7, -1)] * 3
        assert differing == [(0, 0), (1, -1), (2, -2)]


def channel_in_shared_memory(rank, world):
    channel.MANY = 2
    group = dsx_comm.new_group(backend="dsx")
    return dsx_comm.can_gather_in_rounds(group), type(channel.channel_of(group, rank, world)).__name__


def test_ranks_of_one_machine_keep_their_all_gather():
    assert run_ranks(channel_in_shared_memory, 2, timeout=60) == [(False, "ControlChannel")] * 2
