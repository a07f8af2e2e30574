"""Searches as users start them: `dsx launch --autotuning`, real processes, real engines; a script that reads options as
the Hugging Face Trainer does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from dsx_launch.options import parse, to_argv
from dsx_launch.processes import lives

LAUNCH = [sys.executable, "-m", "dsx.launcher"]
MICRO = "train_micro_batch_size_per_gpu"

# Fills "auto" from its options, and refuses a configuration that differs from them, as HfTrainerDeepSpeedConfig of
# transformers does.
TRAINER = """
import argparse, json
import torch
import dsx

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--deepspeed")
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--learning_rate", type=float, default=5e-5)
parser.add_argument("--max_steps", type=int, default=8)
parser.add_argument("--hub_token", default="")
parser.add_argument("--api-key", default="")
args = parser.parse_args()
assert (args.hub_token, args.api_key) == ("hf_private", "private2"), "only what is shown is masked"
config = json.loads(open(args.deepspeed).read())
fill = {
    "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
    "gradient_accumulation_steps": args.gradient_accumulation_steps,
}
for key, value in fill.items():
    if config.get(key, "auto") == "auto":
        config[key] = value
    elif config[key] != value:
        told = f"{key}={config[key]} vs {value}"
        raise ValueError(f"Please correct the following config values that mismatch TrainingArguments: {told}")
config["optimizer"]["params"]["lr"] = args.learning_rate
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
data = [(torch.randn(8), torch.randn(1)) for _ in range(64)]
engine, _, loader, _ = dsx.initialize(model=model, config=config, training_data=data)
batches = iter(dsx.RepeatingLoader(loader))
while engine.global_steps < args.max_steps:
    x, y = next(batches)
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
if engine.global_rank == 0:
    trained = [engine.global_steps, engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage()]
    json.dump(trained, open("trained.json", "w"))
