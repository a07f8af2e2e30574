"""A rank that is killed in the ring, or in an exchange of heads, is named on the others."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from dsx_comm.shm import native

SCRIPT = """
import os, signal, sys, torch
import dsx_comm
import torch.distributed as dist
from dsx_activations import sequence_attention
rank, team = int(sys.argv[1]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("dsx", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=3)
q = torch.randn(1, 3, 8, 4, requires_grad=True)
for step in range(3):
    out = sequence_attention(q, q, q, causal=True, length=24, team=team)
    if rank == 1 and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()
"""


@pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
@pytest.mark.parametrize("team", [1, 3])
def test_a_killed_rank_is_named(team, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "attend.py"
    script.write_text(SCRIPT)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(port), str(team)],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [job.communicate(timeout=100)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert jobs[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        last = next((line for line in said[rank].splitlines() if "PeerLostError: " in line), "")
        assert jobs[rank].returncode == 1 and re.search(r"rank 1\b|rank\(s\) 1\b", last), said[rank]
