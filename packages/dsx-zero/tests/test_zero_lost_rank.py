"""A rank that ends in the middle of training is named on the others, whatever they wait in."""

import socket
import subprocess
import sys
import textwrap

import pytest
from dsx_comm.shm import native

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")


SCRIPT = """
import os, signal, sys, torch, dsx_comm, dsx_zero
import torch.distributed as dist
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group(sys.argv[3], init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=int(sys.argv[4]))
for step in range(8):
    if rank == 1 and step == 2:
        if sys.argv[5] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("the data of step 2")
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(backend, stage, how, folder):
    """What rank 0 said last when rank 1 had ended in the third step."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    words = [str(port), backend, str(stage), how]
    command = [sys.executable, "-W", "ignore", str(script)]
    jobs = [subprocess.Popen([*command, str(rank), *words], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        said = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [1, -9 if how == "killed" else 1], said
    return said[0].strip()


@pytest.mark.parametrize(
    "backend, stage",
    [pytest.param("gloo", 0, marks=pytest.mark.slow), ("gloo", 3), pytest.param("dsx", 2, marks=needs_native)],
)
def test_a_rank_that_raises_is_named_with_its_error(backend, stage, tmp_path):
    last = run(backend, stage, "raises", tmp_path)
    assert "PeerLostError" in last and "rank 1 has left the job: KeyError: 'the data of step 2'" in last, last


@needs_native
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(stage, tmp_path):
    last = run("dsx", stage, "killed", tmp_path).splitlines()[-1]
    assert "PeerLostError" in last and "rank(s) 1 ended while rank 0 waited" in last, last
