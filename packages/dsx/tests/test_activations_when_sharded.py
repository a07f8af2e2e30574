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
from dsx_testkit.recomputed_models import SHAPE, Model, Net, example
from torch import nn


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
