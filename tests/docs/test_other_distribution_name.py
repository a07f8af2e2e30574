"""dsx can be published under another distribution name: the wheel has it, and the package finds itself under it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from wheels import renamed  # noqa: E402
from workspace import all_packages  # noqa: E402

CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib import metadata
import dsx
from dsx.siblings import check_siblings, needed_siblings
assert dsx.__file__.startswith(sys.argv[1]), dsx.__file__
assert "dsx-zero" in needed_siblings()
check_siblings()
assert metadata.version("free-name") == dsx.__version__
"""


def test_a_build_under_another_name_installs_and_knows_itself(tmp_path):
    wheel_builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    package = renamed(all_packages()["dsx"], "free-name", tmp_path)
    assert package.name == "free-name" and "dsx-zero==" in " ".join(package.requires)
    (built,) = wheel_builder(str(package.path)).build(directory=str(tmp_path / "out"), versions=["standard"])
    assert Path(built).name.startswith("free_name-")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-c", CHECK, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_who_needs_dsx_asks_for_the_other_name(tmp_path):
    package = renamed(all_packages()["dsx-compat"], "free-name", tmp_path)
    assert package.name == "dsx-compat"
    assert [need for need in package.requires if need.startswith(("dsx==", "free-name=="))] == ["free-name==0.1.0"]
