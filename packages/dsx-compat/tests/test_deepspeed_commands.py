"""DeepSpeed's programs (`deepspeed`, `ds_report`, ...) accept the command lines that job scripts use."""

from __future__ import annotations

import json
import subprocess
import sys

import dsx_compat
import pytest
from dsx_compat import commands

dsx_compat.activate()


def run_command(name, *words, **options):
    code = f"import sys; from dsx_compat.commands import {name}; sys.exit({name}())"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240, **options)


def test_deepspeed_starts_a_script_on_two_ranks(tmp_path):
    (tmp_path / "train.py").write_text(
        "import argparse, os\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
        "parser.add_argument('--lr')\nargs = parser.parse_args()\n"
        "open(f'rank{args.local_rank}', 'w').write(args.lr + os.environ['WORLD_SIZE'])\n"
    )
    done = run_command("deepspeed", "--num_gpus", "2", "train.py", "--lr", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["72", "72"]


def test_deepspeed_names_itself_in_its_help():
    assert "usage: deepspeed" in run_command("deepspeed", "--help").stdout


def test_deepspeed_searches_for_a_configuration(tmp_path, monkeypatch, capsys):
    from deepspeed.autotuning import Autotuner

    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": [1, 2], "autotuning": {"enabled": true}}')
    monkeypatch.chdir(tmp_path)
    words = ["--num_gpus", "2", "--autotuning", "tune", "--dry_run", "train.py", "--deepspeed_config", "ds.json"]
    assert commands.deepspeed(words) == 0
    assert "8 configurations on 2 ranks" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="dsx launch --autotuning"):
        Autotuner(object(), {})  # DeepSpeed's launcher makes its own Autotuner like this


def test_ds_report_runs_the_doctor(capsys):
    commands.ds_report(["--hide_operator_status"])
    out = capsys.readouterr().out
    assert "torch" in out and "packages" in out


def test_ds_elastic_prints_the_batch_and_the_devices(tmp_path, capsys):
    section = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"elasticity": section}))
    assert commands.ds_elastic(["-c", str(tmp_path / "config.json")]) == 0
    assert "final_batch_size .... 1680" in capsys.readouterr().out


def test_ds_ssh_shows_its_commands(tmp_path, capsys):
    (tmp_path / "hostfile").write_text("worker-1 slots=2\nworker-2 slots=2\n")
    assert commands.ds_ssh(["-f", str(tmp_path / "hostfile"), "--dry_run", "nvidia-smi", "-L"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("nvidia-smi -L" in line for line in lines)


def test_ds_bench_runs_the_bench_of_collectives():
    assert "usage" in run_command("ds_bench", "--help").stdout


@pytest.mark.parametrize("name", ["ds_io", "ds_nvme_tune"])
def test_programs_of_disk_input_and_output_come_with_dsx_nvme(name):
    import dsx_nvme.cli

    assert callable(getattr(dsx_nvme.cli, name))
