"""Gradients whose norm is not finite show as in plain PyTorch, with a warning that says where; or the step is
skipped where that is asked for.
"""

import logging
import math

import pytest
import torch
from dsx_testkit import run_ranks, tiny

HUGE = {"1e30": 1e30, "inf": math.inf, "nan": math.nan}
OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=0.1),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "dsx_ops": lambda p: __import__("dsx_ops").FusedAdam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def spoil(gradient, value, rank):
    """The gradient with one element of rank 1 (of rank 0 where it is alone) replaced."""
    gradient = gradient.clone()
    if rank:
        gradient.view(-1)[3] = value
    return gradient


def plain(value, world, make, max_norm, parameter):
    """Plain PyTorch on the mean gradient: the norms of three steps, the second with a spoilt gradient; and the
    parameters after the second, and after the third.
    """
    model = tiny.MLP()
    optimizer, norms, values = make(model.parameters()), [], {}
    for step in range(3):
        for rank in range(world):
            kept = {n: p.grad for n, p in model.named_parameters()}
            model.zero_grad()
            model.loss(*model.example(2, seed=10 * step + rank)).backward()
            for name, p in model.named_parameters():
                if step == 1 and name == parameter:
                    p.grad = spoil(p.grad, value, rank or world == 1)
                p.grad = p.grad / world + (kept[name] if rank else 0)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step:
            values |= {(step, n): p.detach().clone() for n, p in model.named_parameters()}
    return norms, values


def train(rank, world, stage, make, value, max_norm, check, parameter):
    import dsx_zero

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx_zero").addHandler(handler)
    model, optimizer = dsx_zero.shard(
        tiny.MLP(), OPTIMIZERS[make], stage=stage, precision=dsx_zero.Precision(check_overflow=check)
    )
    outcomes, values = [], {}
    for step in range(3):
        optimizer.zero_grad()
        spoilt = step == 1 and (rank or world == 1)
        hooks = [
            p.register_hook(lambda grad: spoil(grad, value, True))
            for name, p in model.named_parameters()
            if spoilt and name == parameter
        ]
        model.loss(*model.example(2, seed=10 * step + rank)).backward()
        outcome = optimizer.step(max_norm=max_norm)
        outcomes.append((outcome.overflow, outcome.grad_norm))
        for hook in hooks:
            hook.remove()
        if step:
            whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
            values |= {(step, n): p.detach().clone() for n, p in whole.items()}
    logging.getLogger("dsx_zero").removeHandler(handler)
    return outcomes, values, lines


def all_stages(rank, world, make, value, max_norm, check, parameter):
    return [train(rank, world, stage, make, value, max_norm, check, parameter) for stage in range(4)]


def compare(world, make, kind, max_norm, parameter="layers.1.weight"):
    value = HUGE[kind]
    norms, want = plain(value, world, OPTIMIZERS[make], max_norm, parameter)
    assert not math.isfinite(norms[1])
    for rank, stages in enumerate(run_ranks(all_stages, world, make, value, max_norm, None, parameter)):
        for stage, (outcomes, values, lines) in enumerate(stages):
            where = f"rank {rank}, stage {stage}"
            assert [overflow for overflow, _ in outcomes] == [False] * 3, where
            for (_, norm), expected in zip(outcomes, norms, strict=True):
                assert norm == pytest.approx(expected, rel=1e-4, nan_ok=True), where
            for name, tensor in values.items():
                torch.testing.assert_close(
                    tensor,
                    want[name],
                    rtol=2e-4,
                    atol=2e-5,
                    equal_nan=True,
                    msg=f"{where}: {name[1]} after step {name[0]}",
                )
            warned = [line for line in lines if "step 2" in line and "not finite" in line]
            assert len(warned) == (rank == 0), (where, lines)
            if rank == 0 and kind in ("nan", "inf"):
                assert "'layers.1.weight' on rank " in warned[0], warned
            if rank == 0 and kind == "1e30":
                assert "every gradient is finite" in warned[0], warned


@pytest.mark.parametrize("kind", list(HUGE))
def test_they_show_as_in_plain_pytorch_with_clipping(kind):
    compare(2, "dsx_ops", kind, 1.0)
    compare(1, "torch", kind, 1.0)


@pytest.mark.parametrize("make", list(OPTIMIZERS))
def test_every_way_of_scaling(make):
    compare(2, make, "1e30", 0.5)
    compare(2, make, "nan", 0.5)


def test_without_clipping():
    compare(2, "sgd", "nan", None)


@pytest.mark.parametrize("kind", list(HUGE))
def test_they_are_skipped_where_overflow_is_checked(kind):
    for stages in run_ranks(all_stages, 2, "dsx_ops", HUGE[kind], 1.0, True, "layers.1.weight"):
        for outcomes, values, _ in stages:
            assert [overflow for overflow, _ in outcomes] == [False, True, False]
            assert all(torch.isfinite(tensor).all() for tensor in values.values())


def test_a_norm_that_only_the_sum_makes_infinite_is_the_same_in_all_stages():
    """Every parameter's squares fit into fp32, their sum over all does not."""

    def work(rank, world):
        import dsx_zero

        norms = []
        for stage in range(4):
            model, optimizer = dsx_zero.shard(tiny.MLP(), OPTIMIZERS["sgd"], stage=stage)
            for p in model.parameters():
                p.register_hook(lambda grad: torch.full_like(grad, 1e18))
            model.loss(*model.example(2)).backward()
            norms.append(optimizer.step(max_norm=1.0).grad_norm)
            model, optimizer = dsx_zero.shard(tiny.MLP().double(), OPTIMIZERS["sgd"], stage=stage)
            for p in model.parameters():
                p.register_hook(lambda grad: torch.full_like(grad, 1e30))
            model(model.example(2)[0].double()).square().mean().backward()
            count = sum(p.numel() for p in model.parameters())
            assert optimizer.step(max_norm=1.0).grad_norm == pytest.approx(1e30 * math.sqrt(count))
        return norms

    count = sum(p.numel() for p in tiny.MLP().parameters())
    assert 1e18 * math.sqrt(count) > math.sqrt(torch.finfo(torch.float32).max)
    for norms in run_ranks(work, 2):
        assert norms == [math.inf] * 4
