"""Dion and APOLLO against their published algorithms, written out in float64."""

import math

import pytest
import torch
from dsx_ops.errors import HyperparameterError, TensorError
from dsx_ops.optim.apollo import Apollo
from dsx_ops.optim.dion import Dion
from dsx_ops.optim.low_rank import gaussian
from torch import nn


def gradients(shape, steps=4):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def dion(weight, q, grads, lr, mu, decay, epsilon=1e-8):
    """Algorithm 1 of Ahn et al., 2025, on a copy."""
    w, q = weight.double(), q.double()
    momentum = torch.zeros_like(w)
    for grad in grads:
        b = momentum + grad.double()
        p, _ = torch.linalg.qr(b @ q)
        r = b.T @ p
        momentum = b - (1 - mu) * p @ r.T
        q = r / (r.norm(dim=0) + epsilon)
        w = (1 - lr * decay) * w - lr * math.sqrt(w.shape[0] / w.shape[1]) * p @ q.T
    return w, momentum, q


@pytest.mark.parametrize("shape", [(12, 8), (7, 15), (9, 9), (6, 1)])
@pytest.mark.parametrize("settings", [{}, {"rank": 3}, {"rank_fraction": 1.0}, {"mu": 0.5, "weight_decay": 0.3}])
def test_dion_is_the_published_algorithm(shape, settings):
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9)))
    start = weight.detach().clone()
    optimizer = Dion([weight], lr=0.1, **settings)
    rank = min(settings.get("rank") or max(1, round(settings.get("rank_fraction", 0.25) * min(shape))), min(shape))
    q = gaussian(torch.tensor(0), 0, shape[1] * rank).view(shape[1], rank)
    for grad in gradients(shape):
        weight.grad = grad.clone()
        optimizer.step()
    w, momentum, basis = dion(
        start, q, gradients(shape), 0.1, settings.get("mu", 0.95), settings.get("weight_decay", 0.01)
    )
    torch.testing.assert_close(weight.detach().double(), w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.state[weight]["momentum"].double(), momentum, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.state[weight]["Q"].double(), basis, rtol=1e-3, atol=1e-4)


def test_dion_survives_gradients_of_zero():
    weight = nn.Parameter(torch.ones(6, 4))
    optimizer = Dion([weight], lr=0.1, weight_decay=0.0, rank=2)
    for grad in (torch.zeros(6, 4), *gradients((6, 4))):
        weight.grad = grad
        optimizer.step()
    assert torch.isfinite(weight).all() and not torch.equal(weight, torch.ones(6, 4))
    assert (optimizer.state[weight]["Q"].norm(dim=0) - 1).abs().max() < 1e-3
    twin = nn.Parameter(torch.ones(6, 4))
    optimizer = Dion([twin], lr=0.1, weight_decay=0.0, rank=2)
    for grad in gradients((6, 4)):
        twin.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight, twin)  # the step without a gradient has changed nothing


def apollo(weight, grads, *, lr, betas, eps, decay, rank, alpha, kind, gap, growth):
    """Zhu et al., 2024, on a copy; projections are those of the optimizer."""
    w, last = weight.double(), 0.0
    tall = w.shape[0] >= w.shape[1]
    first = second = 0.0
    for steps, grad in enumerate(grads, 1):
        g = grad.double() if tall else grad.double().T
        number = ((steps - 1) // gap * 1_000_003) % (1 << 31)
        p = gaussian(torch.tensor(number), 0, rank * g.shape[1]).view(rank, -1).double() / math.sqrt(rank)
        low = g @ p.T
        first = betas[0] * first + (1 - betas[0]) * low
        second = betas[1] * second + (1 - betas[1]) * low**2
        normed = first / (second.sqrt() + eps)
        if kind == "channel":
            factor = normed.norm(dim=1, keepdim=True) / (low.norm(dim=1, keepdim=True) + 1e-8)
        else:
            factor = normed.norm() / (low.norm() + 1e-8)
        update = g * factor
        if growth is not None and last:
            update = update / (max(update.norm() / (last + 1e-8), growth) / growth)
        last = update.norm()
        size = lr * alpha * math.sqrt(1 - betas[1] ** steps) / (1 - betas[0] ** steps)
        w = (1 - lr * decay) * w - size * (update if tall else update.T)
    return w


@pytest.mark.parametrize("shape", [(12, 8), (7, 15), (9, 9), (5, 1)])
@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 3},
        {"rank_fraction": 0.5, "growth": None},
        {"rank": 1, "scale_type": "tensor", "alpha": math.sqrt(128.0)},  # APOLLO-Mini
        {"rank": 100, "update_proj_gap": 2, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    ],
)
def test_apollo_is_the_published_algorithm(shape, settings):
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9)))
    start = weight.detach().clone()
    optimizer = Apollo([weight], lr=0.1, **settings)
    steps = gradients(shape, 6)
    steps[3] = steps[3] * 30  # the limiter is needed
    for grad in steps:
        weight.grad = grad.clone()
        optimizer.step()
    wanted = apollo(
        start, steps, lr=0.1, betas=settings.get("betas", (0.9, 0.999)), eps=1e-6,
        decay=settings.get("weight_decay", 0.0), alpha=settings.get("alpha", 1.0),
        rank=min(settings.get("rank") or max(1, round(0.5 * min(shape))), min(shape)),
        kind=settings.get("scale_type", "channel"), gap=settings.get("update_proj_gap", 200),
        growth=settings.get("growth", 1.01),
    )  # fmt: skip
    torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-4, atol=1e-5)
    kept = optimizer.state[weight]
    assert sum(value.numel() for value in kept.values()) == 2 * max(shape) * kept["exp_avg_low"].shape[1] + 2


