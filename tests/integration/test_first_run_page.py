"""The page "First run in five minutes", followed by copy and paste: its files are saved, its commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "start" / "first-run.md").read_text()
INSTALL = (ROOT / "docs" / "start" / "install.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.S | re.M)


def follow(folder: Path, python: Path) -> list[str]:
    """Save every file and run every command of the page, in order; what the commands printed."""
    printed = []
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for tag, title, body in BLOCK.findall(PAGE):
        if title:
            (folder / title).write_text(body)
        elif tag == "sh":
            for line in body.strip().splitlines():
                done = subprocess.run(
                    shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True, timeout=200
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                printed.append(done.stdout)
    return printed


def check(folder: Path, printed: list[str]) -> None:
    assert "trained on 1 processes" in printed[0] and "trained on 2 processes" in printed[1]
    assert (folder / "runs" / "first" / "report.html").stat().st_size > 10_000
    assert "continue from" in printed[2] and "at step 128" in printed[2]
    losses = [float(re.findall(r"loss ([0-9.]+)", text)[-1]) for text in printed]
    assert losses[1] < 2.0 and losses[2] < 2.0  # an untrained model has about 16


def test_the_page_can_be_followed(tmp_path):
    check(tmp_path, follow(tmp_path, Path(sys.executable)))


@pytest.mark.slow
def test_the_page_can_be_followed_in_an_empty_environment(tmp_path):
    """As a person would: a new virtual environment, the commands of the installation page, then the page."""
    venv.EnvBuilder(with_pip=True).create(tmp_path / ".venv")
    python = tmp_path / ".venv" / "bin" / "python"
    commands = next(body for tag, _, body in BLOCK.findall(INSTALL) if tag == "sh" and "torch==" in body)
    for line in [line for line in commands.splitlines() if line.startswith("pip install")]:
        line = line.replace(
            "./packages/*", " ".join(str(p.parent) for p in sorted(ROOT.glob("packages/*/pyproject.toml")))
        )
        done = subprocess.run([str(python), "-m", *shlex.split(line)], capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "empty"
    folder.mkdir()
    check(folder, follow(folder, python))
