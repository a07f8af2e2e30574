"""Programs that are not ours give no report: torch's own ways to train on one and on two ranks, and Hugging Face's."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("foreign_programs.py")
CLIENTS = ("transformers_trainer", "transformers_generate", "accelerate_loop")


def names(marker: str) -> list[str]:
    lines = PROGRAMS.read_text().splitlines()
    pairs = itertools.pairwise(lines)
    return [after[4:].split("(")[0] for line, after in pairs if line == marker and after[:4] == "def "]


def check(done, files):
    assert all(file.exists() for file in files), done.stderr[-3000:]
    for file in files:
        for name, found in json.loads(file.read_text()).items():
            assert found["failed"] == "", name
            assert found["reports"] == [], name


def test_there_are_enough_of_them():
    assert len(names("@one")) + len(names("@two")) >= 25


@pytest.mark.parametrize("mode", ["slow-side", pytest.param("slow-default", marks=pytest.mark.slow)])
def test_programs_of_one_rank(run_program, tmp_path, mode):
    chosen = [name for name in names("@one") if name not in CLIENTS]
    done = run_program(str(PROGRAMS), str(tmp_path / "out"), *chosen, options=("--mode", mode, "--devices", "2"))
    check(done, [tmp_path / "out"])


@pytest.mark.parametrize("mode", ["slow-side", pytest.param("slow-default", marks=pytest.mark.slow)])
def test_programs_of_two_ranks(run_program, torchrun, tmp_path, mode):
    options = ("--mode", mode, "--one-collective")
    done = run_program(*torchrun(PROGRAMS, tmp_path / "out"), options=options, timeout=240)
    check(done, [tmp_path / "out0", tmp_path / "out1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_training_loops_of_hugging_face(run_program, tmp_path, name):
    needed = ["accelerate"] if name == "accelerate_loop" else ["transformers"]
    needed += ["accelerate"] if name == "transformers_trainer" else []
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = run_program(str(PROGRAMS), str(tmp_path / "out"), name, options=("--mode", "slow-side"))
    check(done, [tmp_path / "out"])
