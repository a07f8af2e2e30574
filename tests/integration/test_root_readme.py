"""The README's python runs as it stands, block by block; its install commands and verbs name what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, closure  # noqa: E402


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(number, tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def both_sides() -> tuple[str, str, int]:
    """The program before and after the README's diff, and how many lines the diff touches."""
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    lines = block.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] != "+")
    after = "\n".join(line[1:] for line in lines if line[:1] != "-")
    return before, after, sum(line[:1] in ("+", "-") for line in lines)


def test_the_diff_shards_a_plain_loop_and_keeps_its_loss(tmp_path):
    before, after, touched = both_sides()
    assert touched <= 10
    (tmp_path / "plain.py").write_text(before)
    (tmp_path / "train.py").write_text(after)
    launch = [sys.executable, "-m", "dsx", "launch", "--num_procs", "2", "train.py"]
    said = []
    for command in ([sys.executable, "plain.py"], [sys.executable, "train.py"], launch):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        said.append(set(re.findall(r"loss \d\.\d{4}", done.stdout)))
    assert all(len(losses) == 1 for losses in said), said


def test_the_first_screen_says_for_whom_and_shows_the_change():
    first = README.splitlines()[:40]
    assert any("choose dsx if" in line for line in first) and "```diff" in first
    assert any("no part of dsx has run on a GPU" in line for line in first)
    assert re.search(r"docs/assets/[\w-]+\.svg\)", README)


def test_install_commands_name_whole_closures():
    packages = all_packages()
    rows = re.findall(r"^\| (.*?) \| `pip install (.*?)` \|$", README, re.M)
    named = {what: [Path(part).name for part in paths.split()] for what, paths in rows}
    # dsx-compat brings a module called deepspeed, which only those get who ask for it
    assert set(named["everything"]) == set(closure("dsx", packages))
    for what, names in named.items():
        needed = {member for name in names for member in closure(name, packages)}
        assert set(names) == needed, f"{what}: pip would look for {sorted(needed - set(names))} in an index"


def test_commands_exist():
    sys.path.insert(0, str(ROOT / "tools"))
    from dev import VERBS

    for verb in re.findall(r"python3 tools/dev\.py (\w+)", README):
        assert verb in VERBS
