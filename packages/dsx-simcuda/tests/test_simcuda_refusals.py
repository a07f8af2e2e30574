"""What the simulated device refuses, by name: it never lets a program run on the CPU instead."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import dsx_simcuda
import pytest
from dsx_simcuda import building


def test_torch_imported_first_is_refused(built):
    code = "import torch, dsx_simcuda; dsx_simcuda.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "[DSX901]" in done.stderr and "python -m dsx_simcuda train.py" in done.stderr


@pytest.mark.parametrize("version", ["2.10.1+cpu", "2.11.0+cpu", "2.12.1", "2.14.0.dev1+cpu"])
def test_another_version_of_torch_is_refused_and_can_be_tried(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    text = rf"torch {re.escape(version)} .*expected 2\.13 .* DSX_SIMCUDA_ANY_TORCH=1 to try"
    with pytest.raises(dsx_simcuda.RefusedHere, match=text) as caught:
        dsx_simcuda.build()
    assert "[DSX903]" in str(caught.value)
    monkeypatch.setenv("DSX_SIMCUDA_ANY_TORCH", "1")
    assert building.torch_folder().name == "torch"


def test_the_tests_run_with_a_version_that_is_called_tested():
    assert any(importlib.metadata.version("torch").startswith(version) for version in dsx_simcuda.TESTED)


def test_a_real_gpu_is_refused_unless_forced(monkeypatch):
    monkeypatch.setattr(building.os.path, "exists", lambda path: path == "/dev/nvidia0")
    with pytest.raises(dsx_simcuda.RefusedHere, match="a real GPU"):
        building.refuse_real_gpu()
    monkeypatch.setenv("DSX_SIMCUDA_FORCE", "1")
    building.refuse_real_gpu()


def test_no_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("DSX_SIMCUDA_CACHE", str(tmp_path))
    with pytest.raises(dsx_simcuda.BuildFailed, match="no C\\+\\+ compiler found"):
        dsx_simcuda.build()


def test_a_compiler_that_fails_shows_its_message(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("DSX_SIMCUDA_CACHE", str(tmp_path))
    with pytest.raises(dsx_simcuda.BuildFailed, match="exit status 1"):
        dsx_simcuda.build()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "half a build was left behind"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "mode: got 'fast'"),
        ({"devices": 9}, "devices: got 9"),
        ({"delay_us": -1}, "delay_us"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        dsx_simcuda.Options.from_environment(**options)


def test_a_program_that_cannot_have_the_device_ends(run_program):
    done = run_program("-c", "import torch; print('ran')", env={"DSX_SIMCUDA_DEVICES": "9"})
    assert done.returncode == 2 and "ran" not in done.stdout
    assert "devices: got 9, expected 1 to 8" in done.stderr
