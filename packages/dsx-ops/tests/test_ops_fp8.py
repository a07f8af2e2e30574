"""fp8 codes against torch's own fp8 dtypes and float64, with the same bits on every path."""

import contextlib
import math

import dsx_ops
import pytest
import torch
from dsx_ops import native

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0, 2.0**-3), "e5m2": (torch.float8_e5m2, 57344.0, 2.0**-2)}
WAYS = {"native": contextlib.nullcontext, "reference": dsx_ops.reference_only}


@pytest.fixture(params=WAYS)
def way(request):
    """Runs the test over the compiled kernels and over the reference."""
    with WAYS[request.param]():
        yield request.param


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_decodes_as_torchs(way, format):
    dtype = FORMATS[format][0]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    q = dsx_ops.codes.quantize.Quantized(codes, torch.tensor([1.0]), torch.empty(0))
    back = dsx_ops.dequantize_fp8(q, 256, format=format)
    torch.testing.assert_close(back, codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_nearest_is_torchs_rounding(way, format):
    dtype, top, _ = FORMATS[format]
    torch.manual_seed(0)
    x = torch.cat([torch.randn(3000) * 10 ** torch.linspace(-9, 2, 3000), torch.tensor([0.0, -0.0, 1e-45])])
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    for values in (x.clamp(-top, top), ties, every):
        values = torch.cat([torch.tensor([top]), values])  # so that the scale is 1
        q = dsx_ops.quantize_fp8(values, format=format, group_size=10_000)
        assert q.scale.item() == 1.0 and q.codes.dtype == dtype
        assert torch.equal(q.codes.view(torch.uint8), values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_error_is_below_a_step(way, format, stochastic):
    _, top, step = FORMATS[format]
    torch.manual_seed(1)
    x = torch.randn(5001) * 10 ** torch.linspace(-3, 3, 5001)
    q = dsx_ops.quantize_fp8(x, format=format, group_size=64, stochastic=stochastic, seed=5)
    back = dsx_ops.dequantize_fp8(q, 5001, format=format, group_size=64).double()
    scale = q.scale.double().repeat_interleave(64)[:5001]
    smallest = (2.0**-9 if format == "e4m3" else 2.0**-16) * scale
    bound = torch.maximum(x.double().abs() * step, smallest) * (1.0 if stochastic else 0.5)
    assert ((back - x.double()).abs() <= bound * (1 + 1e-5)).all()
    assert (back.abs() <= top * scale * (1 + 1e-6)).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [0.3, 0.013, 1e-4, 3e-6])
def test_stochastic_rounding_is_unbiased(way, format, value):
    x = torch.full((65536,), value)
    x[::256] = 1.0
    q = dsx_ops.quantize_fp8(x, format=format, stochastic=True, seed=2)
    back = dsx_ops.dequantize_fp8(q, 65536, format=format).view(256, 256)[:, 1:]
    assert back.double().mean().item() == pytest.approx(value, rel=0.03)


def test_a_nan_spoils_its_group_only(way):
    x = torch.ones(512)
    x[300] = math.nan
    back = dsx_ops.dequantize_fp8(dsx_ops.quantize_fp8(x), 512)
    assert back[:256].isfinite().all() and back[256:].isnan().any()


@pytest.mark.skipif(native.module() is None, reason="compares the compiled kernels with the reference")
@pytest.mark.parametrize("format", FORMATS)
def test_every_path_gives_the_same_bits(format):
    module, threads = native.module(), torch.get_num_threads()
    before = module.isa()
    try:
        for numel, group, dtype, stochastic in (
            (0, 64, torch.float32, False),
            (1, 7, torch.bfloat16, True),
            (40_003, 100, torch.float32, True),
            (40_003, 256, torch.bfloat16, False),
            (9_999, 31, torch.float16, True),
        ):
            x = (torch.randn(numel) * 10 ** torch.linspace(-7, 4, max(numel, 1))[:numel]).to(dtype)

            def run(x=x, group=group, dtype=dtype, stochastic=stochastic):
                q = dsx_ops.quantize_fp8(x, format=format, group_size=group, stochastic=stochastic, seed=7, offset=3)
                back = dsx_ops.dequantize_fp8(q, x.shape, format=format, group_size=group, dtype=dtype)
                return q.codes.view(torch.uint8), q.scale, back

            with dsx_ops.reference_only():
                wanted = run()
            for isa in module.isas():
                module.set_isa(isa)
                torch.set_num_threads(3 if isa == "avx2" else 1)
                assert all(torch.equal(a, b) for a, b in zip(run(), wanted)), (numel, dtype, isa)
    finally:
        module.set_isa(before)
        torch.set_num_threads(threads)


def test_wrong_arguments_are_named():
    with pytest.raises(dsx_ops.errors.TensorError, match="format: got 'int8'"):
        dsx_ops.quantize_fp8(torch.ones(4), format="int8")
    q = dsx_ops.quantize_fp8(torch.ones(4))
    with pytest.raises(dsx_ops.errors.TensorError, match="codes: got float8_e4m3fn, expected float8_e5m2"):
        dsx_ops.dequantize_fp8(q, 4, format="e5m2")
