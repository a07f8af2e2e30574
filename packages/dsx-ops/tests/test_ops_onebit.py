"""Signs in bits: against plain torch and float64, error feedback, equality over instruction sets, threads and
splits.
"""

from __future__ import annotations

import contextlib
import math

import dsx_ops
import pytest
import torch
from dsx_ops import native, onebit

SIZES = [0, 1, 7, 8, 63, 64, 65, 1000, 4097, 100_003]
WAYS = {"native": contextlib.nullcontext, "reference": dsx_ops.reference_only}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=WAYS)
def way(request):
    """Runs the test over the compiled kernels and over the reference."""
    with WAYS[request.param]():
        yield request.param


def bits_of(packed, numel):
    """The bits as a list of bools, decoded independently."""
    return [bool(packed[i // 8].item() >> (i % 8) & 1) for i in range(numel)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_the_signs_in_order(way, dtype):
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.0, -3.0, math.inf, -math.inf, math.nan, -1.0, 1.0], dtype=dtype)
    small = x.float().abs() > 0  # fp16 flushes the denormals to +-0
    wanted = [bool(v >= 0) for v in x.float()]
    assert small.any() and bits_of(onebit.pack_signs(x), x.numel()) == wanted
    assert onebit.pack_signs(x)[1].item() >> 3 == 0, "the bits beyond the end are 0"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_pack_and_unpack(way, numel, dtype):
    torch.manual_seed(numel)
    x = torch.randn(numel + 3)[3:].to(dtype).contiguous()
    packed = onebit.pack_signs(x)
    assert packed.shape == (-(-numel // 8),)
    scale = torch.tensor(0.37)
    back = onebit.unpack_signs(packed, scale, numel, dtype=dtype)
    assert torch.equal(back, torch.where(x >= 0, scale, -scale).to(dtype))
    out = torch.full((numel + 2,), 7.0)
    onebit.unpack_signs(packed, scale, numel, out=out[1 : 1 + numel])
    assert torch.equal(out[1 : 1 + numel], torch.where(x >= 0, scale, -scale))
    assert out[0] == 7 and out[-1] == 7, "nothing beside the result is written"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_compress_keeps_what_the_signs_leave_out(way, numel, dtype):
    torch.manual_seed(numel)
    x, error = torch.randn(numel).to(dtype), torch.randn(numel) * 0.1
    before = error.clone()
    packed, scale = onebit.compress_with_feedback(x, error)
    t = x.double() + before.double()
    wanted = t.square().mean().sqrt() if numel else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(scale.double(), wanted, rtol=1e-7, atol=0)
    sent = onebit.unpack_signs(packed, scale, numel)
    torch.testing.assert_close((sent + error).double(), t, rtol=1e-6, atol=1e-6)
    assert bits_of(packed, min(numel, 100)) == [bool(v >= 0) for v in (x.float() + before)[:100]]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_tensors_are_compressed_to_their_last_element(threads):
    torch.manual_seed(0)
    x, error = torch.randn(1_100_003), torch.randn(1_100_003)
    t, usual = x + error, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed, scale = onebit.compress_with_feedback(x, error)
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(packed, onebit.reference_pack_signs(t))
    assert torch.equal(error, t - torch.where(t >= 0, scale, -scale))


def test_errors_do_not_grow_and_averages_come_true(way):
    torch.manual_seed(0)
    x, error = torch.randn(512), torch.zeros(512)
    total = torch.zeros(512)
    for _ in range(400):
        packed, scale = onebit.compress_with_feedback(x, error)
        total += onebit.unpack_signs(packed, scale, 512)
    torch.testing.assert_close(total + error, 400 * x, rtol=1e-3, atol=0.05)  # nothing is lost: it is sent or kept
    assert (total / 400 - x).norm() < 0.1 * x.norm()


@pytest.mark.parametrize("numel", [1, 64, 1003])
def test_rows_and_their_mean(way, numel):
    torch.manual_seed(1)
    x = torch.randn(5, numel)
    packed = torch.stack([onebit.pack_signs(row) for row in x])
    scales = torch.rand(5)
    rows = onebit.unpack_signs(packed, scales, numel)
    assert torch.equal(rows, torch.where(x >= 0, scales[:, None], -scales[:, None]))
    got = onebit.mean_of_signs(packed, scales, numel=numel)
    torch.testing.assert_close(got.double(), rows.double().mean(0), rtol=1e-6, atol=1e-7)
    wanted = torch.zeros(numel)
    for row in rows:
        wanted += row
    assert torch.equal(got, wanted * torch.tensor(0.2))


def test_a_nan_is_seen_in_the_scale(way):
    x, error = torch.randn(100), torch.zeros(100)
    x[3] = math.nan
    assert onebit.compress_with_feedback(x, error)[1].isnan()


@pytest.mark.skipif(native.module() is None, reason="compares the compiled kernels with each other")
def test_every_instruction_set_thread_count_and_split_gives_the_same_bits():
    module, threads = native.module(), torch.get_num_threads()
    torch.manual_seed(2)
    x, e = torch.randn(70_001), torch.randn(70_001)
    rows, scales = torch.randint(0, 256, (3, 500), dtype=torch.uint8), torch.rand(3)

    def everything():
        error = e.clone()
        packed, scale = onebit.compress_with_feedback(x, error)
        return packed, scale, error, onebit.pack_signs(x), onebit.mean_of_signs(rows, scales)

    before = module.isa()
    try:
        wanted = everything()
        for isa in module.isas():
            module.set_isa(isa)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert all(torch.equal(a, b) for a, b in zip(everything(), wanted)), (isa, count)
    finally:
        module.set_isa(before)
        torch.set_num_threads(threads)
    pieces = [onebit.pack_signs(x[at : at + 8008]) for at in range(0, x.numel(), 8008)]
    assert torch.equal(torch.cat(pieces), wanted[3])


def test_unfit_tensors_are_named_and_nothing_is_written():
    x, error = torch.randn(16), torch.ones(16)
    packed = onebit.pack_signs(x)
    one = torch.tensor(1.0)
    for call, words in (
        (lambda: onebit.pack_signs(x[::2]), "contiguous"),
        (lambda: onebit.pack_signs(x.long()), "got int64"),
        (lambda: onebit.compress_with_feedback(x, error[:15]), "got 15 elements, expected 16"),
        (lambda: onebit.compress_with_feedback(x, error.bfloat16()), "error: got bfloat16, expected float32"),
        (lambda: onebit.unpack_signs(packed, one, 17), "got 17"),
        (lambda: onebit.unpack_signs(packed, torch.ones(2)), "got 2 numbers, expected 1"),
        (lambda: onebit.unpack_signs(packed.float(), one), "packed signs: got float32"),
        (lambda: onebit.unpack_signs(packed, one, dtype=torch.float64), "dtype: got"),
        (lambda: onebit.unpack_signs(packed, one, out=torch.empty(15)), r"out: got shape \(15,\)"),
        (lambda: onebit.mean_of_signs(packed, one), "at least one rank"),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
    assert torch.equal(error, torch.ones(16))
