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
