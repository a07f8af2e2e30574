"""What ranks exchange in a step whose order is frozen: the squares of the norm travel with the word of the
agreement.
"""

from __future__ import annotations

import copy
import math

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny

SETTINGS = {"stage3_param_persistence_threshold": 0}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Calls:
    """The collectives of this rank, by name and bytes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def begin(self, call):
        self.seen.append((call.op, call.size))

    def end(self, token, call, result, is_async):
        pass

    def take(self):
        seen, self.seen = self.seen, []
        return seen


def shard(stage, low=False):
    plain = tiny.MLP()
    model = copy.deepcopy(plain)
    if low:
        model.half()
    model, optimizer = dsx_zero.shard(model, sgd, stage=stage, config=SETTINGS)
    return plain, sgd(plain.parameters()), model, optimizer


def one_word_per_step(rank, world, stage, low):
    plain, reference, model, optimizer = shard(stage, low)
    calls = Calls()
    stop = dsx_comm.observe(calls)
    dtype = torch.float16 if low else torch.float32
    for step in range(5):
        batches = [plain.example(2, seed=10 * step + r) for r in range(world)]
        (sum(plain.loss(*batch) for batch in batches) / world).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
        x, y = batches[rank]
        torch.nn.functional.mse_loss(model(x.to(dtype)).float(), y).backward()
        calls.take()
        outcome = optimizer.step(max_norm=0.5)
        small = [op for op, size in calls.take() if size <= 1024 and op != "reduce_scatter_tensor"]
        assert outcome.grad_norm == pytest.approx(expected, rel=2e-2 if low else 1e-5)
        reference.step(), optimizer.zero_grad(), reference.zero_grad()
        if step >= 2:
            words = [op for op in small if op == "all_gather_into_tensor"]
            assert "all_reduce" not in small
            assert len(words) == (1 if stage == 3 else 2), small  # stages 1-2 gather the small model's unit
    stop()


@pytest.mark.parametrize(("stage", "low"), [(1, False), (2, False), (3, False), (3, True)])
def test_a_frozen_step_exchanges_one_word(stage, low):
    run_ranks(one_word_per_step, 2, stage, low)


def test_three_ranks():
    run_ranks(one_word_per_step, 3, 3, False)


def late(rank, world, stage):
    """A rank with another schedule: what is reduced at the boundary counts in the norm of all ranks."""
    plain, reference, model, optimizer = shard(stage)
    for step in range(7):
        strays = step in (3, 5)
        batches = [plain.example(2, seed=10 * step + r) for r in range(world)]
        for r, batch in enumerate(batches):
            for _ in range(2 if strays and r == 0 else 1):
                (plain.loss(*batch) / world).backward()
        for _ in range(2 if strays and rank == 0 else 1):
            model.loss(*batches[rank]).backward()
        outcome = optimizer.step(max_norm=0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
        assert outcome.grad_norm == pytest.approx(expected, rel=1e-5), step
        reference.step(), optimizer.zero_grad(), reference.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_come_late_count_in_the_norm(stage):
    run_ranks(late, 2, stage)


def not_finite(rank, world, stage):
    plain, _, model, optimizer = shard(stage)
    for step in range(4):
        x, y = plain.example(2, seed=step)
        loss = model.loss(x, y)
        (loss * (math.inf if step == 3 and rank == 1 else 1.0)).backward()
        outcome = optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(outcome.grad_norm) == (step < 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_norm_that_is_not_finite_is_so_on_all_ranks(stage):
    run_ranks(not_finite, 2, stage)
