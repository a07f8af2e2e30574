"""Ranks run different numbers of forwards without gradients, before and after training steps, and nobody waits for
ever.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def generate_and_train(rank, world, stage):
    """Rank r generates r * 3 times; what it computes is what plain torch computes, and training goes on as before."""
    reference = tiny.MLP()
    plain_optimizer = sgd(reference.parameters())
    model, optimizer = dsx_zero.shard(tiny.MLP(), sgd, stage=stage, config={"stage3_param_persistence_threshold": 0})
    for step in range(6):
        x, y = reference.example(2 * world, seed=step)
        with torch.no_grad(), dsx_zero.uneven_forwards(model):
            for _ in range(3 * rank if step % 2 else 2 * (world - 1 - rank)):
                assert torch.allclose(model(x), reference(x), rtol=1e-5, atol=1e-6)
        model.loss(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.loss(x, y).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    found = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    assert_close_named(found, {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_generation_of_different_lengths(world):
    for stage in (0, 3) if world < 3 else (3,):
        run_ranks(generate_and_train, world, stage)


def leave_and_step(rank, world):
    model, optimizer = dsx_zero.shard(tiny.MLP(), sgd, stage=3, config={"stage3_param_persistence_threshold": 0})
    x, y = tiny.MLP().example(2, seed=rank)
    with pytest.raises(dsx_zero.ScheduleDivergence, match="rank 0 at join, rank 1 at boundary"):
        if rank == 0:
            with torch.no_grad(), dsx_zero.uneven_forwards(model):
                model(x)
        else:
            model.loss(x, y).backward()
            optimizer.step()


def test_a_rank_at_its_step_is_named():
    run_ranks(leave_and_step, 2)
