"""Muon against torch's own Muon and AdamW, and its orthogonalisation against the singular value decomposition."""

import copy

import pytest
import torch
from dsx_ops import HyperparameterError, Muon, TensorError, orthogonalize
from torch import nn


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (3, 6, 10)])
def test_orthogonalisation_keeps_singular_vectors(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    found = orthogonalize(matrix, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ found @ v.mT  # diagonal with the new singular values
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert ((values > 0.3) & (values < 1.3)).all()
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-9
    assert values[..., 0].max() < 1.25 and values[..., 0].min() > 0.65
    with pytest.raises(TensorError, match="two dimensions"):
        orthogonalize(torch.zeros(3))


def train(model, optimizer, steps=4):
    for step in range(steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_follow_torchs_muon_and_the_rest_its_adamw(nesterov):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    theirs = copy.deepcopy(ours)
    common = {"weight_decay": 0.1}
    got = train(ours, Muon(ours.parameters(), muon_lr=0.02, adam_lr=0.01, nesterov=nesterov, **common))
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    others = [p for p in theirs.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=0.02, nesterov=nesterov, **common)
    adam = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), **common)
    for step in range(4):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        theirs(x).square().mean().backward()
        muon.step()
        adam.step()
        theirs.zero_grad()
    for a, b in zip(got, (p.detach() for p in theirs.parameters())):
        # torch iterates in bfloat16, ours on the CPU in float32
        torch.testing.assert_close(a, b, rtol=0.02, atol=4e-3 if a.dim() == 2 else 2e-3)


def test_groups_say_what_is_for_muon():
    embedding, matrix, bias = (
        nn.Parameter(torch.ones(4, 3)),
        nn.Parameter(torch.ones(4, 3)),
        nn.Parameter(torch.ones(3)),
    )
    optimizer = Muon(
        [{"params": [embedding], "use_muon": False, "lr": 0.5}, {"params": [matrix, bias]}], muon_lr=0.1, adam_lr=0.2
    )
    found = [(group["use_muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    assert found == [(False, 0.5, 1), (True, 0.1, 1), (False, 0.2, 1)]
    for p in (embedding, matrix, bias):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state[embedding]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    with pytest.raises(TensorError, match="use_muon=False"):
        Muon([{"params": [bias], "use_muon": True}])
    for wrong in ({"momentum": 1.0}, {"lr": -1.0}, {"ns_steps": 0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(HyperparameterError):
            Muon([matrix], **wrong)


def test_convolutions_are_matrices_of_their_first_dimension():
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2))
    weight.grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=1.0, momentum=0.0).step()
    torch.testing.assert_close(weight.detach().view(4, -1), -orthogonalize(weight.grad.view(4, -1)))
