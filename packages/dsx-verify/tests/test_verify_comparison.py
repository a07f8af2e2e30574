"""What `Comparison` calls different: values, shapes, and numbers that are not finite."""

import torch
from dsx_verify import Difference
from dsx_verify.compare import Comparison


def test_values_that_are_not_finite_differ_from_finite_ones():
    found = Comparison(0)
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])
    found.tensors(1, "grad", "same", nan, nan, 0.0)
    found.tensors(1, "grad", "same", inf, inf, 0.0)
    assert not found.differences
    found.tensors(1, "grad", "nan", nan, torch.ones(2), 0.1)
    found.tensors(1, "grad", "inf", torch.ones(2), inf, 0.1)
    found.tensors(1, "grad", "shape", torch.ones(2), torch.ones(3), 0.1)
    assert [d.name for d in found.differences] == ["nan", "inf", "shape (shape)"]
    assert isinstance(found.differences[0], Difference) and found.differences[0].where == (1,)
