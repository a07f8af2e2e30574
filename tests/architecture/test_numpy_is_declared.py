"""A package that does not declare numpy does not need it: torch does not declare it either, and works without.

A call that turns tensors into arrays passes in every environment of ours, because numpy comes with transformers, and
fails at a user who installed one package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, closure, requirement_name  # noqa: E402

USES = re.compile(r"\.numpy\(\)|from_numpy\(|^\s*(?:import|from) numpy\b", re.M)
GIVEN_BY_USER = {  # what works on numpy's values, which only exist where it is
    "dsx-checkpoint/src/dsx_checkpoint/encode.py",
    "dsx/src/dsx/engine/randomness.py",
}
PACKAGES = all_packages()


@pytest.mark.parametrize("name", PACKAGES)
def test_what_uses_numpy_declares_it(name):
    needed = {requirement_name(r) for one in closure(name, PACKAGES) for r in PACKAGES[one].requires}
    if "numpy" in needed:
        pytest.skip("declares it")
    found = [
        str(path.relative_to(ROOT / "packages"))
        for path in sorted((PACKAGES[name].path / "src").rglob("*.py"))
        if USES.search(path.read_text())
    ]
    assert set(found) <= GIVEN_BY_USER, "use dsx_comm.object_tree.host_bytes, or declare numpy"
