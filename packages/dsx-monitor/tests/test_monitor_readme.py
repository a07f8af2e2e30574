"""The README's example runs as it stands, and its table of keys is the truth."""

import re
import subprocess
import sys
from pathlib import Path

from dsx_monitor import MonitorConfig

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs_and_leaves_the_run_directory_it_describes(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "first"
    assert done.stdout.strip() == str(Path("runs/first/report.html"))
    assert {"meta.json", "events.jsonl", "memory", "csv", "report.html"} == {p.name for p in run.iterdir()}
    losses = (run / "csv" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert losses[0] == "step,train_loss" and losses[1] == "8,9.0" and len(losses) == 51
    assert float(losses[-1].split(",")[1]) < 1e-6


def test_the_table_names_every_key():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    for section, field in MonitorConfig.model_fields.items():
        (row,) = [line for line in rows if f"`{section}`" in line.split("|")[1]]
        missing = [key for key in type(field.default).model_fields if f"`{key}`" not in row]
        assert not missing, (section, missing)
