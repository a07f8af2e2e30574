"""The examples run, and their tables have a row for each recipe and the means over the seeds."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--threads", "1", "--steps", "2", "--width", "16", "--layers", "2", "--heads", "4", "--seeds", "1"]
NAMES = {"xtc": 4, "zeroquant": 6, "pruning": 3}


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="outside of the repository there are no examples")
@pytest.mark.parametrize("name, more", [
    ("xtc", ["--student-steps", "2"]), ("zeroquant", ["--block-steps", "1", "--batches", "1"]),
    ("pruning", ["--recovery", "22"]),
])  # fmt: skip
def test_each_prints_its_table(name, more, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *SMALL, *more, "--report", str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    each, means = [row for row in rows if len(row) == 9], [row for row in rows if len(row) == 6]
    recipes = [row[0] for row in each[3:]]
    assert len(recipes) == NAMES[name] and [row[0] for row in means[2:]] == recipes
    assert each[2][0] == "full" and all(float(row[2]) > 0 for row in each[2:])
    if name == "pruning":
        smaller = {row[0]: float(row[5].rstrip("x")) for row in each[3:]}
        assert smaller["half of rows and heads, removed"] >= 1.2, "rows and heads are gone"
        assert smaller["half of the weights (l1)"] == 1.0, "zeros are stored"
    assert len(list(tmp_path.glob("*.svg"))) == len(list(tmp_path.glob("*.txt"))) == NAMES[name]
