"""Budgets, host copies and tiles under DistributedDataParallel and `fully_shard`: the losses and weights of the model
without them, and the same choice on both ranks.
"""

import dsx_activations
import pytest
import torch
from dsx_activations.blocks import recompute_modules, recomputed_modules
from dsx_comm.lanes import DeferringLane
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(y), 0.1)
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens, targets, chunk=None):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        if chunk is None:
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return dsx_activations.linear_cross_entropy(x, self.head.weight, targets, chunk=chunk)


def wrapped(model, how):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how.startswith("ddp"):
        options = {"ddp-unused": {"find_unused_parameters": True}, "ddp-static": {"static_graph": True}}.get(how, {})
        return DistributedDataParallel(model, **options)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=how != "fsdp-resident")
    return fully_shard(model)


def train(model, rank, steps=4, **loss):
    """Losses, and the whole weights at the end."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(rank)
    for step in range(steps):
        rows = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        value = model(rows[:, :-1], rows[:, 1:], **loss)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [*found, *(w.detach().clone() for w in weights)]


def budgeted(rank, world, how, before):
    dsx_activations.configure(checkpoint_in_cpu=True, lane=DeferringLane())
    expected = train(wrapped(Language(), how), rank)
    model = Language()
    budget = dsx_activations.apply_memory_budget(model, 0.5) if before else None
    model = wrapped(model, how)
    budget = budget or dsx_activations.apply_memory_budget(model, 0.5)
    got = train(model, rank)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert len(recomputed_modules(model)) == len(budget.choice.recomputed) > 0
    return [name.removeprefix("module.") for name in budget.choice.recomputed], budget.choice.peak


@pytest.mark.parametrize(
    ("how", "before"),
    [("ddp", True), ("ddp-unused", False), ("ddp-static", False), ("fsdp", True), ("fsdp-resident", False)],
)
def test_a_budget_changes_nothing_but_memory(how, before):
    first, second = run_ranks(budgeted, 2, how, before)
    assert first == second


def kept(rank, world, how):
    names = [f"blocks.{n}" for n in range(4)]
    expected = train(wrapped(Language(), how), rank)
    for order in ("before", "behind"):
        model = Language()
        if order == "before":
            recompute_modules(model, names, keeping_operators=names[:2])
        inner, model = model, wrapped(model, how)
        if order == "behind":
            recompute_modules(inner, names, keeping_operators=names[:2])
        got = train(model, rank)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True)), order


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_recomputed_blocks_train_alike(how):
    run_ranks(kept, 2, how)


def chunked(rank, world, how):
    expected, got = train(wrapped(Language(), how), rank), train(wrapped(Language(), how), rank, chunk=5)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_loss_in_pieces_trains_alike(how):
    run_ranks(chunked, 2, how)