"""


def environment():
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RANK")}
    return {**env, "OMP_NUM_THREADS": "1"}


def launch(folder, *argv):
    return subprocess.run([*LAUNCH, *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip


def write(folder, text, config):
    (folder / "train.py").write_text(text)
    (folder / "ds.json").write_text(json.dumps(config))


def test_a_trainer_script_is_tuned_and_then_run(tmp_path):
    config = {
        MICRO: "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 1},
        "autotuning": {
            "enabled": True, "max_train_micro_batch_size_per_gpu": 4, "min_train_micro_batch_size_per_gpu": 2,
            "start_profile_step": 2, "end_profile_step": 3, "tuner_type": "gridsearch",
            "arg_mappings": {MICRO: "--per_device_train_batch_size",
                             "gradient_accumulation_steps": "--gradient_accumulation_steps"},
        },
    }  # fmt: skip
    write(tmp_path, TRAINER, config)
    done = launch(tmp_path, "--num_procs", "2", "--autotuning", "run", "train.py", "--deepspeed", "ds.json",
                  "--per_device_train_batch_size", "2", "--learning_rate", "0.01", "--hub_token", "hf_private",
                  "--api-key=private2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "autotuning_results" / "results.json").read_text())
    assert [one["name"] for one in results["experiments"]] == ["first_z1_mbs2_gas1", "z1_mbs4_gas1"]
    assert all(one["value"] > 0 and one["metrics"]["updates"] == 2 for one in results["experiments"])
    assert results["experiments"][1]["predicted_by"] == "planner", "the model and a batch were at hand"
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["optimizer"]["params"]["lr"] == "auto" and "autotuning" not in best
    steps, micro, stage = json.loads((tmp_path / "trained.json").read_text())
    assert (steps, micro, stage) == (8, best[MICRO], 1), "the program has trained to its end with what was found"
    assert "running the best configuration: dsx launch --num_procs=2 -- train.py --deepspeed" in done.stderr
    command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert f"--per_device_train_batch_size {micro}" in command and "ds_config_optimal.json" in command
    assert "--hub_token '***' '--api-key=***'" in command and "private" not in done.stderr
    commands = [path.read_text() for path in (tmp_path / "autotuning_exps").glob("*/command.txt")]
    assert commands and not any("private" in text for text in commands)
    facts = json.loads((tmp_path / "autotuning_exps" / "first_z1_mbs2_gas1" / "model_info.json").read_text())
    assert facts["world_size"] == 2 and facts["num_params"] == 8 * 16 + 16 + 16 + 1


HANGS = """
import os, time
open(f"pid.{os.getpid()}", "w").close()
time.sleep(600)
"""


def test_a_search_that_is_stopped_leaves_no_process_and_can_go_on(tmp_path):
    write(tmp_path, HANGS, {MICRO: 1, "autotuning": {"enabled": True}})
    tuner = subprocess.Popen([*LAUNCH, "--num_procs", "1", "--autotuning", "tune", "train.py", "--deepspeed_config",
                              "ds.json"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (found := list(tmp_path.glob("pid.*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (pid,) = (int(path.name.split(".")[1]) for path in found)
    tuner.send_signal(signal.SIGTERM)
    tuner.communicate(timeout=60)
    assert tuner.returncode == 128 + signal.SIGTERM
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(pid)
    events = [
        json.loads(line)["event"]
        for line in (tmp_path / "autotuning_results" / "journal.jsonl").read_text().splitlines()
    ]
    assert events == ["search", "begun", "stopped"]


@pytest.mark.parametrize(
    ("argv", "config", "code", "text"),
    [
        (["train.py"], {}, 1, "name no configuration file"),
        (["gone.py", "--deepspeed_config", "ds.json"], {}, 1, "no such script"),
        (
            ["--no_ssh", "--master_addr", "localhost", "train.py", "--deepspeed_config", "ds.json"],
            {}, 2, "got --no_ssh",
        ),
        (["train.py", "--deepspeed_config", "ds.json"], {"autotuning": {"metric": "speed"}}, 2, "autotuning.metric"),
        (["train.py", "--deepspeed_config", "ds.json"], {"autotuning": {"enabled": False}}, 1, "enabled: got false"),
        (
            ["train.py", "--deepspeed_config", "ds.json"],
            {"zero_optimization": {"stag": 1}}, 2, "zero_optimization.stage",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told_without_a_traceback(tmp_path, monkeypatch, capsys, argv, config, code, text):
    from dsx_launch.main import main

    write(tmp_path, "raise SystemExit('started')", config)
    monkeypatch.chdir(tmp_path)
    assert main(["--num_procs", "2", "--autotuning", "tune", *argv]) == code
    said = capsys.readouterr().err
    assert said.startswith("dsx launch: ") and text in said
    assert not (tmp_path / "autotuning_results").exists()


def test_a_dry_run_lists_what_would_be_tried(tmp_path, monkeypatch, capsys):
    from dsx_plan.autotuning.command import main

    write(tmp_path, "raise SystemExit('started')", {MICRO: [1, 2], "zero_optimization": {"stage": [2]}})
    monkeypatch.chdir(tmp_path)
    assert main(["--num_procs", "2", "--dry_run", "train.py", "--deepspeed_config", "ds.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 configurations on 2 ranks, before those that do not fit", "first experiment: z2_mbs1_gas1",
        "z2_mbs1_gas1", "z2_mbs2_gas1",
    ]  # fmt: skip


def test_hosts_and_devices_of_a_search(tmp_path, monkeypatch, capsys):
    from dsx_launch.main import main

    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    command = [
        "-H",
        "hosts",
        "--launcher",
        "ssh",
        "--dry_run",
        "--autotuning",
        "tune",
        "train.py",
        "--deepspeed_config",
        "ds.json",
    ]
    for section, ranks in (({}, 8), ({"num_nodes": 1}, 4), ({"num_gpus": 2}, 4), ({"num_nodes": 1, "num_gpus": 3}, 3)):
        write(tmp_path, "", {MICRO: [1], "autotuning": section})
        assert main(command) == 0
        assert f" configurations on {ranks} ranks" in capsys.readouterr().out
    write(tmp_path, "", {MICRO: [1], "autotuning": {"num_gpus": 5}})
    assert main(command) == 2
    assert "between 1 and 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["x.py"],
        ["--num_procs", "2", "--module", "--no_local_rank", "-q", "pkg.train", "--a", "--", "-b"],
        [
            "-H",
            "hosts",
            "--include",
            "a@b:0,1",
            "--launcher",
            "pdsh",
            "--launcher_args",
            "-x y",
            "--master_port",
            "5",
            "x",
            "y z",
        ],
    ],
)
def test_options_survive_being_written_as_a_command_line(argv):
    options = parse(argv)
    assert parse(to_argv(options, options.script_args)) == options
