"""SGD whose momentum is switched on, off and on again between steps, as schedules do: the numbers of
torch.optim.SGD.
"""

import copy

import dsx_ops
import pytest
import torch
from dsx_ops import update
from dsx_ops.cuda import optimizers as cuda_optimizers
from torch import nn

MOMENTA = {
    "on after two steps": [0, 0, 0.9, 0.9, 0.9],
    "on, off, on": [0, 0.9, 0.9, 0, 0, 0.9, 0.9],
    "off after some": [0.9, 0.9, 0, 0],
    "changing": [0, 0.5, 0.9, 0.1],
}


@pytest.fixture(params=["native", "reference", "cuda"])
def way(request, monkeypatch):
    if request.param == "reference":
        with dsx_ops.reference_only():
            yield
        return
    if request.param == "cuda":
        emulator = request.getfixturevalue("emulator")
        monkeypatch.setattr(update, "apply", lambda batch: cuda_optimizers.run(emulator, batch))
    yield


def train(optimizer, params, momenta, start=0):
    for step, momentum in enumerate(momenta, start):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        for group in optimizer.param_groups:
            group["momentum"] = momentum
        optimizer.step()


def params():
    return [nn.Parameter(torch.ones(n)) for n in (3, 40)]


@pytest.mark.parametrize("dampening", [0.0, 0.4])
@pytest.mark.parametrize("momenta", MOMENTA)
def test_as_torch(momenta, dampening, way):
    ours, theirs = params(), params()
    train(dsx_ops.SGD(ours, lr=0.1, dampening=dampening), ours, MOMENTA[momenta])
    train(torch.optim.SGD(theirs, lr=0.1, dampening=dampening), theirs, MOMENTA[momenta])
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_switched_on_after_a_state_dict():
    ours, theirs = params(), params()
    a, b = dsx_ops.SGD(ours, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    for optimizer, mine in ((a, ours), (b, theirs)):
        train(optimizer, mine, [0, 0])
    fresh = dsx_ops.SGD(ours, lr=0.1)
    fresh.load_state_dict(copy.deepcopy(a.state_dict()))
    train(fresh, ours, [0.9, 0.9], 2)
    train(b, theirs, [0.9, 0.9], 2)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_one_parameter_joins_later():
    ours, theirs = params(), params()
    for mine, make in ((ours, dsx_ops.SGD), (theirs, torch.optim.SGD)):
        optimizer = make([{"params": mine[:1], "momentum": 0.9}, {"params": mine[1:]}], lr=0.1, dampening=0.3)
        for step in range(5):
            for p in mine:
                p.grad = torch.full_like(p, step + 1.0)
            optimizer.param_groups[1]["momentum"] = 0.9 if step >= 2 else 0.0
            optimizer.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_refused_step_begins_nothing():
    mine = params()
    optimizer = dsx_ops.SGD(mine, lr=0.1)
    train(optimizer, mine, [0])
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["momentum"] = 0.9
    mine[1].grad = torch.ones(40).to_sparse()
    with pytest.raises(dsx_ops.errors.TensorError):
        optimizer.step()
    assert optimizer.state_dict()["state"] == before


def test_a_step_that_the_device_skips_does_not_begin_the_buffer(emulator, monkeypatch):
    """GradScaler's found_inf in the very step that switches momentum on."""
    monkeypatch.setattr(update, "apply", lambda batch: cuda_optimizers.run(emulator, batch))
    monkeypatch.setattr(update, "decides_on_device", lambda found, tensors: True)
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    a = dsx_ops.SGD([ours], lr=0.1, dampening=0.5)
    b = torch.optim.SGD([theirs], lr=0.1, dampening=0.5)
    for step, (momentum, overflow) in enumerate([(0, 0), (0, 1), (0.9, 1), (0.9, 0), (0.9, 0), (0.9, 1), (0.9, 0)]):
        for p, optimizer in ((ours, a), (theirs, b)):
            p.grad = torch.full((5,), step + 1.0)
            optimizer.param_groups[0]["momentum"] = momentum
        a.step(found_inf=torch.tensor(float(overflow)))
        if not overflow:
            b.step()
    torch.testing.assert_close(ours, theirs)
