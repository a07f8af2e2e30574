"""Stage 3: how many units are gathered at one time, in every kind of pass, and that none is left behind it."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
import torch.nn.functional as F
from dsx_testkit import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 64, 6
UNIT = WIDTH * WIDTH * 4
CONFIG = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


class Layers(nn.Module):
    """Each layer is a unit. `recompute`: None, or the `use_reentrant` of a checkpoint around each layer. `borrows`: the
    last layer's weight is used once more, outside of its module.
    """

    def __init__(self, recompute: bool | None = None, borrows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.recompute, self.borrows = recompute, borrows

    def forward(self, x: torch.Tensor, path: tuple[int, ...] = tuple(range(DEPTH))) -> torch.Tensor:
        for layer in (self.layers[index] for index in path):
            y = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
            x = x + torch.tanh(y)
        return F.linear(x, self.layers[-1].weight) if self.borrows else x


class Gathered:
    """Notes the most bytes that are gathered, whenever a layer has run, forward or backward."""

    def __init__(self, model: nn.Module, optimizer: dsx_zero.ZeroOptimizer) -> None:
        self._publisher, self.most = optimizer.runtime.publisher, 0
        for layer in model.layers:
            layer.register_forward_hook(self._after_forward)

    def now(self) -> int:
        return sum(tensor.nbytes for tensor in self._publisher.tensors())

    def _look(self, *_: object) -> None:
        self.most = max(self.most, self.now())

    def _after_forward(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        self._look()
        if output.requires_grad:
            output.register_hook(self._look)

    def take(self) -> int:
        most, self.most = self.most, 0
        return most


def sharded(config, **shape):
    model, optimizer = dsx_zero.shard(
        Layers(**shape), lambda p: torch.optim.SGD(p, lr=1e-3), stage=3, config={**CONFIG, **config}
    )
    return model, optimizer, Gathered(model, optimizer)


def passes(model, optimizer, gathered):
    """Most units gathered in a training step, and in an evaluation; nothing is left after either."""
    found = []
    for _ in range(5):
        x = torch.ones(2, WIDTH, requires_grad=True)
        model(x).square().mean().backward()
        assert gathered.now() == 0
        optimizer.step()
        optimizer.zero_grad()
        found.append(gathered.take() / UNIT)
        with torch.no_grad():
            model(x)
        assert gathered.now() == 0
        found.append(gathered.take() / UNIT)
    return found


def every_kind(rank, world):
    for shape in ({}, {"recompute": False}, {"recompute": True}, {"borrows": True}):
        # One unit is in use and one is gathered ahead; the borrowed one stays to the end of its pass.
        found = passes(*sharded({"stage3_prefetch_bucket_size": WIDTH * WIDTH}, **shape))
        assert max(found) <= 2 + shape.get("borrows", False), (shape, found)


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_in_use_and_one_ahead(world):
    run_ranks(every_kind, world)


def under_limits(rank, world):
    whole = DEPTH * WIDTH * WIDTH
    for live in (2, 3):
        limits = {"stage3_prefetch_bucket_size": whole, "stage3_max_live_parameters": live * WIDTH * WIDTH}
        found = passes(*sharded(limits))
        assert max(found) == live, (live, found)
    assert max(passes(*sharded({"stage3_prefetch_bucket_size": whole}))) > 3  # without that limit


@pytest.mark.parametrize("world", [1, 2])
def test_gathers_ahead_stay_within_the_live_parameters(world):
    run_ranks(under_limits, world)


def skipping(rank, world):
    """Each rank skips other layers of an order that is frozen, in evaluation and in training."""
    model, optimizer, gathered = sharded({"stage3_prefetch_bucket_size": WIDTH * WIDTH})
    passes(model, optimizer, gathered)
    for skipped in ({0, 3}, {DEPTH - 2, DEPTH - 1}, {1, 2, 4}):
        path = tuple(index for index in range(DEPTH) if (index in skipped) == bool(rank))
        with torch.no_grad():
            model(torch.ones(2, WIDTH), path)
        assert gathered.now() == 0, path
        model(torch.ones(2, WIDTH), path).square().mean().backward()
        assert gathered.now() == 0, path
        optimizer.step()
        optimizer.zero_grad()
        assert gathered.take() <= 2 * UNIT, path


def test_units_that_a_rank_skips_are_not_kept():
    run_ranks(skipping, 2)


class Parallel(Layers):
    """Every layer gets the input of the model, which needs no gradient: none of its uses has an input that tells when
    its backward is over, but its weight's gradient does.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(layer(x.detach())) for layer in self.layers]).sum(0)


def without_gradients_of_inputs(rank, world):
    config = {**CONFIG, "stage3_prefetch_bucket_size": WIDTH * WIDTH}
    model, optimizer = dsx_zero.shard(Parallel(), lambda p: torch.optim.SGD(p, lr=1e-3), stage=3, config=config)
    found = passes(model, optimizer, Gathered(model, optimizer))
    # How many gradients a layer gets is known after the first backward.
    assert max(found[1:]) <= 3, found


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_without_gradients_of_inputs_is_freed_with_its_last_gradient(world):
    run_ranks(without_gradients_of_inputs, world)
