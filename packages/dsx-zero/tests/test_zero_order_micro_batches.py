"""Stage 3: several micro-batches per step have one frozen order, in which nothing is gathered twice or in vain."""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.gather.registry import stage3_of
from torch import nn

SETTINGS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
BLOCKS, MICRO = 4, 3


class Net(nn.Module):
    """`frozen`: the first block is; backward then ends at the second one, and the next forward begins with another."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def counted(model):
    """Lists that get an entry for each word between the ranks, and for each gather."""
    order = stage3_of(model).order
    words, gathers = [], []
    post, run_gather = order._channel.post, order._executor.run_gather

    def note_word(sent):
        words.append(sent)
        return post(sent)

    def note_gather(unit):
        gathers.append(unit)
        run_gather(unit)

    order._channel.post, order._executor.run_gather = note_word, note_gather
    return order, words, gathers


def accumulated(rank, world, frozen):
    plain = Net(frozen)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = dsx_zero.shard(
        copy.deepcopy(plain), lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config=SETTINGS
    )
    order, words, gathers = counted(model)
    by_step = []
    for step in range(6):
        words.clear(), gathers.clear()
        for micro in range(MICRO):
            batches = torch.randn(world, 2, 6, generator=torch.Generator().manual_seed(10 * step + micro))
            model(batches[rank]).backward()
            (sum(plain(batch) for batch in batches) / world).backward()
        optimizer.step(), optimizer.zero_grad(), reference.step(), reference.zero_grad()
        by_step.append((len(words), list(gathers)))
    assert order.schedule is not None
    asked = by_step[0][1]  # what was gathered when each unit was asked for
    assert asked == asked[: len(asked) // MICRO] * MICRO
    assert by_step[3:] == [(1, asked)] * 3
    with dsx_zero.GatheredParameters(model):
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_step_of_several_micro_batches_exchanges_one_word(world, frozen):
    run_ranks(accumulated, world, frozen)
