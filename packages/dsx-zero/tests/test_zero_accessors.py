"""Accessors for single parameters agree with plain PyTorch in every stage, whole and local."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny
from dsx_zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)


def start(rank, world, stage, low=False):
    reference = tiny.MLP()
    x, y = reference.example(2 * world)
    reference.loss(x, y).backward()
    model = tiny.MLP().to(torch.bfloat16 if low else torch.float32)
    model, optimizer = dsx_zero.shard(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        stage=stage,
        config={"stage3_param_persistence_threshold": 8},
    )
    rows = slice(2 * rank, 2 * rank + 2)
    model.loss(x[rows].to(next(model.parameters()).dtype), y[rows]).backward()
    return reference, model, optimizer


def named(model):
    return dict(model.named_parameters())


def shown(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().float()


def read(rank, world):
    for stage in range(4):
        reference, model, optimizer = start(rank, world, stage)
        grads = {n: safe_get_full_grad(p) for n, p in named(model).items()}
        assert_close_named(grads, {n: p.grad for n, p in named(reference).items()}, rtol=1e-5, atol=1e-7)
        assert all(safe_get_full_optimizer_state(p, "momentum_buffer") is None for p in named(model).values())
        optimizer.step()
        momenta = {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in named(model).items()}
        assert_close_named(momenta, {n: p.grad for n, p in named(reference).items()}, rtol=1e-5, atol=1e-7)
        torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
        masters = {n: safe_get_full_fp32_param(p) for n, p in named(model).items()}
        want = {n: p.detach() for n, p in named(reference).items()}
        assert_close_named(masters, want, rtol=1e-5, atol=1e-7)
        by_name = {n: safe_get_full_fp32_param(n, optimizer=optimizer) for n in want}
        assert_close_named(by_name, masters)
        optimizer.zero_grad()
        assert all(safe_get_full_grad(p) is None for p in named(model).values())


def write(rank, world):
    for stage in range(4):
        for low in (False, True):
            _, model, optimizer = start(rank, world, stage, low)
            optimizer.step()
            for name, p in named(model).items():
                value = torch.arange(p.numel(), dtype=torch.float32).view(p.shape) / 7
                safe_set_full_fp32_param(p, value)
                torch.testing.assert_close(safe_get_full_fp32_param(p), value, rtol=0, atol=0)
                kept = value.to(p.dtype).float()
                torch.testing.assert_close(shown(named(model)[name]), kept, rtol=0, atol=0)
                safe_set_full_optimizer_state(p, value + 1, "momentum_buffer")
                torch.testing.assert_close(
                    safe_get_full_optimizer_state(p, "momentum_buffer"), value + 1, rtol=0, atol=0
                )
                local = safe_get_local_fp32_param(p)
                safe_set_local_fp32_param(p, local + 1)
                torch.testing.assert_close(safe_get_full_fp32_param(p), value + 1, rtol=0, atol=0)
                torch.testing.assert_close(shown(named(model)[name]), (value + 1).to(p.dtype).float(), rtol=0, atol=0)
                if local.numel():
                    safe_set_local_optimizer_state(p, local * 0 + 3, "momentum_buffer")
                    assert (safe_get_local_optimizer_state(p, "momentum_buffer") == 3).all()
            optimizer.zero_grad()
            x, y = model.example(2)
            model.loss(x.to(next(model.parameters()).dtype), y).backward()
            for p in named(model).values():
                safe_set_full_grad(p, torch.full(p.shape, 2.0))
                assert (safe_get_full_grad(p) == 2).all()
                local = safe_get_local_grad(p)
                safe_set_local_grad(p, local * 2)
            safe_update_full_grad_vectorized(list(named(model).values()), lambda g, p: g / 8)
            before = {n: safe_get_full_fp32_param(p) for n, p in named(model).items()}
            for p in named(model).values():
                safe_set_full_optimizer_state(p, torch.zeros(p.shape), "momentum_buffer")
            optimizer.step()
            after = {n: safe_get_full_fp32_param(p) for n, p in named(model).items()}
            assert_close_named(after, {n: v - 0.05 for n, v in before.items()}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_reading_agrees_with_torch(world):
    run_ranks(read, world, timeout=90)


@pytest.mark.parametrize("world", [1, 3])
def test_writing_reaches_masters_parameters_states_and_steps(world):
    run_ranks(write, world, timeout=90)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_parameter_has_no_gradient_and_no_states(stage):
    def work(rank, world):
        model, _ = dsx_zero.shard(tiny.Frozen(), lambda p: torch.optim.SGD(p, lr=0.1), stage=stage)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for p in frozen:
            assert safe_get_full_grad(p) is None and safe_get_local_grad(p) is None
            assert safe_get_full_optimizer_state(p, "exp_avg") is None
            assert safe_get_local_optimizer_state(p, "exp_avg") is None
        return len(frozen)

    assert min(run_ranks(work, 2)) > 0


def test_mistakes_are_named():
    model, optimizer = dsx_zero.shard(tiny.Frozen(), lambda p: torch.optim.SGD(p, lr=0.1), stage=2)
    with pytest.raises(dsx_zero.ZeroStateError, match="frozen"):
        safe_get_full_fp32_param(model.layers[0].weight)
    with pytest.raises(dsx_zero.ZeroStateError, match="not a parameter"):
        safe_get_full_fp32_param(torch.zeros(3))
    with pytest.raises(dsx_zero.ZeroStateError, match="optimizer="):
        safe_get_full_fp32_param("layers.1.weight")
    with pytest.raises(dsx_zero.ZeroStateError, match=r"layers\.1\.weight"):
        safe_get_full_fp32_param("layer.1.weight", optimizer=optimizer)
    with pytest.raises(dsx_zero.ZeroStateError, match="shape"):
        safe_set_full_fp32_param(model.layers[1].weight, torch.zeros(3))
    with pytest.raises(dsx_zero.ZeroStateError, match="no optimizer state"):
        safe_set_full_optimizer_state(model.layers[1].weight, torch.zeros(6, 6), "exp_avg")
    with pytest.raises(dsx_zero.ZeroStateError, match="no reduced gradient"):
        safe_set_full_grad(model.layers[1].weight, torch.zeros(6, 6))
