"""Sparse gradients, as torch.nn.Embedding(sparse=True) makes them: CPUAdagrad as torch's, norms and clipping; the
others refuse.
"""

import dsx_ops
import pytest
import torch
from torch import nn


@pytest.fixture(params=["native", "reference"], autouse=True)
def way(request):
    if request.param == "native":
        yield
        return
    with dsx_ops.reference_only():
        yield


def train(make, steps=4, dtype=torch.float32, **step):
    torch.manual_seed(0)
    net = nn.Embedding(20, 6, sparse=True, dtype=dtype)
    head = nn.Linear(6, 3, dtype=dtype)
    optimizer = make([*net.parameters(), *head.parameters()])
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, 12, (5,), generator=generator)  # some twice, some never
        optimizer.zero_grad()
        head(net(tokens)).square().mean().backward()
        assert net.weight.grad.is_sparse
        optimizer.step(**step)
    return [net.weight.detach(), head.weight.detach()], optimizer, net.weight


@pytest.mark.parametrize("initial", [0.0, 0.3])
def test_adagrad_as_torch(initial):
    options = {"lr": 0.1, "initial_accumulator_value": initial}
    got, ours, p = train(lambda ps: dsx_ops.CPUAdagrad(ps, **options))
    wanted, theirs, q = train(lambda ps: torch.optim.Adagrad(ps, **options))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(ours.state[p]["sum"], theirs.state[q]["sum"])
    assert ours.state[p]["step"] == 4


def test_rows_without_a_gradient_stay_as_they_are():
    got, _, _ = train(lambda ps: dsx_ops.CPUAdagrad(ps, lr=0.1))
    torch.manual_seed(0)
    assert torch.equal(got[0][12:], nn.Embedding(20, 6).weight[12:])


def test_sixteen_bits_with_fp32_sums_and_grad_scale():
    got, ours, p = train(lambda ps: dsx_ops.CPUAdagrad(ps, lr=0.1), dtype=torch.bfloat16, grad_scale=2.0)
    assert ours.state[p]["sum"].dtype == torch.float32
    assert got[0].isfinite().all()


def test_a_copy_gets_the_whole_parameter():
    torch.manual_seed(0)
    net = nn.Embedding(20, 6, sparse=True)
    out = torch.zeros(20, 6, dtype=torch.bfloat16)
    net(torch.tensor([3, 3, 7])).sum().backward()
    dsx_ops.CPUAdagrad(net.parameters()).step(copy_out={net.weight: out})
    assert torch.equal(out, net.weight.detach().bfloat16())


def test_several_sparse_dimensions_no_entries_and_a_parameter_in_another_order():
    for grad in (
        torch.sparse_coo_tensor([[0, 1, 1, 1], [2, 0, 0, 1]], [1.0, 2.0, 3.0, 4.0], (3, 4), check_invariants=True),
        torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 4), (3, 4), check_invariants=True),
    ):
        results = []
        for value in (torch.ones(3, 4), torch.ones(4, 3).t()):
            ours, theirs = nn.Parameter(value.clone(memory_format=torch.preserve_format)), nn.Parameter(value.clone())
            ours.grad, theirs.grad = grad.clone(), grad.to_dense()
            dsx_ops.CPUAdagrad([ours], lr=0.1).step()
            torch.optim.Adagrad([theirs], lr=0.1).step()
            results.append((ours, theirs))
        for ours, theirs in results:
            torch.testing.assert_close(ours, theirs)


def test_weight_decay_with_a_sparse_gradient_is_refused_before_anything_changes():
    net = nn.Embedding(20, 6, sparse=True)
    before = net.weight.detach().clone()
    net(torch.tensor([1])).sum().backward()
    optimizer = dsx_ops.CPUAdagrad(net.parameters(), weight_decay=0.1)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="weight_decay=0"):
        optimizer.step()
    assert torch.equal(net.weight, before) and not optimizer.state


@pytest.mark.parametrize(
    "make", [dsx_ops.FusedAdam, dsx_ops.FusedLion, dsx_ops.SGD, dsx_ops.FusedLamb, dsx_ops.Adam8bit]
)
def test_the_others_name_the_way(make):
    net = nn.Embedding(20, 6, sparse=True)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(dsx_ops.errors.TensorError, match="CPUAdagrad"):
        make(net.parameters()).step()


def test_norm_and_clipping():
    ours, theirs = nn.Embedding(20, 6, sparse=True), nn.Embedding(20, 6)
    for net in (ours, theirs):
        nn.init.ones_(net.weight)
        net(torch.tensor([3, 3, 7])).square().sum().backward()
    total = dsx_ops.clip_grad_norm_(ours.parameters(), 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    torch.testing.assert_close(total.float(), wanted)
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)
    assert dsx_ops.get_grad_zeros(ours.parameters()) == 20 * 6 - 2 * 6
    assert not dsx_ops.CheckOverflow([list(ours.parameters())]).check()
    for p in (1.0, float("inf")):
        a = dsx_ops.clip_grad_norm_(ours.parameters(), 1e9, norm_type=p)
        torch.testing.assert_close(a.float(), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9, norm_type=p))
