"""Products in FP8 are planned at the rate of what they multiply, not of their results."""

from dataclasses import replace

import pytest
import torch
from dsx_plan import Constants, Machine
from dsx_plan.cost import simulate
from dsx_plan.fake import FakeCompute
from dsx_plan.recorder import Recorder


def seconds_of_products(dtype):
    """A product of 1024 x 1024 matrices with a bf16 result, whose bytes cost nothing."""
    here = replace(Machine.named("H100-SXM"), constants=Constants(products=1.0), memory_bandwidth=1e18)
    recorder = Recorder(ranks_per_host=1, streams=True)
    with recorder.ledger.following_resizes(), FakeCompute(recorder):
        a, b = (torch.empty(1024, 1024, dtype=dtype) for _ in range(2))
        start = len(recorder.trace)
        if dtype == torch.bfloat16:
            torch.mm(a, b)
        else:
            one = torch.ones(())
            torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return simulate(recorder.trace, [(start, len(recorder.trace), 1)], here, ranks_per_host=1).products


@pytest.mark.parametrize(("dtype", "teraflops"), [(torch.bfloat16, 989), (torch.float8_e4m3fn, 1979)])
def test_a_product_has_the_rate_of_its_factors(dtype, teraflops):
    assert seconds_of_products(dtype) == pytest.approx(2 * 1024**3 / (teraflops * 1e12), rel=1e-3)
