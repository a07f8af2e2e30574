"""The example of long sequences: its losses do not depend on the number of processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "long_text.py"


def test_losses_do_not_depend_on_the_number_of_processes(tmp_path):
    if not EXAMPLE.exists():
        pytest.skip("the examples are in the repository, not in the package")
    out = tmp_path / "rows.json"
    command = [sys.executable, str(EXAMPLE), "--ranks", "1", "2", "--lengths", "96", "--steps", "3", "--width", "16"]
    done = subprocess.run([*command, "--layers", "1", "--json", str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = json.loads(out.read_text())
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    assert done.stdout.count("MiB in each, losses") == 2
