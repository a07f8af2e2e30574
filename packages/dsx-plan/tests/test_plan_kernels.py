"""Fused operators and products in FP8: bytes and seconds against sums by hand."""

from dataclasses import replace

import pytest
import torch
from dsx_plan import Constants, Machine
from dsx_plan.cost import simulate
from dsx_plan.fake import FakeCompute
from dsx_plan.kernels import Kernels
from dsx_plan.recorder import Recorder
from dsx_plan.trace import OPERATOR

N = 4096


def recorded(work, kernels, *shapes):
    """The (flops, bytes) of the operators that `work` runs on bf16 tensors of these shapes."""
    recorder = Recorder(ranks_per_host=1, streams=True, kernels=kernels)
    with recorder.ledger.following_resizes(), FakeCompute(recorder):
        given = [torch.empty(*shape, dtype=torch.bfloat16) for shape in shapes]
        start = len(recorder.trace)
        kept = work(*given)
        recorder.begin("step")
        trace = recorder.trace
        del kept
        found = [(trace.number[i], trace.extra[i]) for i in range(start, len(trace)) if trace.kind[i] == OPERATOR]
    return found, trace, start


def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def test_a_fused_run_reads_what_it_has_not_made_and_writes_what_is_kept():
    one = 2 * N * N
    apart, *_ = recorded(swiglu, Kernels(), (N, N), (N, N))
    fused, *_ = recorded(swiglu, Kernels(fused=True), (N, N), (N, N))
    assert [nbytes for _, nbytes in apart] == [2 * one, 3 * one]
    assert [nbytes for _, nbytes in fused] == [3 * one]


def test_what_outlives_a_run_is_written():
    kept = {}

    def work(x):
        kept["silu"] = torch.nn.functional.silu(x)
        return kept["silu"] + 1

    assert [nbytes for _, nbytes in recorded(work, Kernels(fused=True), (N, N))[0]] == [3 * 2 * N * N]


def test_a_product_ends_a_run():
    found, *_ = recorded(lambda x, w: torch.relu(torch.relu(x) @ w) + 1, Kernels(fused=True), (N, N), (N, N))
    one = 2 * N * N
    assert [nbytes for _, nbytes in found] == [2 * one, 3 * one, 2 * one]
    assert [flops for flops, _ in found][1] == 2 * N**3


def seconds(kernels, shapes=((N, N), (N, N))):
    machine = replace(Machine.named("H100-SXM"), constants=Constants(products=1.0, memory=1.0, operator_seconds=0.0))
    _, trace, start = recorded(torch.mm, kernels, *shapes)
    return simulate(trace, [(start, len(trace), 1)], machine, ranks_per_host=1).products


def test_a_product_in_fp8_takes_its_rate_and_the_casts_of_its_factors():
    flops, factors, result = 2 * N**3, 2 * 2 * N * N, 2 * N * N
    assert seconds(Kernels()) == pytest.approx(flops / 989e12 + (factors + result) / 3350e9, rel=1e-6)
    # Factors are read in 16 bits, written and read in 8.
    assert seconds(Kernels(fp8=True)) == pytest.approx(flops / 1979e12 + (2 * factors + result) / 3350e9, rel=1e-6)
    # Fused, the cast belongs to the kernel before.
    fused = seconds(Kernels(fp8=True, fused=True))
    assert fused == pytest.approx(flops / 1979e12 + (factors / 2 + result) / 3350e9, rel=1e-6)


@pytest.mark.parametrize("width", [N + 8, 32000])
def test_sizes_that_fp8_cannot_have_and_the_output_layer_stay_in_16_bits(width):
    kernels = Kernels(fp8=True, vocabulary=frozenset({32000}))
    assert seconds(kernels, ((N, N), (N, width))) == seconds(Kernels(), ((N, N), (N, width)))
