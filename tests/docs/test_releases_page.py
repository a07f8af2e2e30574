"""The page of releases names the packages with their versions and the siblings they ask for, as the packages do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

PAGE = (ROOT / "docs" / "reference" / "releases.md").read_text()
ROW = re.compile(r"^\| `(dsx[\w-]*)` \| (\S+) \| (.*) \|$", re.M)
ROWS = {name: (version, needs) for name, version, needs in ROW.findall(PAGE)}


def asked_for(package) -> set[str]:
    """Names that a package's metadata asks for, without PyTorch."""
    (line,) = re.findall(r"^dependencies = \[(.*?)\]$", (package.path / "pyproject.toml").read_text(), re.M | re.S)
    return {re.split(r"[^\w-]", item)[0] for item in re.findall(r'"([^"]+)"', line)} - {"torch"}


def test_versions_are_those_of_the_packages():
    assert {name: version for name, (version, _) in ROWS.items()} == {
        name: package.version for name, package in all_packages().items()
    }


def test_needs_are_those_of_the_metadata():
    for name, package in all_packages().items():
        wanted = asked_for(package)
        if name == "dsx":  # the page says "all packages below but dsx-compat and dsx-simcuda"
            assert wanted >= set(all_packages()) - {"dsx", "dsx-compat", "dsx-simcuda"}
            wanted = {item for item in wanted if not item.startswith("dsx")}
        missing = [item for item in wanted if not re.search(rf"\b{re.escape(item)}\b", ROWS[name][1])]
        assert not missing, name
        assert wanted or ROWS[name][1].startswith("nothing"), name
