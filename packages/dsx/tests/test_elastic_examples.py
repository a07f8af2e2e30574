"""The elastic example under Kubernetes' command, Slurm's script, Ray Train and torchrun, with stand-ins for them."""

import os
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "elastic"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the repository only")
WAIT_S = 240


def tool(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def environment(folder, **more):
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def slurm(tmp_path, steps):
    """Stand-ins for srun (runs the program once, here) and scontrol (tells this host's name, notes a requeue)."""
    tool(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    tool(tmp_path, "dsx", f'exec {sys.executable} -m dsx "$@"')
    tool(
        tmp_path, "scontrol",
        f'case "$1" in show) echo 127.0.0.1;; *) echo "$@" > {tmp_path}/requeued;; esac',
    )  # fmt: skip
    env = environment(
        tmp_path, SLURM_JOB_NODELIST="here", SLURM_JOB_NUM_NODES="1", SLURM_JOB_ID="7", PORT=str(free_port()),
        SCRIPT=str(EXAMPLES / "train.py"), OUT=str(tmp_path / "out"), STEPS=str(steps),
    )  # fmt: skip
    return subprocess.Popen(
        ["bash", str(EXAMPLES / "slurm.sh")], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_slurm_asks_the_job_to_end_and_it_is_requeued_and_goes_on(tmp_path):
    job = slurm(tmp_path, 10**6)
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "out" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=WAIT_S)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n", said
    reached = int((tmp_path / "out" / "latest").read_text().removeprefix("global_step"))
    again = slurm(tmp_path, reached + 3)
    said, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0 and f"began after update {reached} (disk), ended after {reached + 3}" in said, said


def test_kubernetes_command_is_one_that_dsx_launch_takes():
    yaml = pytest.importorskip("yaml")
    from dsx_launch.options import parse
    from dsx_launch.plan import make_plan

    service, pod, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["dsx", "launch"]
    options = parse(command[2:])
    plan = make_plan(options, {})
    assert (plan.master_addr, plan.master_port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert options.elastic_training and options.max_elastic_nodes == job["spec"]["parallelism"]
    assert pod["spec"]["containers"][0]["command"] == ["dsx", "elastic", "--rendezvous", str(plan.master_port)]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]


def test_the_function_of_ray_train(tmp_path, monkeypatch):
    """Ray's classes as stand-ins that call the function in this process, which fails once and is called again."""
    calls = []

    class Trainer:
        def __init__(self, loop, train_loop_config, scaling_config, run_config):
            self.loop, self.config = loop, train_loop_config
            calls.append((scaling_config, run_config))

        def fit(self):
            for steps in (6, self.config["steps"]):  # the second attempt goes on where the first one ended
                self.loop({**self.config, "steps": steps})
            return "fitted"

    train = types.ModuleType("ray.train")
    train.ScalingConfig = lambda num_workers: ("workers", num_workers)
    train.FailureConfig = lambda max_failures: ("failures", max_failures)
    train.RunConfig = lambda failure_config: ("run", failure_config)
    train_torch = types.ModuleType("ray.train.torch")
    train_torch.TorchTrainer = Trainer
    ray = types.ModuleType("ray")
    ray.train = train
    for name, module in (("ray", ray), ("ray.train", train), ("ray.train.torch", train_torch)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ray_train

    assert ray_train.run(str(tmp_path / "out"), workers=1, steps=9) == "fitted"
    assert calls == [(("workers", 1), ("run", ("failures", -1)))]
    assert (tmp_path / "out" / "latest").read_text() == "global_step9"


def torchrun(tmp_path, **more):
    options = ["--nnodes", "1:1", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"]
    options += [
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-conf",
        "last_call_timeout=1",
        "--local-addr",
        "127.0.0.1",
    ]
    script = [str(EXAMPLES / "train.py"), "--out", str(tmp_path / "out"), "--steps", "8"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    return subprocess.run(
        command, env=environment(tmp_path, **more), capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_torchrun_with_a_store_for_each_round(tmp_path):
    done = torchrun(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0 and "began after update 0 (new), ended after 8" in done.stdout, done.stderr


@pytest.mark.slow
def test_torchrun_without_a_store_for_each_round_is_refused(tmp_path):
    done = torchrun(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert done.returncode != 0 and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stderr
