"""The CUDA kernels of the operators, run on the host by the emulator, against their references and float64."""

import itertools
import math

import pytest
import torch
from dsx_ops import onebit, tokens
from dsx_ops.codes import reference
from dsx_ops.codes.scheme import FORMATS, Scheme, Swizzle
from dsx_ops.cuda import loader
from dsx_ops.cuda.operators import KERNELS
from dsx_ops.functional import dropout as drop
from dsx_ops.functional import gelu, layer_norm, softmax

pytestmark = pytest.mark.native
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Warps, blocks and rows that do not fit registers; whole and ragged rows; none.
SHAPES = [(1, 1), (3, 5), (2, 3, 16), (0, 8), (5,), (37, 64), (3, 1023), (2, 1028), (2, 3001)]


def close(got, wanted, scale=1.0):
    dtype = got.dtype
    torch.testing.assert_close(got.double(), wanted.double(), rtol=LOOSE[dtype], atol=LOOSE[dtype] * scale)


def same(a, b):
    """Equal bits; any NaN equals any NaN."""
    if a.element_size() == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def run(emulator, name, *arguments):
    """The kernel itself, never its fallback."""
    found = KERNELS[name].run(emulator, *arguments)
    assert found is not None
    return found


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, each_order):
    torch.manual_seed(1)
    for dtype, w_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ):
        x, r, g, e = (randn(*shape, dtype=dtype) for _ in range(4))
        w, b = randn(shape[-1], dtype=w_dtype) + 2, randn(shape[-1], dtype=w_dtype)
        y, mean, rstd = run(each_order, "layer_norm", x, w, b, 1e-5, False)
        wanted = layer_norm.reference_layer_norm(x.double(), w, b, 1e-5)
        close(y, wanted[0])
        close(mean, x.double().mean(-1))
        y2, total, _, _ = run(each_order, "add_layer_norm", x, r, w, b, 1e-5)
        assert torch.equal(total, x + r)
        close(y2, torch.nn.functional.layer_norm(total.double(), shape[-1:], w.double(), b.double()))
        rows = math.sqrt(max(1, x.numel() // shape[-1]))
        for saved, from_output, extra in ((x, False, None), (x, False, e), (y, True, None)):
            if shape[-1] < 4 and from_output:
                continue
            args = (g, saved, mean, rstd, w, b, extra, from_output)
            dx, dw, db = run(each_order, "layer_norm_backward", *args)
            want = layer_norm.reference_layer_norm_backward(*args)
            close(dx, want[0], 3)
            close(dw, want[1], 3 * rows)
            close(db, want[2], rows)


def test_layer_norm_of_long_rows_and_zero_weights(emulator):
    torch.manual_seed(2)
    x, w, b = randn(2, 17_001), randn(17_001), randn(17_001)
    y, mean, rstd = run(emulator, "layer_norm", x, w, b, 1e-5, False)
    close(y, torch.nn.functional.layer_norm(x.double(), (17_001,), w.double(), b.double()))
    for from_output, saved in ((False, x), (True, y)):
        args = (randn(2, 17_001), saved, mean, rstd, w, b, None, from_output)
        wanted = layer_norm.reference_layer_norm_backward(*args)
        for got, want in zip(run(emulator, "layer_norm_backward", *args), wanted):
            close(got, want, 100)
    x, w, b = randn(260, 2100), randn(2100), randn(2100)
    w[::3] = 0
    y, mean, rstd = run(emulator, "layer_norm", x, w, b, 1e-5, True)
    args = (randn(260, 2100), y, mean, rstd, w, b, None, True)
    for got, wanted in zip(
        run(emulator, "layer_norm_backward", *args), layer_norm.reference_layer_norm_backward(*args)
    ):
        close(got, wanted, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [256, 257, 512, 520, 1024, 8192, 8200], ids=str)
def test_layer_norm_backward_at_the_borders_of_its_forms(cols, dtype, each_order):
    """Rows of a warp with 8 and 16 columns per thread, rows of a block, rows that are too long to be held."""
    torch.manual_seed(12)
    rows = {256: 2100, 520: 1100}.get(cols, 3)  # 2100 and 1100: more than there are walkers, so that they take several
    x, g = randn(rows, cols, dtype=dtype), randn(rows, cols, dtype=dtype)
    w, b = randn(cols, dtype=dtype) + 2, randn(cols, dtype=dtype)
    _, mean, rstd = run(each_order, "layer_norm", x, w, b, 1e-5, False)
    args = (g, x, mean, rstd, w, b, None, False)
    wanted = layer_norm.reference_layer_norm_backward(*args)
    for got, want, scale in zip(run(each_order, "layer_norm_backward", *args), wanted, (3, 3 * rows**0.5, rows**0.5)):
        close(got, want, scale)


def test_column_sums_have_the_same_bits_in_any_order(emulator_module):
    """No atomics: the order in which blocks, warps and threads run changes nothing."""
    torch.manual_seed(13)
    x, g, w = randn(600, 300), randn(600, 300), randn(300)
    found = []
    for order in (0, 1, 5):
        emulator_module.set_order(order)
        _, mean, rstd = run(emulator_module, "layer_norm", x, w, w, 1e-5, False)
        norm = run(emulator_module, "layer_norm_backward", g, x, mean, rstd, w, w, None, False)
        found.append([*norm, *run(emulator_module, "bias_gelu_backward", g, x, w, True)])
    emulator_module.set_order(0)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_division_by_multiplication_is_exact(emulator_module):
    generator = torch.Generator().manual_seed(14)
    edges = [0, 1, 2, 3, 7, 255, 256, 2**16 - 1, 2**16 + 1, 2**31 - 2, 2**31 - 1, 2**31, 2**40 + 5]
    numbers = edges + torch.randint(0, 2**31, (300,), generator=generator).tolist()
    divisors = [d for d in edges if d] + torch.randint(1, 2**31, (300,), generator=generator).tolist()
    for n in numbers:
        for d in divisors:
            assert emulator_module.quotient(n, d) == n // d, (n, d)


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu(shape, tanh, emulator):
    torch.manual_seed(3)
    for dtype, with_bias in itertools.product(FLOATS, (True, False)):
        x, g = randn(*shape, dtype=dtype, scale=3.0), randn(*shape, dtype=dtype)
        b = randn(shape[-1]) if with_bias else None
        close(run(emulator, "bias_gelu", x, b, tanh), gelu.reference_bias_gelu(x, b, tanh))
        dx, db = run(emulator, "bias_gelu_backward", g, x, b, tanh)
        wanted, sums = gelu.reference_bias_gelu_backward(g, x, b, tanh)
        close(dx, wanted)
        close(db, sums, 4 * math.sqrt(max(1, x.numel() // shape[-1])))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_has_the_bits_of_the_reference(shape, p, emulator):
    torch.manual_seed(4)
    for dtype, offset in itertools.product(FLOATS, (0, 2**32 - 9)):
        x, r, g = (randn(*shape, dtype=dtype) for _ in range(3))
        b = randn(shape[-1], dtype=dtype)
        assert torch.equal(run(emulator, "dropout", x, p, 5, offset), drop.reference_dropout(x, p, 5, offset))
        for bias in (None, b):
            args = (x, bias, r, p, 5, offset)
            assert torch.equal(
                run(emulator, "bias_dropout_residual", *args), drop.reference_bias_dropout_residual(*args)
            )
        dx, db = run(emulator, "bias_grad", g, torch.float32, p, 5, offset)
        wanted, sums = drop.reference_bias_grad(g, torch.float32, p, 5, offset)
        assert torch.equal(dx, wanted)
        close(db, sums, math.sqrt(max(1, x.numel() // shape[-1])))


MASKS = {
    "none": lambda b, h, s, t: None,
    "rows": lambda b, h, s, t: torch.randn(b, 1, 1, t),
    "full": lambda b, h, s, t: torch.randn(b, h, s, t),
    "bool": lambda b, h, s, t: torch.rand(b, 1, s, t) > 0.3,
    "bf16": lambda b, h, s, t: torch.randn(s, t, dtype=torch.bfloat16),
    "column": lambda b, h, s, t: torch.randn(h, s, 1),
    "strided": lambda b, h, s, t: torch.randn(t, b).t()[:, None, None],
    "nothing": lambda b, h, s, t: torch.zeros(b, h, s, t, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (1, 2, 4, 64), (2, 1, 3, 1), (1, 1, 0, 4), (1, 2, 3, 1500)], ids=str)
def test_masked_softmax(sizes, kind, each_order):
    torch.manual_seed(5)
    mask = MASKS[kind](*sizes)
    for dtype in FLOATS:
        x, g = randn(*sizes, dtype=dtype, scale=3.0), randn(*sizes, dtype=dtype)
        y = run(each_order, "masked_softmax", x, mask, 0.5)
        close(y, softmax.reference_masked_softmax(x, mask, 0.5))
        close(run(each_order, "softmax_backward", g, y, 0.5), softmax.reference_softmax_backward(g, y, 0.5))


def test_softmax_of_long_rows_and_many_dimensions(emulator):
    x = torch.randn(2, 17_001)
    x[1, 3] = math.nan
    y = run(emulator, "masked_softmax", x, None, 1.0)
    close(y[:1], torch.softmax(x[:1].double(), -1))
    assert y[1].isnan().all()
    close(run(emulator, "softmax_backward", x[:1], y[:1], 1.0), softmax.reference_softmax_backward(x[:1], y[:1], 1.0))
    deep = torch.randn(1, 2, 1, 2, 1, 2, 3, 8)
    assert KERNELS["masked_softmax"].run(emulator, deep, torch.zeros(8), 1.0) is None
    close(run(emulator, "masked_softmax", deep, None, 1.0), torch.softmax(deep.double(), -1))


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_have_the_bits_of_the_reference(format, stochastic, emulator):
    generator = torch.Generator().manual_seed(6)
    for n, group, dtype in itertools.product((0, 1, 17, 700, 5001), (6, 16, 256, 520, 4112), FLOATS):
        x = (torch.randn(n, generator=generator) * 10 ** torch.linspace(-3, 3, max(n, 1))[:n]).to(dtype)
        how = (format, group, stochastic, 9, 32, [1, 1, 1])
        got, wanted = run(emulator, "quantize", x, *how), reference.quantize(x, Scheme(*how[:5]))
        assert all(same(a, b) for a, b in zip(got, wanted)), (n, group, dtype)
        back = run(emulator, "dequantize", *got, [n], format, group, [1, 1, 1], dtype)
        assert same(back, reference.dequantize(*got, n, Scheme(format, group)).to(dtype))
        out = tuple(torch.zeros_like(t) for t in got)
        run(emulator, "quantize_out", x, *how, *out)
        assert all(map(same, out, got))


@pytest.mark.parametrize("format", FORMATS)
def test_swizzled_codes(format, emulator):
    x = torch.randn(3 * 2 * 2 * 4 * 20)
    how = (format, 20, False, 0, 0, [3, 2, 2])
    got, wanted = run(emulator, "quantize", x, *how), reference.quantize(x, Scheme(*how[:5], Swizzle(3, 2, 2)))
    assert all(map(same, got, wanted))
    out = torch.empty_like(x)
    run(emulator, "dequantize_out", *got, format, 20, [3, 2, 2], out)
    assert same(out, reference.dequantize(*got, x.numel(), Scheme(format, 20, swizzle=Swizzle(3, 2, 2))))


@pytest.mark.parametrize("format", FORMATS)
def test_reduction_of_codes(format, each_order):
    torch.manual_seed(8)
    for n, group, again in ((1000, 64, 64), (4099, 256, 50), (6, 4, 5000), (9000, 16, 600)):
        if format.startswith("int4") and n % 2:
            n += 1
        parts = [reference.quantize(torch.randn(n), Scheme(format, group)) for _ in range(3)]
        q = [torch.cat([p[k].view(torch.uint8) if k == 0 else p[k] for p in parts]) for k in range(3)]
        q[0] = q[0].view(parts[0][0].dtype)
        rows = [t.view(3, -1) for t in q]
        total = reference.reduce(tuple(rows), n, Scheme(format, group), 1 / 3)
        out = torch.empty(n)
        run(each_order, "reduce_codes", *q, 3, format, group, 1 / 3, out)
        assert same(out, total)
        for stochastic in (False, True):
            how = ("int8", again, stochastic, 4, 16)
            got = run(each_order, "requantize", *q, 3, n, format, group, 1 / 3, *how)
            assert all(map(same, got, reference.quantize(total, Scheme(*how))))


@pytest.mark.parametrize("format", FORMATS)
def test_a_group_with_nan_comes_back_not_finite(format, emulator):
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(512)
        x[300] = bad
        q = run(emulator, "quantize", x, format, 256, False, 0, 0, [1, 1, 1])
        back = run(emulator, "dequantize", *q, [512], format, 256, [1, 1, 1], torch.float32)
        assert not back[256:].isfinite().all() and torch.allclose(back[:256], torch.ones(256), rtol=1e-6)


def test_every_fp8_code_decodes_as_torch_says(emulator):
    codes = torch.arange(256, dtype=torch.uint8)
    for format, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        q = (codes.view(dtype), torch.ones(1), torch.empty(0))
        back = run(emulator, "dequantize", *q, [256], format, 256, [1, 1, 1], torch.float32)
        assert same(back, codes.view(dtype).float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_have_the_bits_of_the_reference(dtype, each_order):
    torch.manual_seed(7)
    for n in (0, 1, 7, 8, 33, 1023, 1025, 40_001):
        x, error = randn(n, dtype=dtype), randn(n)
        if n > 40:
            x[3], x[5], x[17] = 0.0, -0.0, math.nan
        assert torch.equal(run(each_order, "pack_signs", x), onebit.reference_pack_signs(x))
        x = x.nan_to_num()
        mine, theirs = error.clone(), error.clone()
        packed, scale = run(each_order, "compress_signs", x, mine)
        wanted = onebit.reference_compress(x, theirs)
        torch.testing.assert_close(scale, wanted[1], rtol=2e-7, atol=0)
        assert torch.equal(packed, wanted[0])
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        scales = torch.rand(3)
        rows = torch.stack([packed, packed.flip(0), packed // 2])
        out = run(each_order, "unpack_signs", rows, scales, n, dtype)
        assert torch.equal(out, onebit.reference_unpack_signs(rows, scales, n, dtype))
        mean = torch.empty(n)
        run(each_order, "mean_of_signs", rows, scales, n, mean)
        assert torch.equal(mean, onebit.reference_mean_of_signs(rows, scales, n))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_token_gather_and_scatter(dtype, batch_first, emulator):
    torch.manual_seed(9)
    for batch, sequence, kept, hidden in ((1, 1, 1, 1), (3, 9, 4, 5), (2, 8, 8, 32), (2, 5, 0, 8)):
        shape = (batch, sequence, hidden) if batch_first else (sequence, batch, hidden)
        x = (torch.randn(*shape) * 50).to(dtype)
        indices = torch.stack([torch.randperm(sequence)[:kept] for _ in range(batch)])
        part = run(emulator, "token_gather", x, indices, batch_first)
        assert torch.equal(part, tokens.reference_gather(x, indices, batch_first))
        new, wanted = (torch.randn(*part.shape) * 50).to(dtype), x.clone()
        tokens.reference_scatter_(wanted, new, indices, batch_first)
        assert torch.equal(run(emulator, "token_scatter", x, new, indices, batch_first), wanted)
        run(emulator, "token_scatter_", x, new, indices, batch_first)
        assert torch.equal(x, wanted)


def test_bad_indices_touch_nothing(emulator):
    x = torch.randn(1, 4, 8)
    part = run(emulator, "token_gather", x, torch.tensor([[-1, 4, 2]]), True)
    assert torch.equal(part[0, 2], x[0, 2]) and not part[0, :2].any()
    assert torch.equal(run(emulator, "token_scatter", x, part, torch.tensor([[-5, 99, 2]]), True), x)


def test_without_the_module_the_reference_serves(monkeypatch):
    monkeypatch.setattr(loader, "module", lambda: None)
    x = torch.randn(4, 8)
    assert torch.equal(KERNELS["dropout"](x, 0.5, 3, 0), drop.reference_dropout(x, 0.5, 3, 0))


def test_every_kernel_is_registered_for_cuda():
    for name in KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dsx_ops::{name}", "CUDA"), name
