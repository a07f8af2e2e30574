"""Activation checkpointing of sharded models: budgets, kept results and tiles give the losses of the model without
them, and all ranks make the same choice.
"""

import importlib
import time

import dsx_activations
import pytest
import torch
from dsx_activations.blocks import recompute_modules
from dsx_testkit import assert_close_named, run_ranks
from dsx_testkit.recomputation import losses_when_sharded
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, dropout, running statistics, and an activation that keeps much."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(y), 0.1)
        h = F.gelu(torch.tanh(torch.sigmoid(self.up(x)) * 2))
        return x + self.norm(self.down(h).transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, block=Block, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


SHAPE = (4, 16, 32)
"""Of an input."""


def with_a_slow_rank(rank, world, stage):
    def with_budget(model):
        budget = dsx_activations.apply_memory_budget(model, 0.5, operators=False)
        if rank == 1:  # a slow rank: its times differ
            model.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))
        return budget

    expected, _ = losses_when_sharded(Model(), stage, rank, SHAPE)
    got, budget = losses_when_sharded(Model(), stage, rank, SHAPE, prepare=with_budget)
    assert torch.equal(got, expected), (got, expected)
    return budget.choice


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_decide_alike_whatever_their_times(stage):
    first, second = run_ranks(with_a_slow_rank, 2, stage)
    assert first == second and first.fits and first.recomputed


def on_ranks(rank, world, stage):
    expected, _ = losses_when_sharded(Model(), stage, rank, SHAPE)
    got, budget = losses_when_sharded(
        Model(), stage, rank, SHAPE, prepare=lambda model: dsx_activations.apply_memory_budget(model, 0.6)
    )
    assert torch.equal(got, expected), (got, expected)
    return budget.choice


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_decide_alike_with_operators(stage):
    first, second = run_ranks(on_ranks, 2, stage)
    assert first == second and first.fits and first.recomputed


def kept_on_ranks(rank, world, stage):
    names = [f"blocks.{n}" for n in range(4)]
    expected, _ = losses_when_sharded(Model(), stage, rank, SHAPE)
    got, _ = losses_when_sharded(
        Model(), stage, rank, SHAPE, prepare=lambda model: recompute_modules(model, names, keeping_operators=names)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_blocks_that_keep_results_train_alike(stage):
    run_ranks(kept_on_ranks, 2, stage)


class Tiled(nn.Module):
    def __init__(self, tiles):
        super().__init__()
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
        self.blocks = nn.ModuleList([dsx_activations.TiledMLP(mlp, tiles) if tiles else mlp])

    def forward(self, x):
        return self.blocks[0](x).square().mean()


def tiled(rank, world, stage):
    want, got = (losses_when_sharded(Tiled(tiles), stage, rank, (2, 11, 6), lr=0.5)[0] for tiles in (0, 4))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tiled_module_trains_as_the_module(stage):
    run_ranks(tiled, 2, stage)


class Net(nn.Module):
    def __init__(self, tiled):
        super().__init__()
        torch.manual_seed(0)
        self.tiled = tiled
        self.up, self.down, self.lm_head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 101, bias=False)

    def mlp(self, x, scale):
        return self.down(F.gelu(self.up(x))) * scale

    def loss_of(self, x, y, mask=None):
        losses = F.cross_entropy(self.lm_head(x), y, reduction="none")
        return (losses if mask is None else losses * mask).sum()

    def forward(self, x, y, mask=None):
        scale = torch.tensor(2.0)
        if not self.tiled:
            h = x + self.mlp(x, scale)
            return self.loss_of(h.flatten(0, 1), y.flatten(), None if mask is None else mask.flatten())
        weights = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        h = x + dsx_activations.SequenceTiledCompute.apply(
            lambda x, scale: self.mlp(x, scale), x.shape[1], 4, ["x"], ["scale"], "x", weights, 1, None, x, scale
        )
        return dsx_activations.TiledFusedLogitsLoss.apply(
            Net.loss_of, self, h, y, mask, 4, [self.lm_head.weight], "sum"
        )


def example(seed, batch=2, tokens=13):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, 8, generator=generator)
    return x, torch.randint(0, 101, (batch, tokens), generator=generator)


def sharded(rank, world, stage):
    import dsx_zero

    found = []
    for tiled in (False, True):
        model, optimizer = dsx_zero.shard(
            Net(tiled),
            lambda p: torch.optim.SGD(p, lr=0.01),
            config={"stage": stage, "stage3_param_persistence_threshold": 0},
        )
        for step in range(3):
            model(*example(10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}
        found.append(whole)
        optimizer.release()
    assert_close_named(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_models_train_alike(stage):
    run_ranks(sharded, 2, stage)


class Compilable(nn.Module):
    """Three blocks, each called through `call`."""

    def __init__(self, call=None):
        super().__init__()
        torch.manual_seed(0)
        self.call = call or (lambda block, x: block(x))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + self.call(block, x)
        return x.square().mean()


def compiled(rank, world, how, offload):
    import dsx_zero

    dynamo = importlib.import_module("torch._dynamo")  # by name: `run_ranks` would pickle its configuration
    offloaded = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if offload else {}
    config = {"stage": 3, "stage3_param_persistence_threshold": 0, **offloaded}

    def run(compiles):
        dynamo.reset()
        model, optimizer = dsx_zero.shard(
            Compilable(dsx_activations.checkpoint if how == "checkpoint" else None),
            lambda p: torch.optim.AdamW(p, lr=0.01),
            config=config,
        )
        if compiles:
            names = dsx_zero.compile_units(model, backend="aot_eager", fullgraph=True)
            assert names == ("blocks.0", "blocks.1", "blocks.2")
        budget = dsx_activations.apply_memory_budget(model, 0.6) if how == "budget" else None
        found = []
        for step in range(4):
            with dynamo.config.patch(error_on_recompile=step >= 2):
                loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        assert budget is None or budget.choice.recomputed
        optimizer.release()
        return torch.stack(found)

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("how", "offload"), [("budget", False), ("checkpoint", True)])
def test_compiled_blocks_are_recomputed(how, offload):
    run_ranks(compiled, 2, how, offload)
