"""The page of environment variables has those that the sources read, and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "environment.md").read_text()
NAME = r"(?:DSX|DS|DEEPSPEED)_[A-Z][A-Z_]*[A-Z]"
# Tables of names of DeepSpeed: constants of that program, which nobody reads from the environment.
TABLES = {"name_groups.py", "names.py", "values.py", "_version.py", "__init__.py"}


def read_by_sources() -> set[str]:
    """Names that stand as a whole text in Python, are asked for in C++, or switch a package's native code off."""
    python = [f for f in ROOT.glob("packages/*/src/**/*.py") if not (f.name in TABLES and "dsx_compat" in f.parts)]
    found = set()
    for file in [*python, ROOT / "tools" / "dsx_build.py", ROOT / "tools" / "devenv.py"]:
        found |= set(re.findall(rf"[\"']({NAME})[\"']", file.read_text()))
        if "NativeLoader(" in file.read_text():
            found |= {f"{name}_NATIVE".upper() for name in re.findall(r"NativeLoader\(\s*\"(\w+)\.", file.read_text())}
    for file in [*ROOT.glob("packages/*/native/**/*"), *ROOT.glob("tools/native/**/*")]:
        if file.suffix in {".cpp", ".h", ".cu", ".cuh"}:
            found |= set(re.findall(rf"getenv\(\"({NAME})\"\)", file.read_text()))
    return found


def test_page_and_sources_name_the_same_variables():
    found = read_by_sources()
    assert len(found) > 15
    on_page = set(re.findall(rf"\b{NAME}\b", PAGE))
    assert found - on_page == set(), "read by a source, not on the page"
    assert on_page - found == set(), "on the page, read by no source"
