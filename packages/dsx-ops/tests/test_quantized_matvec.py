"""Products with matrices of 8- and 4-bit codes equal those of the dense matrix in fp64, in every instruction set."""

import pytest
import torch
from dsx_ops import native, quantized_matvec
from dsx_ops.errors import TensorError

SHAPES = [
    (1, 1, 1),
    (5, 7, 1),
    (6, 32, 1),
    (3, 33, 1),
    (4, 96, 3),
    (7, 64, 2),
    (16, 200, 1),
    (9, 1024, 32),
    (300, 160, 1),
]


def codes_of(bits, rows, columns):
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns))
    if bits == 8:
        return values, values.to(torch.int8)
    padded = torch.nn.functional.pad(values & 15, (0, columns % 2)).view(rows, -1, 2).to(torch.uint8)
    return values, padded[..., 0] | (padded[..., 1] << 4)


def check(bits, rows, columns, groups, vectors=3):
    torch.manual_seed(rows + columns)
    values, codes = codes_of(bits, rows, columns)
    scale, x = torch.rand(rows * groups) + 0.1, torch.randn(vectors, columns)
    dense = (values.double().view(rows * groups, -1) * scale.double()[:, None]).view(rows, columns)
    expected = x.double() @ dense.t()
    found = quantized_matvec.matvec(x, codes, scale, f"int{bits}")
    assert found.dtype == torch.float32 and found.shape == (vectors, rows)
    bound = 1e-6 * (x.abs().double() @ dense.abs().t()).clamp(min=1e-3)
    assert ((found - expected).abs() <= bound).all()
    other = quantized_matvec.reference(x.double(), codes, scale, f"int{bits}")
    torch.testing.assert_close(other, expected)


@pytest.mark.native
@pytest.mark.parametrize("rows, columns, groups", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_instruction_set_gives_the_product(bits, rows, columns, groups):
    if not quantized_matvec.available():
        pytest.skip("the compiled module has no such kernel")
    module = native.module()
    before = module.isa()
    try:
        for isa in module.isas():
            module.set_isa(isa)
            check(bits, rows, columns, groups)
    finally:
        module.set_isa(before)


@pytest.mark.parametrize("rows, columns, groups", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_reference_serves_without_it(bits, rows, columns, groups):
    with native.reference_only():
        assert not quantized_matvec.available()
        check(bits, rows, columns, groups)


def test_groups_of_other_sizes_and_one_scale_for_all():
    check(8, 4, 48, 3)  # groups of 16: no kernel
    values, codes = codes_of(4, 6, 10)
    x, scale = torch.randn(2, 10), torch.tensor([0.5])
    found = quantized_matvec.matvec(x, codes, scale, "int4")
    torch.testing.assert_close(found, x @ (values.float() * 0.5).t())


def test_slices_that_are_not_contiguous():
    values, codes = codes_of(8, 6, 64)
    x = torch.randn(2, 128)[:, ::2]
    found = quantized_matvec.matvec(x, codes[::2], torch.ones(3), "int8")
    torch.testing.assert_close(found, x @ values[::2].float().t())


@pytest.mark.parametrize("change, message", [
    ({"code": "int5"}, "got code 'int5'"),
    ({"x": torch.ones(2, 4, dtype=torch.float64)}, "x is torch.float64"),
    ({"codes": torch.zeros(3, 5, dtype=torch.int8)}, "codes need 4 bytes in each row, got 5"),
    ({"scale": torch.ones(5)}, "got 5 scales for 3 x 4"),
    ({"scale": torch.ones(0)}, "got 0 scales"),
])  # fmt: skip
def test_bad_arguments_are_named(change, message):
    given = {
        "x": torch.ones(2, 4),
        "codes": torch.zeros(3, 4, dtype=torch.int8),
        "scale": torch.ones(3),
        "code": "int8",
    }
    with pytest.raises(TensorError, match=message):
        quantized_matvec.matvec(**{**given, **change})
