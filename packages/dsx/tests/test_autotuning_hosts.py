"""A search over the hosts of a hostfile: every experiment runs on all of them, a host that fails is named.

A stand-in for ssh runs each host's part on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

MICRO = "train_micro_batch_size_per_gpu"

SCRIPT = """
import os, sys
import torch
import dsx

torch.manual_seed(0)
engine, *_ = dsx.initialize(model=torch.nn.Linear(8, 1), config=sys.argv[sys.argv.index("--deepspeed_config") + 1])
open(f"rank.{engine.global_rank}.of.{engine.world_size}.at.{os.environ['LOCAL_RANK']}", "w").close()
if engine.zero_optimization_stage() == 0 and engine.global_rank == 1:
    raise ValueError("the second host has no stage 0")
while True:
    engine.backward(engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 8)).square().mean())
    engine.step()
"""

SSH = f"""#!{sys.executable}
import os, sys
with open({{log!r}}, "a") as log:
    log.write(" ".join(word for word in sys.argv[1:-1] if word.startswith("node-")) + "\\n")
os.execvp("sh", ["sh", "-c", sys.argv[-1]])  # the host's login shell, on this machine
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_every_experiment_runs_on_all_hosts(tmp_path):
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(log=str(tmp_path / "calls")))
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        MICRO: [2],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": [0, 1]},
        "autotuning": {"enabled": True, "start_profile_step": 2, "end_profile_step": 3, "tuner_type": "gridsearch"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    environ = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    words = ["-m", "dsx.launcher", "-H", "hosts", "--num_procs", "1", "--master_addr", "127.0.0.1", "--master_port",
             str(free_port()), "--launcher", "ssh", "--no_ssh_check", "--no_local_rank", "--autotuning", "tune",
             "train.py", "--deepspeed_config", "ds.json"]  # fmt: skip
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True,
                          timeout=280, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "autotuning_results" / "results.json").read_text())
    first, second = results["experiments"]
    assert results["best"] == first["name"] == "first_z1_mbs2_gas1" and first["value"] > 0
    assert second["name"] == "z0_mbs2_gas1" and "the second host has no stage 0" in second["reason"]
    assert sorted((tmp_path / "calls").read_text().split()) == ["node-a"] * 2 + ["node-b"] * 2
    assert {path.name for path in tmp_path.glob("rank.*")} == {"rank.0.of.2.at.0", "rank.1.of.2.at.0"}
    facts = json.loads((tmp_path / "autotuning_exps" / first["name"] / "model_info.json").read_text())
    assert facts["world_size"] == facts["data_parallel"] == 2 and facts["ranks_per_host"] == 1
