"""Faults that make jobs hang are named with rank, collective, sizes and module: a sample, the bench has all."""

import subprocess
import sys
from pathlib import Path

import pytest
from dsx_testkit import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import hang_faults
import nccl_hang_faults

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


NCCL_SAMPLE = ["other dtype in all_reduce", "two groups in another order", "DDP: rank 1 dies", "DDP: 2 ranks that"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NCCL_SAMPLE)
def test_a_hang_of_simulated_nccl_is_named_and_a_right_job_is_not(name):
    pytest.importorskip("dsx_simcuda")
    bench = Path(nccl_hang_faults.__file__)
    command = [sys.executable, "-m", "dsx_simcuda", str(bench), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = done.stdout.splitlines()
    assert done.returncode == 0 and any(line.startswith("right ") for line in said), done.stdout + done.stderr[-2000:]


def test_the_bench_of_nccl_has_twenty_faults_and_right_jobs():
    faults, good = nccl_hang_faults.nccl_faults(), nccl_hang_faults.good_jobs()
    assert len({fault.name for fault in faults}) == len(faults) >= 20
    assert good and not any(job.kind for job in good)
    assert all(fault.backend == "nccl" and 0 <= fault.bad < fault.world <= 3 for fault in (*faults, *good))


def test_the_bench_has_fifty_faults():
    faults = hang_faults.gloo_faults()
    assert len({fault.name for fault in faults}) == 50 == len(faults)
    assert all(0 <= fault.bad < fault.world <= 3 for fault in faults)
