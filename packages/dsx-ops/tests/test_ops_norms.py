"""Norm with overflow check, scaling and clipping in one pass over many tensors."""

import math

import dsx_ops
import pytest
import torch
from dsx_ops import native

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tensors(dtype, sizes=(0, 1, 17, 4096, 4097, 50_001)):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


@pytest.fixture(params=[False, True], ids=["native", "reference"])
def either_path(request):
    if request.param:
        with dsx_ops.reference_only():
            yield
    elif native.module() is None:
        pytest.skip("needs the compiled module")
    else:
        yield


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_is_the_float64_norm(dtype, either_path):
    found = dsx_ops.norm(tensors(dtype))
    exact = torch.cat([t.double() for t in tensors(dtype)]).norm().item()
    assert found.finite and found.norm == pytest.approx(exact, rel=1e-12)
    per_tensor = dsx_ops.update.squared_norms(tensors(dtype))
    assert torch.allclose(per_tensor, torch.stack([t.double().square().sum() for t in tensors(dtype)]), rtol=1e-12)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 4095, 50_000])
def test_one_bad_element_is_seen(value, place, either_path):
    found = tensors(torch.float32)
    found[-1][place] = value
    assert not dsx_ops.norm(found).finite
    finite = dsx_ops.update.squared_norms(found).isfinite()
    assert not finite[-1] and finite[:-1].all()


def test_the_largest_numbers_do_not_overflow(either_path):
    big = torch.full((1000,), 3e38)
    found = dsx_ops.norm([big])
    assert found.finite and found.norm == pytest.approx(3e38 * math.sqrt(1000), rel=1e-6)


def test_nothing_is_a_norm_of_zero():
    assert dsx_ops.norm([]) == (0.0, True)
    assert dsx_ops.norm([torch.empty(0)]) == (0.0, True)


@pytest.mark.native
def test_order_of_the_sum_is_fixed():
    module = native.module()
    if module is None:
        pytest.skip("needs the compiled module")
    kept, isa = torch.get_num_threads(), module.isa()
    try:
        results = set()
        for name in module.isas():
            module.set_isa(name)
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                results.add(dsx_ops.norm(tensors(torch.float32, (100_000, 3, 77_777))).norm)
    finally:
        torch.set_num_threads(kept)
        module.set_isa(isa)
    assert len(results) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_rounds_once(dtype, either_path):
    found = tensors(dtype)
    expected = [(t.float() * 0.3).to(dtype) for t in found]
    dsx_ops.scale_(found, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_clipping_as_torch():
    ours = [torch.nn.Parameter(t) for t in tensors(torch.float32)]
    theirs = [torch.nn.Parameter(t) for t in tensors(torch.float32)]
    for limit in (1.0, 1e9):
        for params in (ours, theirs):
            for p in params:
                p.grad = p.detach() * 2
        a = dsx_ops.clip_grad_norm_(ours, limit)
        b = torch.nn.utils.clip_grad_norm_(theirs, limit)
        assert a.item() == pytest.approx(b.item(), rel=1e-5)
        assert all(torch.allclose(p.grad, q.grad, rtol=1e-5) for p, q in zip(ours, theirs))


def test_wrong_tensors_are_named():
    with pytest.raises(dsx_ops.errors.TensorError, match=r"tensor 1 is torch\.int64"):
        dsx_ops.norm([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(dsx_ops.errors.TensorError, match="share memory"):
        dsx_ops.scale_([torch.ones(6).as_strided((3, 3), (1, 1))], 2.0)
    with pytest.raises(dsx_ops.errors.TensorError, match="sparse_csr"):
        dsx_ops.norm([torch.eye(3).to_sparse_csr()])
