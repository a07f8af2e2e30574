"""Freezing and unfreezing parameters after the model was sharded: as in plain torch, or an error, never a silent
difference.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def freeze_for_a_while(rank, world, stage, low):
    """Two steps, three with a frozen weight and a frozen bias, two again: equal to plain torch, which skips what has
    no gradient.
    """
    dtype = torch.bfloat16 if low else torch.float32
    reference = tiny.MLP(depth=4)
    plain = adamw(reference.parameters())
    model, optimizer = dsx_zero.shard(
        tiny.MLP(depth=4).to(dtype), adamw, stage=stage, config={"stage3_param_persistence_threshold": 20}
    )
    names = [name for name, _ in model.named_parameters()][:2]
    for step in range(7):
        if step in (2, 5):
            for name in names:
                model.get_parameter(name).requires_grad_(step == 5)
                reference.get_parameter(name).requires_grad_(step == 5)
        before = [whole(model.get_parameter(name)) for name in names]
        x, y = reference.example(2 * world, seed=step)
        model.loss(x[2 * rank : 2 * rank + 2].to(dtype), y[2 * rank : 2 * rank + 2]).backward()
        optimizer.step(max_norm=0.0)
        optimizer.zero_grad()
        reference.loss(x, y).backward()
        plain.step()
        plain.zero_grad()
        moved = [not torch.equal(b, whole(model.get_parameter(name))) for b, name in zip(before, names)]
        assert moved == [not 2 <= step < 5] * 2, (stage, step, moved)
    if not low:
        found = {name: whole(p) for name, p in model.named_parameters()}
        assert_close_named(found, {n: p.detach() for n, p in reference.named_parameters()}, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_freezing_for_a_while(world):
    for stage in range(4):
        for low in (False, True):
            run_ranks(freeze_for_a_while, world, stage, low)


def unfreeze(rank, world, stage):
    model = tiny.MLP(depth=4)
    first = next(name for name, _ in model.named_parameters())
    model.get_parameter(first).requires_grad_(False)
    model, optimizer = dsx_zero.shard(
        model, lambda params: adamw(model.parameters()), stage=stage, config={"stage3_param_persistence_threshold": 0}
    )
    x, y = model.example(2, seed=rank)
    before = whole(model.get_parameter(first))
    model.get_parameter(first).requires_grad_(True)
    model.loss(x, y).backward()
    optimizer.step()
    assert not torch.equal(before, whole(model.get_parameter(first)))


@pytest.mark.parametrize("world", [1, 2])
def test_unfreezing_what_was_frozen_when_the_model_was_sharded(world):
    for stage in range(4):
        run_ranks(unfreeze, world, stage)


def two_owners(rank, world, stage):
    """A parameter of another optimizer requires gradients all the time; that is no unfreezing."""
    model = tiny.MLP(depth=4)
    mine = [p for n, p in model.named_parameters() if not n.startswith("layers.0")]
    model, optimizer = dsx_zero.shard(model, adamw(mine), stage=stage)
    x, y = model.example(2, seed=rank)
    model.loss(x, y).backward()
    optimizer.step()


def test_parameters_of_another_optimizer_are_left_alone():
    for stage in range(3):
        run_ranks(two_owners, 2, stage)


def init_and_freeze(rank, world):
    with dsx_zero.Init():
        model = tiny.MLP(depth=4)
    first, second = [name for name, _ in model.named_parameters()][:2]
    model.get_parameter(first).requires_grad_(False)
    model.get_parameter(second).requires_grad_(False).requires_grad_(True)
    model, optimizer = dsx_zero.shard(model, adamw, stage=3, config={"stage3_param_persistence_threshold": 0})
    before = whole(model.get_parameter(first)), whole(model.get_parameter(second))
    x, y = tiny.MLP(depth=4).example(2, seed=rank)
    model.loss(x, y).backward()
    optimizer.step()
    assert torch.equal(before[0], whole(model.get_parameter(first)))
    assert not torch.equal(before[1], whole(model.get_parameter(second)))


def test_freezing_between_init_and_shard():
    run_ranks(init_and_freeze, 2)


def freeze_on_one_rank(rank, world, stage, agreement):
    """The step names the parameter on all ranks and changes nothing; frozen on all ranks, training goes on."""
    model, optimizer = dsx_zero.shard(
        tiny.MLP(depth=4),
        adamw,
        stage=stage,
        config={"stage3_param_persistence_threshold": 0, "step_agreement": agreement},
    )
    name = next(name for name, _ in model.named_parameters())
    for step in range(5):
        if step == 3:
            model.get_parameter(name).requires_grad_(rank != 1)
        model.loss(*model.example(2, seed=10 * step + rank)).backward()
        if step == 3:
            before = {n: whole(p) for n, p in model.named_parameters()}
            with pytest.raises(dsx_zero.ZeroStateError, match=rf"{name} \(requires_grad is False on rank 1\)"):
                optimizer.step()
            for n, p in model.named_parameters():
                assert torch.equal(before[n], whole(p))
            model.get_parameter(name).requires_grad_(False)
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(before[name], whole(model.get_parameter(name)))


@pytest.mark.parametrize("stage", range(4))
def test_freezing_on_one_rank_only_is_refused(stage):
    run_ranks(freeze_on_one_rank, 2, stage, "message")
    if stage:
        run_ranks(freeze_on_one_rank, 2, stage, "norm")
