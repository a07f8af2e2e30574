"""Recomputation that keeps the results of matrix products and attention: gradients are the same bits, less is computed
again, budgets choose it where it fits best and hold, and what it cannot serve is left alone.
"""

import itertools
import random

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationStateError, measured
from dsx_activations.blocks import recompute_modules, recomputed_modules
from dsx_activations.operators import keep_operators
from dsx_activations.plan import BlockCost, Selective, choose, peak_bytes
from dsx_testkit.recomputation import (
    OperatorWatch,
    bytes_after_forward,
    gradients_of_steps,
    is_product,
    simulated_peak,
)
from dsx_testkit.recomputed_models import SHAPE, Model
from torch import nn


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_of_three_is_the_best_of_all(seed):
    rng = random.Random(seed)
    costs = []
    for n in range(5):
        kept, seconds = rng.randint(40, 90), rng.random()
        part = rng.randint(5, 30)
        some = Selective(part, kept + rng.randint(0, 9), seconds * rng.random()) if rng.random() < 0.8 else None
        costs.append(BlockCost(str(n), kept, 9, seconds, rng.choice((0, 7)), some))
    outside = rng.choice((0, 30))
    options = [("all", "inputs", *(("operators",) if c.selective else ())) for c in costs]
    everything = peak_bytes(costs, (), outside=outside)
    seconds_of = {"all": lambda c: 0.0, "inputs": lambda c: c.seconds, "operators": lambda c: c.selective.seconds}
    for budget in (everything // 4, everything // 2, everything * 3 // 4, everything):
        found = choose(costs, budget, outside=outside)
        how = [
            "operators" if c.name in found.selected else "inputs" if c.name in found.recomputed else "all"
            for c in costs
        ]
        assert set(found.selected) <= set(found.recomputed)
        assert found.peak == simulated_peak(costs, how, outside)
        possible = [
            sum(seconds_of[what](cost) for cost, what in zip(costs, some))
            for some in itertools.product(*options)
            if simulated_peak(costs, some, outside) <= budget
        ]
        assert found.fits == bool(possible)
        if possible:
            assert found.seconds == pytest.approx(min(possible))


def train(model, steps=3, twice=False):
    return gradients_of_steps(model, SHAPE, steps=steps, twice=twice)


def products_of_a_step(model):
    x, seen = torch.randn(SHAPE), []
    with OperatorWatch(lambda function, _: seen.append(is_product(function))):
        model(x).backward()
    return sum(seen)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_the_same_bits(twice):
    expected = train(Model(), twice=twice)
    model = Model()
    names = [f"blocks.{n}" for n in range(4)]
    recompute_modules(model, names, keeping_operators=names[1:])
    assert recomputed_modules(model) == tuple(names)
    got = train(model, twice=twice)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nothing_expensive_is_computed_again():
    plain, all_again, some_again = Model(), Model(), Model()
    names = [f"blocks.{n}" for n in range(4)]
    recompute_modules(all_again, names)
    recompute_modules(some_again, names, keeping_operators=names)
    counts = [products_of_a_step(model) for model in (plain, some_again, all_again)]
    assert counts[0] == counts[1] < counts[2]
    held = [bytes_after_forward(model, torch.randn(SHAPE)) for model in (plain, some_again, all_again)]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize("fraction", [0.4, 0.6, 0.8])
def test_budgets_hold_and_training_is_the_same(fraction):
    expected, everything = train(Model()), bytes_after_forward(Model(), torch.randn(SHAPE))
    model, said = Model(), []
    budget = dsx_activations.apply_memory_budget(model, fraction, announce=said.append)
    assert all(torch.equal(a, b) for a, b in zip(train(model), expected, strict=True))
    choice = budget.choice
    assert choice.fits and choice.peak_of_all_kept == pytest.approx(everything, rel=0.02)
    assert bytes_after_forward(model, torch.randn(SHAPE)) <= choice.budget * 1.01 + 4096
    assert "keep matrix products and attention" in said[0]
    other = dsx_activations.apply_memory_budget(Model(), fraction)
    other.load_state_dict(budget.state_dict())
    assert other.choice == choice


class Clock:
    """Time passes with operators: much with a matrix product, hardly any with others."""

    now = 0.0

    def tick(self, function, _):
        self.now += 1.0 if is_product(function) else 0.001

    def perf_counter(self):
        return self.now


def test_a_budget_keeps_products_where_they_cost_all_of_the_time(monkeypatch):
    chosen = {}
    for operators in (True, False):
        model, clock = Model(), Clock()
        monkeypatch.setattr(measured, "time", clock)
        budget = dsx_activations.apply_memory_budget(model, 0.7, operators=operators)
        with OperatorWatch(clock.tick):
            model(torch.randn(SHAPE)).backward()
        chosen[operators] = budget.choice
        assert budget.choice.fits
    assert chosen[True].selected and chosen[True].seconds < 1.0 <= chosen[False].seconds
    assert chosen[False].recomputed and not chosen[False].selected


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 256), nn.ReLU(inplace=True), nn.Linear(256, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class HandsOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(torch.tanh(torch.sin(x)))


class Writes(Model):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.last(x).square().mean()


def test_results_that_are_written_in_place_are_not_kept():
    for model, plain in ((Model(InPlace), Model(InPlace)), (Writes(HandsOut), Writes(HandsOut))):
        budget = dsx_activations.apply_memory_budget(model, 0.6)
        got = train(model)
        assert all(torch.equal(a, b) for a, b in zip(got, train(plain), strict=True))
        assert budget.choice.selected == ()
    model = Model(InPlace)
    recompute_modules(model, ["blocks.0"], keeping_operators=["blocks.0"])
    with pytest.raises(RuntimeError, match=r"written in place.*operators=False"):
        train(model)


def test_context_fn_is_for_the_form_that_does_not_re_enter():
    x = torch.randn(3, 3, requires_grad=True)
    y = dsx_activations.checkpoint(lambda x: (x @ x).tanh(), x, context_fn=keep_operators)
    y.sum().backward()
    with pytest.raises(ActivationStateError, match="context_fn"):
        dsx_activations.checkpoint(torch.tanh, x, use_reentrant=True, context_fn=keep_operators)


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "forward"])
def test_a_whole_model_that_is_compiled_after_the_decision_keeps_recomputing(how, caplog):
    """PyTorch traces a module by its class, and would leave the recomputation out without a word."""
    torch._dynamo.reset()
    expected = train(Model(Plain), steps=2)
    model = Model(Plain)
    names = [f"blocks.{n}" for n in range(4)]
    recompute_modules(model, names, keeping_operators=names[:2])
    called = model
    if how == "torch.compile(model)":
        called = torch.compile(model, backend="aot_eager")
    elif how == "model.compile()":
        model.compile(backend="aot_eager")
    else:
        model.forward = torch.compile(model.forward, backend="aot_eager")
    x, counted = torch.randn(SHAPE), []
    for block in (model.blocks[0], model.blocks[3]):
        block.up.register_forward_hook(lambda *_: counted.append(1))
    called(x).backward()
    assert len(counted) == 4  # each runs again in the backward
    model.zero_grad()
    torch.testing.assert_close(train(called, steps=2), expected)
    assert caplog.text.count("compiled as a whole") == 1


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(torch.sin(self.up(x))))
