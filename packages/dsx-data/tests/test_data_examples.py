"""The example of the README and the one on real text run, and count what they save."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
SMALL = [
    "--steps",
    "4",
    "--every",
    "2",
    "--layers",
    "4",
    "--width",
    "16",
    "--length",
    "32",
    "--batch",
    "2",
    "--files",
    "3",
    "--seeds",
    "2",
    "--threads",
    "1",
]


@pytest.mark.skipif(not (PACKAGE / "README.md").is_file(), reason="outside of the repository there is no README")
def test_the_readme_runs():
    code = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL).group(1)
    found = {}
    exec(code, found)
    assert found["steps"] == 16 and found["state"]["position"] == 64 and found["drop"].step == 16


@pytest.mark.skipif(not (PACKAGE / "README.md").is_file(), reason="outside of the repository there is no README")
def test_the_readme_s_schedules_grow_without_an_engine():
    code = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)[1]
    found = {}
    exec(code, found)
    assert found["seen"][0] == (8, 8) and found["seen"][-1] == (32, 32)
    for before, after in zip(found["seen"], found["seen"][1:]):
        assert before[0] <= after[0] and before[1] <= after[1]


@pytest.mark.skipif(not (PACKAGE / "examples").is_dir(), reason="outside of the repository there are no examples")
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_the_example_trains_with_every_technique(model):
    script = PACKAGE / "examples" / "train_text.py"
    done = subprocess.run(
        [sys.executable, str(script), "--model", model, *SMALL], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines()[1:] if line]
    rows = {line.split()[0]: line.split() for line in lines if not line.startswith("|")}
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    expected = ["none", "ltd", "control", "layer-drop", "curriculum", *(["budget"] if model == "gpt" else [])]
    assert list(rows) == expected == [row[0] for row in table[2:]]
    assert all(row[1] == "2" and len(row) == 9 for row in table[2:]) and table[2][5] == "2 of 2"
    tokens = {name: int(row[3].replace(",", "")) for name, row in rows.items()}
    assert tokens["none"] == 4 * 4 * 2 * 32
    # Two of four layers keep 8 tokens, then 8 + 24 t/3 down to a multiple of 8.
    assert tokens["ltd"] == tokens["control"] == sum(2 * (2 * kept + 2 * 32) for kept in (8, 16, 24, 32))
    assert tokens["curriculum"] == sum(4 * 2 * length for length in (16, 32, 32, 32))
