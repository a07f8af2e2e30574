"""When reductions start: a unit's as soon as it has its last gradient, whatever it got in earlier backwards."""

from __future__ import annotations

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 8, 5
WHOLE = tuple(range(DEPTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Runs the blocks of a path. Of every block one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, path: tuple[int, ...], at_first=None, reentrant: bool = False) -> torch.Tensor:
        for place, index in enumerate(path):
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
            if place == 0 and at_first is not None:
                x.register_hook(at_first)
        return x.square().mean()


class Reductions:
    """Counts the reductions of this rank."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, call):
        self.count += call.op.startswith("reduce_scatter")

    def end(self, token, call, result, is_async):
        pass


def built(model, stage):
    """Model, optimizer, and the count of reductions."""
    config = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": sum(p.numel() for p in model.blocks[0].parameters()),  # at stage 2 a block is a unit
    }
    counted = Reductions()
    dsx_comm.observe(counted)
    return *dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=stage, config=config), counted


def started(model, optimizer, counted, path):
    """Reductions that a backward had started when it came to the first block of the path, and all of the step."""
    seen, begin = [], counted.count
    x = torch.ones(2, WIDTH, requires_grad=True)
    model(x, path, lambda _: seen.append(counted.count - begin)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return seen[0], counted.count - begin


def unused_parameters(rank, world, stage):
    parts = built(Net(), stage)
    for step in range(4):
        early, every = started(*parts, WHOLE)
        # From the second backward on it is known that one parameter of each block gets no gradient.
        assert every == DEPTH, step
        assert early >= DEPTH - 2 or step == 0, (step, early)


@pytest.mark.parametrize("stage", [2, 3])
def test_units_with_unused_parameters_do_not_wait_for_them(stage):
    run_ranks(unused_parameters, 2, stage)


class Used(Net):
    """The same without unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            del block.unused


def first_use(rank, world, stage):
    parts = built(Used(), stage)
    for path in ((0, 1), WHOLE, WHOLE):  # the other blocks have no gradients in the first backward
        early, every = started(*parts, path)
        assert early >= len(path) - 2, (path, early)
        assert every == len(path), path


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_without_a_unit_says_nothing_about_its_gradients(stage):
    run_ranks(first_use, 2, stage)


def used_twice(rank, world, stage):
    """Two recomputed uses of a block give each of its parameters two gradients in one backward."""
    model, optimizer, counted = built(Used(), stage)
    for step in range(3):
        begin = counted.count
        model(torch.ones(2, WIDTH, requires_grad=True), (0, 1, 0), reentrant=True).backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first backward cannot know of the second gradients, which then travel together.
        assert counted.count - begin == (3 if step == 0 else 2), step


@pytest.mark.parametrize("stage", [2, 3])
def test_late_gradients_of_a_unit_are_reduced_together(stage):
    run_ranks(used_twice, 2, stage)
