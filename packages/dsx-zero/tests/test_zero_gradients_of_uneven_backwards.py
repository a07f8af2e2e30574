"""Gradients are read between backward and step while only some ranks have gradients that no reduction has taken."""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def read_while_uneven(rank, world, stage):
    plain = tiny.MLP()
    reference = sgd(plain.parameters())
    model, optimizer = dsx_zero.shard(
        copy.deepcopy(plain), sgd, stage=stage, config={"stage3_param_persistence_threshold": 0}
    )
    for step in range(6):
        uneven = step in (3, 4)  # the order of the reductions is frozen by then
        for r in range(world):
            for micro in range(2 if uneven and r == 0 else 1):
                batch = plain.example(2, seed=100 * step + 10 * micro + r)
                (plain.loss(*batch) / world).backward()
                if r == rank:
                    model.loss(*batch).backward()
        for name, parameter in plain.named_parameters():
            found = dsx_zero.safe_get_full_grad(name, optimizer=optimizer)
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-7, msg=f"{name} in step {step}")
        norm = optimizer.step(max_norm=0.5).grad_norm
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item(), rel=1e-5), step
        reference.step(), optimizer.zero_grad(), reference.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_read_the_mean(stage):
    run_ranks(read_while_uneven, 2, stage)
