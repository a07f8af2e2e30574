"""Layer norm, GELU, dropout and softmax against float64 autograd, through the public functions, with and without native
code.
"""

from __future__ import annotations

import contextlib
import math

import dsx_ops
import pytest
import torch

SHAPES = [(1, 1), (3, 5), (2, 3, 16), (7, 33), (0, 8), (5,), (4, 1000), (33, 64)]
WAYS = {"native": contextlib.nullcontext, "reference": dsx_ops.reference_only}
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=WAYS)
def way(request):
    """Runs the test over the compiled kernels and over the reference."""
    with WAYS[request.param]():
        yield request.param


def close(got, wanted, dtype, scale=1.0):
    """Within the dtype's tolerance of the float64 result."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted.double(), rtol=LOOSE[dtype], atol=LOOSE[dtype] * scale)


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


def exact(*tensors):
    """The same values in float64, as leaves."""
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("from_output", [False, True])
def test_layer_norm(way, shape, dtype, from_output):
    torch.manual_seed(1)
    x, w, b = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype), leaf(shape[-1], dtype=dtype)
    if from_output:  # invertible: no weight near 0
        with torch.no_grad():
            w.copy_(w.sign() * (w.abs() + 0.5))
    x64, w64, b64 = exact(x, w, b)
    y = dsx_ops.layer_norm(x, w, b, 1e-5, from_output=from_output)
    y64 = torch.nn.functional.layer_norm(x64, shape[-1:], w64, b64, 1e-5)
    close(y, y64, dtype)
    g = torch.randn_like(y)
    y.backward(g)
    y64.backward(g.double())
    rows = max(1, math.prod(shape[:-1]))
    if shape[-1] == 1 or (from_output and dtype != torch.float32):
        return  # rstd is 1/sqrt(eps): rounding of the output decides
    close(x.grad, x64.grad, dtype, 10 if shape[-1] < 8 else 3)
    close(w.grad, w64.grad, dtype, math.sqrt(rows) * (20 if from_output else 3))
    close(b.grad, b64.grad, dtype, math.sqrt(rows))


@pytest.mark.parametrize("dtype", LOOSE)
def test_add_layer_norm(way, dtype):
    torch.manual_seed(2)
    x, r = leaf(9, 40, dtype=dtype), leaf(9, 40, dtype=dtype)
    w, b = leaf(40), leaf(40)
    y, total = dsx_ops.add_layer_norm(x, r, w, b)
    assert torch.equal(total, x + r)
    x64, w64, b64 = exact(total, w, b)
    y64 = torch.nn.functional.layer_norm(x64, (40,), w64, b64)
    close(y, y64, dtype)
    g, h = torch.randn_like(y), torch.randn_like(y)
    torch.autograd.backward([y, total], [g, h])
    torch.autograd.backward([y64, x64], [g.double(), h.double()])
    assert torch.equal(x.grad, r.grad)
    close(x.grad, x64.grad, dtype, 3)
    close(w.grad, w64.grad, torch.float32, 10)
    close(b.grad, b64.grad, torch.float32, 10)


def test_only_the_sum_of_add_layer_norm_is_used(way):
    x, r, w, b = leaf(3, 16), leaf(3, 16), leaf(16), leaf(16)
    dsx_ops.add_layer_norm(x, r, w, b)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and w.grad is None


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu(way, shape, dtype, approximate, with_bias):
    torch.manual_seed(3)
    x = leaf(*shape, dtype=dtype, scale=4.0)
    b = leaf(shape[-1], dtype=dtype) if with_bias else None
    y = dsx_ops.bias_gelu(x, b, approximate)
    (x64,) = exact(x)
    b64 = exact(b)[0] if with_bias else None
    u64 = x64 if b64 is None else x64 + b64
    y64 = torch.nn.functional.gelu(u64, approximate=approximate)
    close(y, y64, dtype)
    g = torch.randn_like(y)
    y.backward(g)
    y64.backward(g.double())
    close(x.grad, x64.grad, dtype)
    if with_bias:
        close(b.grad, b64.grad, dtype, 3 * math.sqrt(max(1, x.numel() // shape[-1])))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_of_special_numbers(way, approximate):
    inf = math.inf
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-38, 20.0, -20.0, 1e30, -1e30, inf, math.nan, 88.0, -88.0])
    u = x.double()
    inner = (
        torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)) if approximate == "tanh" else torch.erf(u / 2**0.5)
    )
    wanted = 0.5 * u * (1 + inner)
    got = dsx_ops.bias_gelu(x, None, approximate)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert dsx_ops.bias_gelu(torch.full((5,), math.nan), None, approximate).isnan().all()


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_far_out_is_the_identity_or_nothing(way, approximate):
    x = torch.tensor([11.0, 30.0, 1e5, 1e15, -11.0, -30.0, -1e5, -1e15], requires_grad=True)
    y = dsx_ops.bias_gelu(x, None, approximate)
    y.sum().backward()
    wanted = torch.where(x > 0, x, 0.0).detach()
    torch.testing.assert_close(y.detach(), wanted, rtol=1e-6, atol=1e-20)
    torch.testing.assert_close(x.grad, (wanted > 0).float(), rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_dropout_residual(way, shape, dtype):
    torch.manual_seed(4)
    x, r, b = leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype)
    y = dsx_ops.bias_dropout_residual(x, b, r, 0.3, seed=11, offset=5)
    kept = dsx_ops.functional.dropout.dropout_mask(shape, 0.3, 11, 5)
    x64, r64, b64 = exact(x, r, b)
    y64 = r64 + torch.where(kept, (x64 + b64) / 0.7, 0.0)
    close(y, y64, dtype)
    g = torch.randn_like(y)
    y.backward(g)
    y64.backward(g.double())
    close(x.grad, x64.grad, dtype)
    close(b.grad, b64.grad, dtype, 3 * math.sqrt(max(1, x.numel() // shape[-1])))
    assert torch.equal(r.grad, g)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_replays_its_mask(way, p):
    x = (torch.rand(1000, 17) + 0.5).requires_grad_()
    y = dsx_ops.dropout(x, p, seed=3)
    kept = dsx_ops.functional.dropout.dropout_mask(x.shape, p, 3)
    assert torch.equal(y != 0, kept)
    assert abs(kept.float().mean().item() - (1 - p)) < 0.02
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    assert torch.equal(dsx_ops.dropout(x, p, seed=3), y)
    if 0 < p < 1:
        assert not torch.equal(dsx_ops.dropout(x, p, seed=4), y)


def test_dropout_of_a_piece_is_a_piece_of_the_dropout(way):
    x = torch.randn(1000)
    whole = dsx_ops.dropout(x, 0.4, seed=9, offset=2**32 - 300)
    for at, n in ((0, 1000), (16, 100), (299, 40), (301, 1), (993, 7)):
        assert torch.equal(dsx_ops.dropout(x[at : at + n], 0.4, 9, 2**32 - 300 + at), whole[at : at + n])


MASKS = {
    "none": lambda b, h, s, t: None,
    "rows": lambda b, h, s, t: torch.randn(b, 1, 1, t),
    "full": lambda b, h, s, t: torch.randn(b, h, s, t),
    "bool": lambda b, h, s, t: torch.rand(b, 1, s, t) > 0.3,
    "bf16": lambda b, h, s, t: torch.randn(s, t, dtype=torch.bfloat16),
    "column": lambda b, h, s, t: torch.randn(h, s, 1),
}


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (1, 2, 4, 64), (2, 1, 3, 1), (1, 1, 0, 4), (1, 2, 3, 515)])
def test_masked_softmax(way, sizes, kind, dtype):
    torch.manual_seed(5)
    x = leaf(*sizes, dtype=dtype, scale=3.0)
    mask = MASKS[kind](*sizes)
    y = dsx_ops.masked_softmax(x, mask, 0.5)
    (x64,) = exact(x)
    scores = x64 * 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    y64 = torch.softmax(scores, -1).nan_to_num(0.0)
    close(y, y64, dtype)
    g = torch.randn_like(y)
    y.backward(g)
    wanted = 0.5 * y64 * (g.double() - (g.double() * y64).sum(-1, keepdim=True))
    close(x.grad, wanted, dtype, 3)


def test_softmax_rows_without_a_part_are_zero(way):
    x = torch.randn(2, 3, 20)
    mask = torch.ones(2, 1, 20, dtype=torch.bool)
    mask[1] = False
    y = dsx_ops.masked_softmax(x, mask)
    assert torch.equal(y[1], torch.zeros(3, 20)) and torch.allclose(y[0].sum(-1), torch.ones(3))
    assert torch.equal(dsx_ops.masked_softmax(x, torch.full((20,), -math.inf)), torch.zeros(2, 3, 20))


def test_softmax_spreads_nan_over_its_row_only(way):
    x = torch.randn(3, 40)
    x[1, 7] = math.nan
    y = dsx_ops.masked_softmax(x)
    assert y[1].isnan().all() and y[0].isfinite().all() and y[2].isfinite().all()


def test_unfit_tensors_are_named():
    x, w = torch.randn(4, 8), torch.randn(8)
    for call, words in (
        (lambda: dsx_ops.layer_norm(x.t(), torch.randn(4), torch.randn(4)), "contiguous"),
        (lambda: dsx_ops.layer_norm(x, torch.randn(7), w), r"weight: got shape \(7,\), expected \(8,\)"),
        (lambda: dsx_ops.layer_norm(x.int(), w, w), "input: got int32"),
        (lambda: dsx_ops.layer_norm(x, w, w.bfloat16()), "bias: got bfloat16, expected float32"),
        (lambda: dsx_ops.add_layer_norm(x, x[:2], w, w), "residual: got shape"),
        (lambda: dsx_ops.bias_gelu(x, torch.randn(4)), "GELU's bias"),
        (lambda: dsx_ops.bias_gelu(x, w, "fast"), "approximate: got 'fast'"),
        (lambda: dsx_ops.dropout(x, 1.5, 0), r"p: got 1.5"),
        (lambda: dsx_ops.dropout(x, 0.5, 0, -1), "offset: got -1"),
        (lambda: dsx_ops.masked_softmax(x, torch.zeros(3, 8)), r"mask: got shape \(3, 8\)"),
        (lambda: dsx_ops.masked_softmax(x, torch.zeros(8, dtype=torch.int32)), "mask: got int32"),
        (lambda: dsx_ops.masked_softmax(x, torch.zeros(8, requires_grad=True)), "requires a gradient"),
        (lambda: dsx_ops.masked_softmax(torch.zeros(3, 0)), "at least one element"),
        (lambda: torch.ops.dsx_ops.dropout(x.to_sparse(), 0.5, 0, 0), "sparse"),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
