"""However a program starts torch, an engine takes its device, trains, saves and loads, without a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from device_runs import need_compiler

PROGRAM = Path(__file__).with_name("device_starts.py")
SAMPLE = ("nothing given", "bound device", "default device")
OTHERS = ("nccl", "no current device", "default dtype", "deterministic")
WAYS = [*SAMPLE, *(pytest.param(way, marks=pytest.mark.simcuda) for way in OTHERS)]


def found(way: str, folder: Path) -> dict:
    need_compiler()
    file = folder / "found.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    program = [sys.executable, "-m", "dsx_simcuda", "--devices", "2", str(PROGRAM), way, str(file)]
    done = subprocess.run([sys.executable, *launch, *program], capture_output=True, text=True, timeout=800)
    assert file.exists(), done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return found("dsx", tmp_path_factory.mktemp("usual"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_may_start_torch_as_it_likes(way, usual, tmp_path):
    now = found(way, tmp_path)
    assert now.pop("reports") == []
    assert now.keys() == usual.keys() - {"reports"}
    for stage, result in now.items():
        assert result["device"] == "cuda:0"
        assert result["losses"] == pytest.approx(usual[stage]["losses"], rel=1e-5), stage
