"""A weight that is used outside its module's forward, in a unit of its own: gathered for it, and there in backward."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
import torch.nn.functional as F
from dsx_testkit import run_ranks
from torch import nn

VOCABULARY, WIDTH = 4200, 256  # above a million elements the embedding is a unit of its own


class Tied(nn.Module):
    """An embedding whose weight the model uses again, once or several times."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses = uses
        self.embedding, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weight_first = self.embedding.weight.square().mean() if self.uses > 2 else 0.0
        h = torch.tanh(self.layer(self.embedding(x)))
        if self.uses > 1:
            h = h + F.linear(torch.tanh(F.linear(h, self.embedding.weight)), self.embedding.weight.T) / VOCABULARY
        return F.cross_entropy(F.linear(h, self.embedding.weight).flatten(0, 1), x.flatten()) + weight_first


def steps(model, optimizer, rank, world):
    losses = []
    for step in range(5):
        x = torch.arange(16 * world).view(world * 2, 8) * 7 + step
        x = x[rank * 2 : rank * 2 + 2] if rank is not None else x
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(rank, world, uses, config):
    model, optimizer = dsx_zero.shard(Tied(uses), lambda p: torch.optim.SGD(p, lr=1e-3), config={"stage": 3, **config})
    losses = torch.tensor(steps(model, optimizer, rank, world), dtype=torch.float64) / world
    if world > 1:
        torch.distributed.all_reduce(losses)
    return losses.tolist()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("config", [{}, {"stage3_max_reuse_distance": 0}], ids=["kept", "freed"])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_losses_are_torchs(world, config, uses):
    plain = Tied(uses)
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=1e-3), None, world)
    assert run_ranks(trained, world, uses, config)[0] == pytest.approx(expected, rel=1e-5)
