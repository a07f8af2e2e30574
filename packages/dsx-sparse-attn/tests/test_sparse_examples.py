"""The example on long texts runs at a small size, and writes its table and its plot."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "long_context.py"
# The examples are not part of the distribution: away from the repository there is nothing to test.
pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are in the repository only")


def test_dense_and_sparse_train_on_the_same_texts(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--length", "512", "--steps", "25", "--tests", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table.strip() in done.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [row[0].split()[0] for row in rows[2:]] == ["dense", "sparse"]
    for row in rows[2:]:
        assert 0 < float(row[1]) < 10 and re.fullmatch(r"[\d.]+ \+- [\d.]+ %", row[2]) and int(row[4]) > 0
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 2
