"""`apply_memory_budget`: the choice is the best of all, what is kept holds the budget, training is that of the model
without it, and every rank decides alike.
"""

import copy
import itertools
import random
import time

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationArgumentError, ActivationConfigError
from dsx_activations.blocks import recomputed_modules
from dsx_activations.plan import BlockCost, choose, peak_bytes
from dsx_testkit.recomputation import bytes_after_forward, gradients_of_steps, simulated_peak
from torch import nn


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_best_of_all(seed):
    rng = random.Random(seed)
    alike = seed % 2
    costs = [
        BlockCost(
            str(n), 90 if alike else rng.randint(20, 90), 9, 1.0 if alike else rng.random(), rng.choice((0, 0, 7))
        )
        for n in range(7)
    ]
    outside = rng.choice((0, 30))

    def peak(recomputed):
        return simulated_peak(costs, ["inputs" if cost.name in recomputed else "all" for cost in costs], outside)

    everything = peak_bytes(costs, (), outside=outside)
    for budget in (everything // 4, everything // 2, everything * 3 // 4, everything):
        found = choose(costs, budget, outside=outside)
        assert found.peak == peak(found.recomputed)
        possible = [
            sum(cost.seconds for cost in some)
            for count in range(len(costs) + 1)
            for some in itertools.combinations(costs, count)
            if peak({cost.name for cost in some}) <= budget
        ]
        assert found.fits == bool(possible)
        if possible:
            assert found.seconds == pytest.approx(min(possible))
        else:
            assert len(found.recomputed) == len(costs)


def test_many_blocks_of_many_sizes_are_decided_soon_and_within_the_budget():
    rng = random.Random(0)
    costs = [BlockCost(str(n), rng.randint(10**8, 10**9), rng.randint(10**6, 10**7), rng.random()) for n in range(96)]
    budget = sum(cost.kept for cost in costs) // 2
    began = time.perf_counter()
    found = choose(costs, budget)
    assert found.fits and found.peak > 0.97 * budget
    assert time.perf_counter() - began < 30


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, width), nn.Linear(width, 32), nn.BatchNorm1d(32)

    def forward(self, x, mask):
        y = torch.nn.functional.dropout(torch.nn.functional.gelu(self.up(x)), 0.1)
        return x + self.norm(self.down(y)) * mask


class Model(nn.Module):
    def __init__(self, widths=(64, 128, 256, 64, 128, 256)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x):
        x, mask = torch.tanh(self.first(x)), torch.ones(32)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x).square().mean()


SHAPE = (128, 32)
"""Of an input."""


def train(model, steps=3):
    return gradients_of_steps(model, SHAPE, steps=steps)


@pytest.mark.parametrize("fraction", [0.4, 0.5, 0.75, 1.0])
def test_training_is_the_same_and_the_budget_holds(fraction):
    expected = train(Model())
    everything = bytes_after_forward(Model(), torch.randn(SHAPE))
    model = Model()
    budget = dsx_activations.apply_memory_budget(model, fraction)
    assert all(torch.equal(a, b) for a, b in zip(train(model), expected, strict=True))
    choice = budget.choice
    assert choice.fits and set(choice.recomputed) == set(recomputed_modules(model))
    assert choice.peak_of_all_kept == pytest.approx(everything, rel=0.02)
    assert bytes_after_forward(model, torch.randn(SHAPE)) <= choice.budget * 1.01 + 4096
    assert (choice.recomputed == ()) == (fraction == 1.0)


def test_a_budget_that_cannot_be_held_recomputes_everything_and_says_so(caplog):
    model = Model()
    budget = dsx_activations.apply_memory_budget(model, 1000)
    train(model, steps=1)
    assert len(budget.choice.recomputed) == 6 and not budget.choice.fits
    assert "cannot be held" in caplog.text


def test_the_decision_is_kept_and_taken_over():
    model, said = Model(), []
    first = dsx_activations.apply_memory_budget(model, 0.5, announce=said.append)
    train(model, steps=1)
    assert len(said) == 1 and "recomputed blocks: blocks." in said[0]
    second = dsx_activations.apply_memory_budget(Model(), 0.5)
    second.load_state_dict(first.state_dict())
    assert second.choice == first.choice
    other = dsx_activations.apply_memory_budget(Model(), 0.75)
    other.load_state_dict(first.state_dict())
    assert other.choice is None
    copied = copy.deepcopy(model)
    assert recomputed_modules(copied) == () and recomputed_modules(model)
    first.remove()
    assert recomputed_modules(model) == ()


def test_evaluation_decides_nothing():
    model = Model()
    budget = dsx_activations.apply_memory_budget(model, 0.5)
    with torch.no_grad():
        model(torch.randn(4, 32))
    model.eval()(torch.randn(4, 32))
    assert budget.choice is None


def test_a_model_that_is_compiled_as_a_whole_is_reported(caplog):
    model = Model()
    dsx_activations.apply_memory_budget(model, 0.5)
    model.forward = torch.compile(model.forward, backend="eager")
    train(model, steps=2)
    assert caplog.text.count("compile the blocks") == 1


def test_mistakes_are_named():
    for wrong in (0, -1, True, 1.5, "half", float("nan")):
        with pytest.raises(ActivationConfigError, match="memory_budget"):
            dsx_activations.apply_memory_budget(Model(), wrong)
    with pytest.raises(ActivationArgumentError, match="ModuleList"):
        dsx_activations.apply_memory_budget(nn.Linear(2, 2), 0.5)
    with pytest.raises(ActivationArgumentError, match="nowhere"):
        dsx_activations.apply_memory_budget(Model(), 0.5, blocks=["nowhere"])
