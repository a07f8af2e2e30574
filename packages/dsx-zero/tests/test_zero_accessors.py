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
def test_a_frozen_parameter_has_no_gradient_no_states_and_no_master(stage):
    def work(rank, world):
        model, _ = dsx_zero.shard(tiny.Frozen(), lambda p: torch.optim.SGD(p, lr=0.1), stage=stage)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for p in frozen:
            assert safe_get_full_grad(p) is None and safe_get_local_grad(p) is None
            assert safe_get_full_optimizer_state(p, "exp_avg") is None
            assert safe_get_local_optimizer_state(p, "exp_avg") is None
            assert safe_get_full_fp32_param(p) is None and safe_get_local_fp32_param(p) is None
        return len(frozen)

    assert min(run_ranks(work, 2)) > 0


def test_mistakes_are_named():
    model, optimizer = dsx_zero.shard(tiny.Frozen(), lambda p: torch.optim.SGD(p, lr=0.1), stage=2)
    with pytest.raises(dsx_zero.ZeroStateError, match="frozen"):
        safe_set_full_fp32_param(model.layers[0].weight, torch.zeros(6, 6))
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


def before_the_boundary(rank, world, stage, dtype):
    """Gradients after each of three micro-batches: the first inside `no_sync`, the second too, the third reduced, a
    fourth on top.
    """
    model = tiny.MLP().to(dtype)
    model, optimizer = dsx_zero.shard(
        model, lambda p: torch.optim.SGD(p, lr=0.1), stage=stage, config={"stage3_param_persistence_threshold": 8},
        precision=dsx_zero.Precision(gradients=torch.float32),
    )  # fmt: skip
    oracle = tiny.MLP().to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1e-2}

    def gradients(number, who):
        oracle.zero_grad()
        x, y = oracle.example(2, seed=10 * number + who)
        oracle.loss(x.to(dtype), y).backward()
        return {n: p.grad.float() for n, p in oracle.named_parameters()}

    def total(*parts):
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def mean(*numbers):
        every = [gradients(number, who) for number in numbers for who in range(world)]
        return {name: value / world for name, value in total(*every).items()}

    def check(expected):
        now = named(model)
        assert_close_named({n: safe_get_full_grad(p) for n, p in now.items()}, expected, **tolerance)
        for name, p in now.items():
            part = safe_get_local_grad(p)
            view = optimizer.layout.group_of(name).layout.local_slice(name, rank)
            flat = expected[name].reshape(-1)
            want = flat if world == 1 or stage == 0 else flat[:0] if view is None else flat[view.start : view.stop]
            if part is not None and want.numel():
                torch.testing.assert_close(part.float().reshape(-1), want, **tolerance)

    def backward(number):
        x, y = model.example(2, seed=10 * number + rank)
        model.loss(x.to(dtype), y).backward()

    for _ in range(2):
        with optimizer.no_sync():
            backward(0)
            check(gradients(0, rank))
            backward(1)
            check(total(gradients(0, rank), gradients(1, rank)))
            if world > 1:
                with pytest.raises(dsx_zero.ZeroStateError, match="no reduced gradient now"):
                    safe_set_full_grad("layers.0.weight", torch.ones(16, 8), optimizer=optimizer)
        backward(2)
        check(mean(0, 1, 2))
        with optimizer.no_sync():
            backward(3)
            check(total(mean(0, 1, 2), gradients(3, rank)) if world > 1 else mean(0, 1, 2, 3))
        backward(4)
        check(mean(0, 1, 2, 3, 4))
        optimizer.zero_grad()
        assert all(safe_get_full_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_before_the_boundary_are_this_ranks_sum_so_far(world, dtype):
    for stage in range(4):
        run_ranks(before_the_boundary, world, stage, dtype)


def test_arguments_can_be_given_by_the_names_that_scripts_use():
    model, optimizer = dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), stage=2)
    x, y = model.example(2)
    model.loss(x, y).backward()
    p = model.layers[0].weight
    safe_set_full_grad(param=p, value=safe_get_full_grad(param=p))
    safe_set_local_grad(param=p, value=safe_get_local_grad(param=p))
    safe_update_full_grad_vectorized(param_list=[p], update_func=lambda grad, param: 2 * grad)
    optimizer.step()
    safe_set_full_fp32_param(param=p, value=safe_get_full_fp32_param(param=p))
    safe_set_local_fp32_param(param=p, value=safe_get_local_fp32_param(param=p))
    state = safe_get_full_optimizer_state(param=p, optim_state_key="momentum_buffer")
    safe_set_full_optimizer_state(param=p, value=state, optim_state_key="momentum_buffer")
    state = safe_get_local_optimizer_state(param=p, optim_state_key="momentum_buffer")
    safe_set_local_optimizer_state(param=p, value=state, optim_state_key="momentum_buffer")


def after_a_step_without_gradients(rank, world):
    """The ranks have agreed on a step without reductions then, and what is read needs them all the same."""
    for stage in range(4):
        reference, model, optimizer = start(rank, world, stage)
        optimizer.step()
        torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.zero_grad()
        optimizer.step()
        x, y = reference.example(2 * world)
        rows = slice(2 * rank, 2 * rank + 2)
        for _ in range(2):
            reference.zero_grad()
            reference.loss(x, y).backward()
            model.loss(x[rows], y[rows]).backward()
            got = {n: safe_get_full_grad(p) for n, p in named(model).items()}
            assert_close_named(got, {n: p.grad for n, p in named(reference).items()}, rtol=1e-5, atol=1e-7)
            optimizer.zero_grad()


def test_gradients_are_averaged_after_a_step_without_gradients():
    run_ranks(after_a_step_without_gradients, 2)


def set_while_gathered(rank, world):
    model, optimizer = dsx_zero.shard(
        tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config={"stage3_param_persistence_threshold": 0}
    )
    with dsx_zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for name, parameter in model.named_parameters():
            value = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            safe_set_full_fp32_param(name, value, optimizer=optimizer)
            assert torch.equal(parameter.detach(), value), name
    for name, parameter in model.named_parameters():
        value = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        assert torch.equal(safe_get_full_fp32_param(name, optimizer=optimizer), value), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_value_that_is_set_while_its_unit_is_gathered_shows_at_once(world):
    run_ranks(set_while_gathered, world)
