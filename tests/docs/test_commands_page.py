"""The page of commands has every command that a package adds to `dsx`, and no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, read_toml  # noqa: E402

GROUP = "dsx.commands"


def test_the_page_and_the_packages_agree():
    added = set()
    for package in all_packages().values():
        added |= set(read_toml(package.path / "pyproject.toml")["project"].get("entry-points", {}).get(GROUP, {}))
    assert len(added) > 15
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    shown = set(re.findall(r"^\| `dsx (\w+)", page, re.M)) | set(re.findall(r"dsx (completion) bash", page))
    assert shown == added