def test_random_numbers_are_normal_and_belong_to_their_place():
    seed = torch.tensor(7)
    found = gaussian(seed, 0, 200_000)
    assert abs(found.mean()) < 0.01 and abs(found.std() - 1) < 0.01 and abs((found**3).mean()) < 0.03
    assert abs((found**4).mean() - 3) < 0.08
    assert torch.equal(gaussian(seed, 12_345, 12_777), found[12_345:12_777])
    for other in (8, 7 + (1 << 16)):  # other seeds give other numbers, not the same in another order
        second = gaussian(torch.tensor(other), 0, 200_000)
        assert abs((found * second).mean()) < 0.01
        assert len(set(found[:1000].tolist()) & set(second.tolist())) < 50
    for lag in (1, 2, 8, 64, 256):
        assert abs((found[lag:] * found[:-lag]).mean()) < 0.01


@pytest.mark.parametrize("make", [Dion, Apollo])
def test_stacks_parts_and_vectors(make):
    """A stack and fused rows are matrices of their own; everything else is stepped by AdamW."""
    torch.manual_seed(0)
    stack, fused, vector = (
        nn.Parameter(torch.randn(3, 6, 4)),
        nn.Parameter(torch.randn(8, 4)),
        nn.Parameter(torch.ones(5)),
    )
    groups = [{"params": [stack], "stacked": True}, {"params": [fused], "split_rows": [5, 3]}, {"params": [vector]}]
    optimizer = make(groups, lr=0.05, rank=2)
    single = [nn.Parameter(m.detach().clone()) for m in (*stack, *fused.split([5, 3]))]
    alone = make(single, lr=0.05, rank=2)
    for step in range(3):
        for p in (stack, fused, vector):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        for p, grad in zip(single, (*stack.grad, *fused.grad.split([5, 3]))):
            p.grad = grad.clone()
        optimizer.step()
        alone.step()
    for p, part in zip(single, (*stack.detach(), *fused.detach().split([5, 3]))):
        torch.testing.assert_close(p.detach(), part, rtol=1e-6, atol=1e-6)
    key = "Q" if make is Dion else "exp_avg_low"
    assert optimizer.state[stack][key].shape == ((3, 4, 2) if make is Dion else (3, 6, 2))
    assert optimizer.state[fused][key].shape == ((2, 4, 2) if make is Dion else (5 * 2 + 4 * 2,))
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("make", [Dion, Apollo])
def test_a_state_dict_resumes_with_the_same_bits(make):
    def run(steps, saved=None, weight=None):
        p = nn.Parameter(torch.ones(9, 5) if weight is None else weight)
        optimizer = make([p], lr=0.05, rank=2)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for grad in steps:
            p.grad = grad.clone()
            optimizer.step()
        return p.detach().clone(), optimizer.state_dict()

    steps = gradients((9, 5))
    whole, _ = run(steps)
    half, saved = run(steps[:2])
    assert torch.equal(run(steps[2:], saved, half)[0], whole)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [(Dion, {"mu": 1.5}), (Dion, {"epsilon": -1.0}), (Dion, {"seed": -1}), (Apollo, {"scale_type": "row"}),
     (Apollo, {"growth": 0.5}), (Apollo, {"update_proj_gap": 0}), (Apollo, {"alpha": -1.0}),
     *((make, wrong) for make in (Dion, Apollo) for wrong in ({"rank": 0}, {"rank_fraction": 0.0},
       {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"split_rows": 0}))],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(make, wrong):
    with pytest.raises(HyperparameterError, match=next(iter(wrong))):
        make([nn.Parameter(torch.zeros(4, 6))], **wrong)


@pytest.mark.parametrize("make", [Dion, Apollo])
def test_tensors_that_are_no_matrices_are_refused(make):
    with pytest.raises(TensorError, match=f"{make.__name__}.*stacked=True for 2"):
        make([nn.Parameter(torch.zeros(2, 3, 4))])
    with pytest.raises(TensorError, match="use_muon=False"):
        make([{"params": [nn.Parameter(torch.zeros(3))], "use_muon": True}])


@pytest.mark.parametrize("make", [Dion, Apollo])
def test_columns_are_not_split_silently(make):
    with pytest.raises(HyperparameterError, match="split_columns"):
        make([{"params": [nn.Parameter(torch.zeros(4, 6))], "split_columns": 2}])
