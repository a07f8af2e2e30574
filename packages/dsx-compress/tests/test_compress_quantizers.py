"""Every quantiser equals its formula, written out element by element in float64."""

import math

import pytest
import torch
from dsx_compress import CompressionError
from dsx_compress.errors import CompressionDataError
from dsx_compress.quantizers import decode, encode, fake_quantize, require_finite


def even(value):
    """Round half to even, in plain Python."""
    return float(round(value))


def oracle(values, bits, kind):
    """One group."""
    n = len(values)
    if bits == 1:
        mean = sum(map(abs, values)) / n
        return [math.copysign(mean, v) if v else 0.0 for v in values]
    if bits == 2:
        threshold = 0.7 * sum(map(abs, values)) / n
        above = [abs(v) for v in values if abs(v) > threshold]
        alpha = sum(above) / len(above) if above else 0.0
        return [math.copysign(alpha, v) if abs(v) > threshold else 0.0 for v in values]
    if kind == "symmetric":
        s = 2 * max(map(abs, values)) / 2**bits
        if s == 0:
            return list(values)
        return [min(max(even(v / s), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) * s for v in values]
    s = (max(values) - min(values)) / 2**bits
    if s == 0:
        return list(values)
    z = even(min(values) / s) * s
    return [min(max(even((v - z) / s), 0), 2**bits - 1) * s + z for v in values]


GROUPS = {
    "random": [0.3, -1.7, 0.02, 5.5, -0.4, 1.1, -3.3, 2.25],
    "ties": [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 4.0, -4.0],
    "positive": [1.0, 2.0, 3.5, 7.25, 1.5, 1.25, 6.0, 5.0],
    "with zeros": [0.0, 0.0, 1.0, -2.0, 0.0, 0.5, -0.5, 0.0],
    "all zero": [0.0] * 8,
    "constant": [3.7] * 8,
    "negative constant": [-0.1] * 8,
}
CASES = [(b, k) for b in (1, 2, 3, 4, 8, 16) for k in ("symmetric", "asymmetric") if b > 2 or k == "symmetric"]


@pytest.mark.parametrize("bits, kind", CASES)
@pytest.mark.parametrize("name", GROUPS)
def test_values_are_those_of_the_formula(name, bits, kind):
    x = torch.tensor(GROUPS[name], dtype=torch.float64)
    expected = torch.tensor(oracle(GROUPS[name], bits, kind), dtype=torch.float64)
    torch.testing.assert_close(fake_quantize(x, bits, 1, kind), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("bits, kind", CASES)
def test_groups_are_quantised_apart(bits, kind):
    rows = [GROUPS[name] for name in ("random", "constant", "all zero", "positive")]
    x = torch.tensor(rows, dtype=torch.float64)
    expected = torch.tensor([oracle(row, bits, kind) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(fake_quantize(x, bits, 4, kind), expected, rtol=0, atol=1e-15)
    halves = torch.tensor(
        [oracle(row[:4], bits, kind) + oracle(row[4:], bits, kind) for row in rows], dtype=torch.float64
    )
    torch.testing.assert_close(fake_quantize(x, bits, 8, kind), halves, rtol=0, atol=1e-15)


@pytest.mark.parametrize("bits, kind", CASES)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_one_element(value, bits, kind):
    x = torch.tensor([value], dtype=torch.float64)
    assert fake_quantize(x, bits, 1, kind).item() == pytest.approx(oracle([value], bits, kind)[0], abs=1e-15)


def test_an_asymmetric_constant_group_is_kept_to_the_last_bit():
    x = torch.full((3, 5), 0.1)
    assert torch.equal(fake_quantize(x, 8, 3, "asymmetric"), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.tensor(oracle(x.double().tolist(), 8, "symmetric"), dtype=torch.float64).to(dtype)
    found = fake_quantize(x, 8)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)
    assert (found == expected).float().mean() > 0.9


def test_the_gradient_passes_straight_through_and_can_be_differentiated_twice():
    x = torch.linspace(-2, 2, 12, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(12.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((fake_quantize(x, 4, 2) * weights).sum(), x)
    assert torch.equal(gradient, weights)
    y = fake_quantize(x, 4, 2)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * y.detach())


def test_stochastic_rounding_is_one_of_both_neighbours_and_right_in_the_mean():
    x = torch.full((20000,), 0.3, dtype=torch.float64)
    x[0] = 1.0  # scale 2 / 8
    encoded = encode(x, 3, rounding="stochastic", generator=torch.Generator().manual_seed(0))
    values = decode(encoded).view(-1)[1:]
    assert set(values.tolist()) == {0.25, 0.5}
    assert values.mean().item() == pytest.approx(0.3, abs=0.003)


def test_bad_arguments_are_named():
    with pytest.raises(CompressionError, match=r"quantize_groups: got 3 .* 8 elements"):
        fake_quantize(torch.ones(8), 8, 3)
    with pytest.raises(CompressionError, match="got 17, expected 1 to 16"):
        fake_quantize(torch.ones(8), 17)
    with pytest.raises(CompressionError, match="binary and ternary are symmetric"):
        fake_quantize(torch.ones(8), 2, kind="asymmetric")
    with pytest.raises(CompressionDataError, match=r"layer\.weight: got 1 NaN and 2 infinite of 4 values"):
        require_finite(torch.tensor([1.0, math.nan, math.inf, -math.inf]), "layer.weight")


def test_nan_shows_in_its_group_only():
    x = torch.tensor([[1.0, math.nan], [1.0, -1.0]])
    for bits in (1, 2, 4):
        found = fake_quantize(x, bits, 2)
        assert found[0].isnan().any() and not found[1].isnan().any()
