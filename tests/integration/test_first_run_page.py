"""The page "First run in five minutes", followed by copy and paste: its files are saved, its commands are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from dsx_testkit.pages import follow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "start" / "first-run.md"
INSTALL = (ROOT / "docs" / "start" / "install.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.S | re.M)


def check(folder: Path, printed: list[str]) -> None:
    assert "processes: 1, " in printed[0] and "processes: 2, " in printed[1]
    page = (folder / "runs" / "first" / "report.html").read_text()
    assert "on 1 process, then 2 processes<" in page and "zero_<wbr>optimization.<wbr>stage" in page
    content = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (loss,) = (panel for panel in content["panels"] if panel["title"] == "Loss")
    assert [series["name"] for series in loss["series"]] == ["training, start 1", "training, start 2"]
    assert all(series["x"] == [64 * step for step in range(1, 129)] for series in loss["series"])
    meta = json.loads((folder / "runs" / "first" / "meta.json").read_text())
    assert [start["world_size"] for start in meta["starts"]] == [1, 2]
    assert "continue from" in printed[2] and "at step 128" in printed[2]
    losses = [float(re.findall(r"loss ([0-9.]+)", text)[-1]) for text in printed]
    assert losses[1] < 2.0 and losses[2] < 2.0  # an untrained model has about 16


def test_the_page_can_be_followed(tmp_path):
    check(tmp_path, follow(PAGE, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(2400)  # the native code of four packages is compiled
def test_the_page_can_be_followed_in_an_empty_environment(tmp_path):
    """As a person would: a fresh checkout, the blocks of the installation page in a shell, then this page in an empty
    folder, with nothing of the environment that the tests run in.
    """
    checkout, folder = tmp_path / "checkout", tmp_path / "empty"
    made = (".git", ".venv*", ".whl", "dist", "build", "__pycache__", "*.so", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(*made))
    folder.mkdir()
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}}
    blocks = [body for tag, _, body in BLOCK.findall(INSTALL) if tag == "sh"]
    everything, doctor = blocks[0], next(body for body in blocks if body == "dsx doctor\n")
    assert "python3 -m venv .venv" in everything and " ./packages/dsx " in everything
    said = subprocess.run(
        ["bash", "-e", "-c", everything + doctor], cwd=checkout, env=inherited, capture_output=True, text=True,
        timeout=1800,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    python = checkout / ".venv" / "bin" / "python"
    where = [str(python), "-c", "import dsx, torch; print(dsx.__file__, torch.__file__)"]
    found = subprocess.run(where, cwd=folder, env=inherited, capture_output=True, text=True, check=True).stdout.split()
    assert all(Path(path).is_relative_to(checkout / ".venv") for path in found), found
    check(folder, follow(PAGE, folder, python=python, inherited=inherited))
