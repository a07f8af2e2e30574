"""torch.amp.GradScaler around the compressed optimizers: an overflow that one rank sees is every rank's."""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks

MAKERS = {
    "OneBitAdam": lambda ps: dsx_comm.OneBitAdam(ps, lr=1e-2, freeze_step=3),
    "ZeroOneAdam": lambda ps: dsx_comm.ZeroOneAdam(ps, lr=1e-2, var_freeze_step=3, local_step_scaler=2),
    "OneBitLamb": lambda ps: dsx_comm.OneBitLamb(ps, lr=1e-2, freeze_step=3),
}
OVERFLOWS = (1, 4)  # one in a step with exact averages, one in a compressed step


def gradient(step, rank):
    return torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank))


def scaled(rank, n, name):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    plain = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    optimizer, oracle = MAKERS[name]([param]), MAKERS[name]([plain])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(8):
        param.grad = plain.grad = None
        scaler.scale((param * gradient(step, rank)).sum()).backward()
        if step in OVERFLOWS:
            if rank == 1:
                param.grad[7] = torch.inf
        else:
            (plain * gradient(step, rank)).sum().backward()
            oracle.step()
        if step == 5:
            scaler.unscale_(optimizer)  # by hand, as for a look at the gradients
        scaler.step(optimizer)
        scaler.update()
    scales = [None] * n
    dsx_comm.all_gather_object(scales, scaler.get_scale())
    assert scales[0] != scales[1], "the ranks' scales were meant to differ"
    assert optimizer.clock.step == oracle.clock.step == 6
    optimizer.synchronize(), oracle.synchronize()
    # scales are powers of two: unscaling changes no bit
    assert torch.equal(param, plain) and torch.isfinite(param).all()


@pytest.mark.parametrize("name", MAKERS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(name):
    run_ranks(scaled, 2, name, timeout=30)


def all_exact(rank, n):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = dsx_comm.OneBitAdam([{"params": [param], "non_freeze": True}], lr=1e-2, freeze_step=1)
    for _ in range(3):
        param.grad = torch.full((4,), float(rank))
        optimizer.step()
    assert optimizer.error_bytes() == 0
    return param[0].item()


def test_groups_that_are_never_frozen_may_be_all_there_is():
    first, second = run_ranks(all_exact, 2)
    assert first == second < 1.0


def without(rank, world, name, everywhere):
    """Steps in which one rank, or every rank, has no gradient at all: zeros, as in a plain loop."""
    param, plain = (torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2))
    other = torch.nn.Parameter(torch.ones(3))  # what the loss of such a step depends on; it has an optimizer of its own
    optimizer, oracle, second = MAKERS[name]([param]), MAKERS[name]([plain]), torch.optim.SGD([other], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(7):
        param.grad = plain.grad = None
        if step in (1, 5) and (everywhere or rank == 1):
            scaler.scale(other.sum()).backward()
        else:
            scaler.scale((param * gradient(step, rank)).sum() + other.sum()).backward()
            plain.grad = gradient(step, rank)
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
        oracle.step()
    assert optimizer.clock.step == 7
    assert torch.equal(param, plain) and param.isfinite().all()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_without_any_gradient(name, everywhere):
    run_ranks(without, 2, name, everywhere, timeout=30)


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_without_any_gradient_on_one_rank_alone(name):
    without(0, 1, name, True)
