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
