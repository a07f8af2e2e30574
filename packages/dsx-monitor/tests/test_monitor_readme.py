"""The README's examples run as they stand, and its table of keys is the truth."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_monitor import MonitorConfig

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.S | re.M)
EXAMPLES = [code for language, code in BLOCKS if language == "python"]


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_says_its_language():
    assert {language for language, _ in BLOCKS} <= {"python", "sh"} and len(EXAMPLES) == 3


def test_the_example_runs_and_leaves_the_run_directory_it_describes(tmp_path):
    said = run(EXAMPLES[0], tmp_path)
    folder = tmp_path / "runs" / "first"
    assert said.strip() == str(Path("runs/first/report.html"))
    assert {"meta.json", "events.jsonl", "memory", "csv", "report.html"} == {p.name for p in folder.iterdir()}
    losses = (folder / "csv" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert losses[0] == "step,train_loss" and losses[1] == "8,9.0" and len(losses) == 51
    assert float(losses[-1].split(",")[1]) < 1e-6


def test_the_timeline_example_runs(tmp_path):
    assert run(EXAMPLES[1], tmp_path).strip() == str(Path("runs/first/trace.json"))
    assert (tmp_path / "runs" / "first" / "trace" / "rank00000.json").exists()


def test_the_profiler_example_runs_and_prints_what_it_says(tmp_path):
    pytest.importorskip("torch")
    said = run(EXAMPLES[2], tmp_path)
    figures = re.search(r"print\(flops, macs, params\)  # (.*?) \(", EXAMPLES[2])[1]
    assert figures in said
    assert (tmp_path / "profile.html").exists()


def test_the_table_names_every_key():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    for section, field in MonitorConfig.model_fields.items():
        (row,) = [line for line in rows if f"`{section}`" in line.split("|")[1]]
        missing = [key for key in type(field.default).model_fields if f"`{key}`" not in row]
        assert not missing, (section, missing)
