"""Ranks that save and end with exit code 75 because one of them was asked to: on several hosts the launcher or the
batch system starts all of them again.

A stand-in for ssh runs each host's agent on this machine; stand-ins for Slurm's commands run its batch script.
"""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from dsx_launch.hosts import Clients
from dsx_launch.runners.base import Command

TRAIN = """
    import os, signal, sys, torch, dsx
    torch.manual_seed(0)
    engine = dsx.initialize(model=torch.nn.Linear(2, 1), config={
        "train_batch_size": int(os.environ["WORLD_SIZE"]),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None})[0]
    folder = sys.argv[-1]
    engine.save_on_preemption(folder)
    engine.load_checkpoint(folder)
    began = engine.global_steps
    while engine.global_steps < began + (20 if began else 100000):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        if not began and engine.global_steps == 5 and engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)  # as a spot machine's agent would
    print(f"rank {engine.global_rank} resumed: {began > 0}", flush=True)
    engine.destroy()
"""

SSH = """\
#!{python}
import os, sys
os.execvp("sh", ["sh", "-c", sys.argv[-1]])  # the host's login shell, on this machine
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def program(folder, name, text):
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("{python}", sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def job(tmp_path):
    """What a launch of two hosts needs: environment, and the command without options of its own."""
    program(tmp_path, "ssh", SSH)
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)

    def command(*options):
        return [
            sys.executable, "-m", "dsx.launcher", "-H", str(tmp_path / "hosts"), "--num_procs", "1", "--master_addr",
            "127.0.0.1", "--master_port", str(port), "--launcher", "ssh", "--no_ssh_check", *options,
            str(tmp_path / "train.py"), str(tmp_path / "ckpt"),
        ]  # fmt: skip

    port = free_port()
    return environ, command


def run(environ, command, timeout=400):
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, done.stdout + done.stderr


def test_all_hosts_are_started_again(job):
    environ, command = job
    code, said = run(environ, command("--restarts", "2"))
    assert code == 0, said
    assert "rank 0 resumed: True" in said and "rank 1 resumed: True" in said
    assert said.count("have saved and ended; starting them again") == 1 and "Traceback" not in said


def test_without_restarts_the_exit_code_says_resume_me(job, tmp_path):
    """That ranks which were asked to end do end so is what the test above needs."""
    environ, command = job
    (tmp_path / "train.py").write_text("import sys; sys.exit(75)")
    code, said = run(environ, command())
    assert code == 75, said
    assert "starting them again" not in said and "Traceback" not in said


@pytest.mark.slow
def test_hosts_that_are_started_one_by_one_meet_again(job):
    environ, command = job
    jobs = [
        subprocess.Popen(
            command("--no_ssh", "--node_rank", str(rank), "--restarts", "1"), env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, one in enumerate(jobs):
        said, _ = one.communicate(timeout=400)
        assert one.returncode == 0, said
        assert f"rank {rank} resumed: True" in said


@pytest.mark.parametrize(
    "codes, expected",
    [((75, 75), 75), ((75, 128 + 15), 75), ((75, 1), 1), ((75, 0), 75), ((7, 75), 7), ((0, 0), 0), ((75, -9), 137)],
)
def test_a_job_can_be_resumed_only_if_no_host_has_failed(codes, expected):
    texts = [f"exit {code}" if code >= 0 else f"kill {code} $$" for code in codes]
    clients = Clients([Command(("sh", "-c", text), host="h") for text in texts], dict(os.environ))
    assert clients.wait_all(20)
    assert clients.code == expected


def batch_script():
    """The batch script of docs/launcher.md."""
    text = (Path(__file__).parents[3] / "docs" / "launcher.md").read_text()
    return next(block for block in re.findall(r"```sh\n(#!.*?)```", text, re.DOTALL) if "#SBATCH" in block)


@pytest.mark.slow
def test_the_batch_script_for_slurm_requeues_what_has_saved(job, tmp_path):
    environ, _ = job
    srun = """\
#!{python}
import os, subprocess, sys
words = sys.argv[sys.argv.index(sys.executable):]
nodes = ["node-1", "node-2"]
ranks = [subprocess.Popen(words, env={**os.environ, "SLURMD_NODENAME": node}) for node in nodes]
sys.exit(max(rank.wait() for rank in ranks))
"""
    program(tmp_path, "srun", srun)
    program(tmp_path, "scontrol", f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    here = f"--master_addr 127.0.0.1 --master_port {free_port()} --num_procs 1"
    program(tmp_path, "dsx", f'#!/bin/sh\nshift\nexec {sys.executable} -m dsx.launcher {here} "$@"\n')
    (tmp_path / "job.sh").write_text(batch_script())
    environ |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_CPUS_ON_NODE": "1"}

    def submit():
        done = subprocess.run(
            ["bash", "job.sh"], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        return done.returncode, done.stdout + done.stderr

    _, said = submit()
    assert (tmp_path / "requeued").read_text() == "requeue 17\n", said
    code, said = submit()
    assert code == 0 and "rank 1 resumed: True" in said, said
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
