"""Reductions of sparse gradients go on while backward does: a rank passes them before another one has come to them, and
trains with the same bits as without.
"""

from datetime import timedelta

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

ROWS = 50


class Calls(torch.autograd.Function):
    """The identity, which calls a function in its backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Net(nn.Module):
    """In backward the table comes first: `before` runs ahead of its gradient, `behind` after its reduction began."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # In a list each is a unit, so that the table's reduction need not wait for the other gradients.
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Embedding(ROWS, 4, sparse=True)])
        self.before = self.behind = lambda: None

    def forward(self, x, words):
        dense, table = self.layers
        h = Calls.apply(dense(x), self.behind)
        return (h * Calls.apply(table(words), self.before)).square().mean()


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator), torch.randint(0, ROWS, (6,), generator=generator)


def make():
    return dsx_zero.shard(
        Net(), lambda p: torch.optim.SGD(p, lr=0.1), stage=0, sparse_gradients=True, config={"reduce_bucket_size": 16}
    )


def passes(rank, world):
    store, limit = _get_default_store(), timedelta(seconds=20)
    model, optimizer = make()
    for step in range(5):
        if step == 4:  # the order is frozen by now: no words are exchanged within the step
            if rank == 0:
                model.behind = lambda: store.set("rank 0 has passed the table", "yes")
            else:
                model.before = lambda: store.wait(["rank 0 has passed the table"], limit)
        model(*batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def plain(world):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        for rank in range(world):
            (model(*batch(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_backward_goes_on_before_other_ranks_have_come_to_the_reduction(world):
    want = plain(world)
    for found in run_ranks(passes, world, timeout=90):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def same_bits(rank, world):
    """Beside the reductions of other gradients, of several tables and over several backwards."""

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tables = nn.ModuleList(nn.Embedding(ROWS, 4, sparse=True) for _ in range(4))
            self.dense = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, words):
            for table, dense in zip(self.tables, self.dense):
                x = torch.tanh(dense(x) + table(words))
            return x.square().mean()

    model, optimizer = dsx_zero.shard(
        Tables(), lambda p: torch.optim.Adagrad(p, lr=0.1), stage=0, sparse_gradients=True
    )
    for step in range(6):
        for micro in range(2):
            model(*batch(10 * step + micro, rank)).backward()
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(world)]
    dsx_comm.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_all_ranks_have_the_same_bits(backend):
    run_ranks(same_bits, 3, backend=backend, timeout=90)
