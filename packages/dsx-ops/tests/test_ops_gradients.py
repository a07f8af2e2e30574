"""Clipping, norms and overflow checks against torch.nn.utils and float64; flatten and unflatten; builders; fake
quantisation.
"""

import math

import dsx_ops
import pytest
import torch


def parameters(*sizes, dtype=torch.float32):
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    for p in found[:-1]:
        p.grad = torch.randn_like(p) * 3
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_clipping_is_torchs(norm_type, max_norm):
    ours, theirs = parameters(10, 1001, 3), parameters(10, 1001, 3)
    got = dsx_ops.clip_grad_norm_(ours, max_norm, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    for a, b in zip(ours, theirs):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_norms_of_weights_and_of_norms():
    found = parameters(7, 100)
    flat = torch.cat([p.detach() for p in found]).double()
    assert float(dsx_ops.get_weight_norm(found)) == pytest.approx(float(flat.norm()))
    assert float(dsx_ops.get_weight_norm(found, math.inf)) == float(flat.abs().max())
    assert dsx_ops.get_global_norm([3.0, torch.tensor(4.0)]) == 5.0
    found[0].grad[:3] = 0
    assert dsx_ops.get_grad_zeros(found) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_overflow_is_seen_anywhere(bad, dtype):
    found = parameters(5, 40_001, 2, dtype=dtype)
    check = dsx_ops.CheckOverflow([found])
    assert not check.check() and not check.has_overflow([])
    found[1].grad[40_000] = bad
    assert check.check() and check.check([found[1:]]) and not check.has_overflow(found[:1])


def test_collectives_are_refused_with_the_way_out():
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="let the engine clip"):
        dsx_ops.clip_grad_norm_(parameters(3, 3), 1.0, mpu=object())
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="max_norm: got -1"):
        dsx_ops.clip_grad_norm_(parameters(3, 3), -1)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="norm_type: got 0"):
        dsx_ops.clip_grad_norm_(parameters(3, 3), 1.0, norm_type=0)


def test_flatten_and_views_back():
    parts = [torch.randn(2, 3), torch.randn(()), torch.randn(0), torch.randn(5).expand(2, 5)]
    flat = dsx_ops.flatten(parts)
    views = dsx_ops.unflatten(flat, parts)
    assert flat.shape == (17,) and all(torch.equal(a, b) for a, b in zip(views, parts))
    views[0][0, 0] = 9.0
    assert flat[0] == 9.0, "unflatten gives views"
    room = torch.zeros(17, dtype=torch.bfloat16)
    assert dsx_ops.flatten(parts, out=room) is room
    assert torch.equal(room, dsx_ops.flatten(parts).bfloat16())
    (raw,) = dsx_ops.cast_to_byte_tensor([torch.tensor([1.0])])
    assert raw.tolist() == [0, 0, 128, 63]
    for words, call in (
        ("tensor 1 is torch.float64", lambda: dsx_ops.flatten([torch.ones(2), torch.ones(2).double()])),
        (r"expected \[17\]", lambda: dsx_ops.unflatten(flat[1:], parts)),
        ("got no tensors", lambda: dsx_ops.flatten([])),
        (r"expected a contiguous \[17\]", lambda: dsx_ops.flatten(parts, out=torch.zeros(16))),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_fake_quantisation_in_place(bits, asym):
    x = torch.randn(4, 60)
    wanted = dsx_ops.dequantize(
        dsx_ops.quantize(x, bits=bits, group_size=60, symmetric=not asym),
        x.shape,
        bits=bits,
        group_size=60,
        symmetric=not asym,
    )
    assert dsx_ops.ds_quantizer(x, groups=4, bit_num=bits, asym=asym) is x
    assert torch.equal(x, wanted)
    with pytest.raises(dsx_ops.errors.TensorError, match="groups: got 7"):
        dsx_ops.ds_quantizer(x, groups=7)
    assert torch.equal(x, wanted)
