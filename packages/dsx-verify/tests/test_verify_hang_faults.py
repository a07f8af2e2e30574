"""Faults that make jobs hang are named with rank, collective, sizes and module: a sample, the bench has all."""

import sys
from pathlib import Path

import pytest
from dsx_testkit import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import hang_faults

SAMPLE = [
    "rank 1 of 3 is not in all_reduce",
    "rank 1 calls all_reduce, not barrier",
    "DDP: rank 0 of 2 has one batch less",
    "FSDP2: only rank 1 gathers an object",
    "a pair inside the world",
]


def one_rank(rank, world, name):
    """Run in a forked rank: forks the ranks of the job again, which end by themselves."""
    fault = next(fault for fault in hang_faults.gloo_faults() if fault.name == name)
    return hang_faults.inject(fault)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_hang_is_named_with_rank_collective_and_module(name):
    assert run_ranks(one_rank, 1, name, backend=None) == [""]


def test_the_bench_has_fifty_faults():
    faults = hang_faults.gloo_faults()
    assert len({fault.name for fault in faults}) == 50 == len(faults)
    assert all(0 <= fault.bad < fault.world <= 3 for fault in faults)
