"""A search over a pipeline that the configuration cuts: the planner is asked about the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("dsx_pipe")

MICRO = "train_micro_batch_size_per_gpu"

SCRIPT = """
import sys
import torch
from torch import nn
import dsx

class Loss(nn.Module):
    def forward(self, x):
        return x.float().square().mean()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), Loss())
engine, *_ = dsx.initialize(model=model, config=sys.argv[sys.argv.index("--deepspeed_config") + 1])

def batches():
    while True:
        yield torch.randn(engine.train_micro_batch_size_per_gpu(), 64), None

data = batches()
while True:
    engine.train_batch(data)
"""

MADE = """
layers = [nn.Linear(64, 64), nn.Linear(64, 64), Loss()]
model = dsx.pipe.PipelineModule(layers, num_stages=2)
"""


def tune(folder, script):
    config = {
        MICRO: [2, 4],
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 2},
        "autotuning": {"enabled": True, "mp_size": 2, "start_profile_step": 2, "end_profile_step": 3,
                       "tuner_type": "gridsearch"},
    }  # fmt: skip
    (folder / "train.py").write_text(script)
    (folder / "ds.json").write_text(json.dumps(config))
    words = ["-m", "dsx.launcher", "--num_procs", "2", "--no_local_rank", "--autotuning", "tune", "train.py",
             "--deepspeed_config", "ds.json"]  # fmt: skip
    done = subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=240, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "autotuning_results" / "results.json").read_text())
    return results["experiments"], done.stderr


def test_a_pipeline_that_the_configuration_cuts_is_planned(tmp_path):
    experiments, said = tune(tmp_path, SCRIPT)
    assert [one["name"] for one in experiments] == ["first_z1_mbs2_gas4", "z1_mbs4_gas4"]
    assert all(one["value"] > 0 for one in experiments)
    assert experiments[1]["predicted_by"] == "planner", said
    plans = json.loads((tmp_path / "autotuning_exps" / "first_z1_mbs2_gas4" / "plans.json").read_text())
    assert plans["reason"] == "" and len(plans["plans"]) == 2


@pytest.mark.slow
def test_a_pipeline_that_the_script_makes_is_judged_by_the_formula(tmp_path):
    experiments, said = tune(tmp_path, SCRIPT.replace("engine, *_ =", f"{MADE}\nengine, *_ ="))
    assert experiments[1]["predicted_by"] == "formula"
    assert "holds the layers of this rank alone" in said
