"""Groupwise int8 and int4: error bounds in float64, and the same bits on every path."""

import itertools

import dsx_ops
import pytest
import torch
from dsx_ops import native

KINDS = list(itertools.product((8, 4), (True, False), (False, True)))


def data(n, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=generator) * 10 ** torch.linspace(-3, 3, max(n, 1))[:n]).to(dtype)


@pytest.fixture(params=[False, True], ids=["native", "reference"])
def either_path(request):
    if request.param:
        with dsx_ops.reference_only():
            yield
    elif native.module() is None:
        pytest.skip("needs the compiled module")
    else:
        yield


@pytest.mark.parametrize("bits,symmetric,stochastic", KINDS)
def test_error_is_below_one_step(bits, symmetric, stochastic, either_path):
    x = data(3001)
    options = {"bits": bits, "symmetric": symmetric, "group_size": 64}
    q = dsx_ops.quantize(x, stochastic=stochastic, seed=3, **options)
    assert q.codes.numel() == (3001 if bits == 8 else 1501)
    back = dsx_ops.dequantize(q, 3001, **options)
    step = q.scale.double().repeat_interleave(64)[:3001]
    error = (back.double() - x.double()).abs() / step
    assert error.max() <= (1.0 if stochastic else 0.5) * (1 + 1e-4)
    assert stochastic or error.max() > 0.45
    padded = torch.nn.functional.pad(x.double(), (0, -3001 % 64), value=x[-1].item()).view(-1, 64)
    levels = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    spread = padded.abs().amax(1) if symmetric else padded.amax(1) - padded.amin(1)
    assert torch.allclose(q.scale.double(), spread / levels, rtol=1e-6)


@pytest.mark.native
@pytest.mark.parametrize("bits,symmetric,stochastic", KINDS)
def test_every_path_gives_the_same_bits(bits, symmetric, stochastic):
    module = native.module()
    if module is None:
        pytest.skip("needs the compiled module")
    kept, threads = module.isa(), torch.get_num_threads()
    options = {"bits": bits, "symmetric": symmetric}

    def run(x, group):
        q = dsx_ops.quantize(x, stochastic=stochastic, seed=9, group_size=group, **options)
        return [*q, dsx_ops.dequantize(q, x.shape, group_size=group, dtype=x.dtype, **options)]

    try:
        for n, group, dtype in itertools.product(
            (0, 1, 15, 700, 40_001), (10, 256, 1040), (torch.float32, torch.bfloat16, torch.float16)
        ):
            x = data(n, torch.float32).clamp(-6e4, 6e4).to(dtype)
            with dsx_ops.reference_only():
                expected = run(x, group)
            for isa in module.isas():
                module.set_isa(isa)
                torch.set_num_threads(3 if isa == "avx2" else 1)
                assert all(torch.equal(a, b) for a, b in zip(expected, run(x, group))), (n, group, dtype, isa)
    finally:
        module.set_isa(kept)
        torch.set_num_threads(threads)


def test_results_go_where_they_are_wanted(either_path):
    x, q = data(1000), dsx_ops.quantize(data(1000, seed=1), bits=4)
    assert dsx_ops.quantize(x, bits=4, out=q) is q
    assert all(torch.equal(a, b) for a, b in zip(q, dsx_ops.quantize(x, bits=4)))
    room = torch.full((1010,), 5.0)
    dsx_ops.dequantize(q, 1000, bits=4, out=room[3:1003])
    assert torch.equal(room[3:1003], dsx_ops.dequantize(q, 1000, bits=4))
    assert (room[:3] == 5).all() and (room[1003:] == 5).all()


def test_places_beyond_32_bits_are_told_apart(either_path):
    """The noise hashes an index of 64 bits; groups in which its low half overflows give what they give when cut
    elsewhere.
    """
    x = torch.full((600,), 0.357)
    x[::20] = 1.0
    start = 2**32 - 310
    how = {"bits": 4, "group_size": 20, "stochastic": True, "seed": 1}
    whole = dsx_ops.quantize(x, offset=start, **how)
    pieces = [dsx_ops.quantize(x[i : i + 20], offset=start + i, **how) for i in range(0, 600, 20)]
    assert torch.equal(torch.cat([p.codes for p in pieces]), whole.codes)
    with dsx_ops.reference_only():
        assert torch.equal(dsx_ops.quantize(x, offset=start, **how).codes, whole.codes)
    assert not torch.equal(dsx_ops.quantize(x, offset=start + 2**32, **how).codes, whole.codes)


def test_stochastic_rounding_is_unbiased_and_keyed_by_place(either_path):
    x = torch.full((65536,), 0.3)
    x[::256] = 1.0
    q = dsx_ops.quantize(x, bits=4, stochastic=True, seed=1)
    kept = torch.ones(65536, dtype=torch.bool)
    kept[::256] = False
    assert dsx_ops.dequantize(q, 65536, bits=4)[kept].mean().item() == pytest.approx(0.3, abs=2e-3)
    tail = dsx_ops.quantize(x[32768:], bits=4, stochastic=True, seed=1, offset=32768)
    assert torch.equal(tail.codes, q.codes[16384:])
    assert not torch.equal(dsx_ops.quantize(x, bits=4, stochastic=True, seed=2).codes, q.codes)


def test_zeros_constants_and_what_is_not_finite(either_path):
    for symmetric in (True, False):
        assert not dsx_ops.dequantize(
            dsx_ops.quantize(torch.zeros(40), symmetric=symmetric), 40, symmetric=symmetric
        ).any()
        for bad in (float("nan"), float("inf")):
            x = torch.ones(512)
            x[300] = bad
            back = dsx_ops.dequantize(dsx_ops.quantize(x, symmetric=symmetric), 512, symmetric=symmetric)
            assert not back[256:].isfinite().all()
            assert torch.allclose(back[:256], torch.ones(256), rtol=1e-6)
    constant = torch.full((40,), 7.25)
    assert torch.equal(dsx_ops.dequantize(dsx_ops.quantize(constant, symmetric=False), 40, symmetric=False), constant)


def test_wrong_arguments_are_named():
    x = torch.ones(64)
    for text, call in (
        ("bits: got 3", lambda: dsx_ops.quantize(x, bits=3)),
        ("group_size: got 25, expected a positive even", lambda: dsx_ops.quantize(x, bits=4, group_size=25)),
        ("group_size: got 0", lambda: dsx_ops.quantize(x, group_size=0)),
        ("offset: got -8", lambda: dsx_ops.quantize(x, offset=-8)),
        ("contiguous", lambda: dsx_ops.quantize(torch.ones(8, 8).t())),
        ("int64", lambda: dsx_ops.quantize(torch.ones(8, dtype=torch.int64))),
        ("out: got shape", lambda: dsx_ops.dequantize(dsx_ops.quantize(x), 64, out=torch.empty(65))),
        ("expected .64, 1, 0.", lambda: dsx_ops.quantize(x, out=dsx_ops.quantize(x[:63]))),
        ("expected .65, 1, 0.", lambda: dsx_ops.dequantize(dsx_ops.quantize(x), 65)),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=text):
            call()
