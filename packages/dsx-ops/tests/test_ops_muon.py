"""Muon against torch's own Muon and AdamW, and its orthogonalisation against the singular value decomposition."""

import copy

import pytest
import torch
from dsx_ops import Muon
from dsx_ops.errors import HyperparameterError, TensorError
from dsx_ops.optim.muon import orthogonalize
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


@pytest.mark.parametrize("shape", [(6, 6), (20, 3), (4, 30)])
def test_the_gram_method_is_the_standard_one_in_float64(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    for steps in (1, 2, 3, 5):
        found = [orthogonalize(matrix, steps, torch.float64, method=method) for method in ("standard", "gram")]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_coefficients_may_differ_from_step_to_step():
    """Newton's (1.5, -0.5, 0) converges, so that many steps give U V^T itself; the first steps may be others."""
    torch.manual_seed(2)
    matrix = torch.randn(5, 7, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    for method in ("standard", "gram"):
        steps = [(3.4445, -4.7750, 2.0315)] * 5 + [(1.5, -0.5, 0.0)]  # the last one is repeated
        found = orthogonalize(matrix, 25, torch.float64, coefficients=steps, method=method)
        torch.testing.assert_close(found, u @ v, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_in_bfloat16_it_has_the_bits_of_torchs_muon(shape, adjust):
    torch.manual_seed(3)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    settings = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": adjust, "ns_steps": 4, "momentum": 0.8}
    settings["ns_coefficients"] = (3.0, -3.2, 1.2)
    optimizers = Muon([ours], ns_dtype=torch.bfloat16, **settings), torch.optim.Muon([theirs], **settings)
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("original", 1.5), ("match_rms_adamw", 0.6), ("spectral", 3.0), ("unit_rms_norm", 1.5)],
)
def test_scales_are_the_published_ones(name, scale):
    weight = nn.Parameter(torch.zeros(9, 4))
    weight.grad = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=1.0, momentum=0.0, adjust_lr_fn=name).step()
    torch.testing.assert_close(weight.detach(), -scale * orthogonalize(weight.grad))


def test_cautious_decay_leaves_what_the_update_makes_larger():
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    weight.grad = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    before, update = weight.detach().clone(), orthogonalize(weight.grad)
    Muon([weight], lr=0.5, momentum=0.0, weight_decay=0.5, decay="cautious").step()
    shrinks = before * update > 0
    assert shrinks.any() and not shrinks.all()
    torch.testing.assert_close(weight.detach(), before - 0.25 * before * shrinks - 0.5 * update)


def test_parts_of_a_tensor_are_matrices_of_their_own():
    torch.manual_seed(4)
    whole, experts = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(2, 4, 6))
    whole.grad, experts.grad = torch.randn(6, 4), torch.randn(2, 4, 6)
    groups = [
        {"params": [whole], "split_rows": (3, 2, 1)},
        {"params": [experts], "stacked": True, "split_rows": 2, "split_columns": 3},
    ]
    Muon(groups, lr=1.0, momentum=0.0, adjust_lr_fn="spectral").step()
    for part, grad in zip(whole.detach().split([3, 2, 1]), whole.grad.split([3, 2, 1])):
        torch.testing.assert_close(part, -2.0 * orthogonalize(grad) * max(1, grad.shape[0] / 4) ** 0.5)
    for part, grad in zip(experts.detach(), experts.grad):
        for rows, of_rows in zip(part.split(2), grad.split(2)):
            for block, of_block in zip(rows.split(2, dim=1), of_rows.split(2, dim=1)):
                torch.testing.assert_close(block, -(2**0.5) * orthogonalize(of_block))


def test_a_weight_that_is_not_contiguous_is_changed_in_place():
    weight = nn.Parameter(torch.randn(3, 5).T)
    twin = nn.Parameter(weight.detach().contiguous())
    weight.grad = torch.randn(5, 3)
    twin.grad = weight.grad.clone()
    for param in (weight, twin):
        Muon([param], lr=0.1).step()
    assert not weight.is_contiguous()
    torch.testing.assert_close(weight, twin)


def test_what_cannot_be_meant_is_refused():
    stack, matrix = nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(TensorError, match="stacked=True for 2 matrices"):
        Muon([stack])
    for wrong in ({"split_rows": 3}, {"split_rows": [1, 2]}, {"split_columns": 4}):
        with pytest.raises(TensorError, match="do not divide"):
            Muon([matrix], **wrong)
    for wrong in (
        {"ns_method": "fast"}, {"adjust_lr_fn": "mine"}, {"decay": "none"}, {"ns_dtype": "int8"}, {"split_rows": 0},
        {"ns_coefficients": (1.0, 2.0)}, {"ns_coefficients": []}, {"ns_eps": -1.0}, {"weight_decay": -0.1},
    ):  # fmt: skip
        with pytest.raises(HyperparameterError, match=next(iter(wrong))):
            Muon([matrix], **wrong)
    optimizer = Muon([matrix])
    with pytest.raises(TensorError, match="stacked"):
        optimizer.add_param_group({"params": [stack]})
    assert len(optimizer.param_groups) == 1


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
