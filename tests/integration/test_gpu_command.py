"""The command for a GPU: an environment over a parent that is a virtual environment, and stages of which one fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def site_packages(folder):
    return next(folder.glob("lib/python3*/site-packages"))


def test_the_environment_sees_the_packages_of_a_parent_that_is_a_virtual_environment(tmp_path):
    parent, child = tmp_path / "parent", tmp_path / "child"
    venv.EnvBuilder(with_pip=False).create(parent)
    (site_packages(parent) / "only_in_parent.py").write_text("VALUE = 7\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "editable_in_parent.py").write_text("VALUE = 8\n")
    (site_packages(parent) / "editable.pth").write_text(f"{elsewhere}\n")
    program = (
        "import sys; sys.path.insert(0, 'tools')\n"
        "from pathlib import Path\n"
        "from gpu.environment import make_over_parent\n"
        "print(make_over_parent(Path(sys.argv[1])).python)"
    )
    made = subprocess.check_output([str(parent / "bin/python"), "-c", program, str(child)], text=True, cwd=ROOT)
    query = "import only_in_parent as a, editable_in_parent as b, sys; print(a.VALUE, b.VALUE, sys.prefix)"
    seen = subprocess.check_output([made.strip(), "-c", query], text=True, cwd=tmp_path)
    assert seen.split() == ["7", "8", str(child)]


def test_what_is_missing_is_named_with_the_way(tmp_path):
    from devenv import DevError
    from gpu.environment import make_over_parent, supply

    empty = tmp_path / "empty"
    empty.mkdir()
    environment = make_over_parent(tmp_path / "child", [str(empty)])
    with pytest.raises(DevError, match="no torch; start this command with the python that has it"):
        supply(environment, tmp_path / "no wheels")
    (empty / "torch-2.11.0.dist-info").mkdir()
    (empty / "torch-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    with pytest.raises(DevError, match=r"has no hatchling, .*gpu --prepare"):
        supply(environment, tmp_path / "no wheels")


RECORDS = "import json, os, sys, time; out = open(os.environ['DSX_GPU_RECORDS'], 'a')\n"
SAY = "print(json.dumps({'name': 'a', 'verdict': 'good'}), file=out, flush=True)\n"


def outcome(tmp_path, *texts, limit=20.0):
    from gpu.running import Program, run_stage

    programs = [Program(f"p{n}", [sys.executable, "-c", RECORDS + text]) for n, text in enumerate(texts)]
    return run_stage("stage", programs, limit, tmp_path / "logs", dict(os.environ))


def test_a_program_that_crashes_is_recorded_and_the_next_runs(tmp_path):
    found = outcome(tmp_path, SAY + "raise SystemError('the reason')", SAY)
    assert [(r.name, r.verdict) for r in found.records] == [("a", "good"), ("p0", "bad"), ("a", "good")]
    assert "the reason" in found.records[1].text and found.verdict == "bad"


def test_a_program_over_its_limit_is_stopped_with_its_stack_and_is_no_difference(tmp_path):
    found = outcome(tmp_path, SAY + "def stuck():\n time.sleep(60)\nstuck()", SAY, limit=1.0)
    assert [(r.name, r.verdict) for r in found.records] == [("a", "good"), ("p0", "incomplete"), ("p1", "incomplete")]
    assert "stuck" in found.records[1].text and found.verdict == "incomplete"


def test_an_error_of_the_stage_itself_and_a_missing_program_are_recorded(tmp_path):
    from gpu.running import Program, run_stage

    def programs():
        yield Program("absent", [str(tmp_path / "absent")])
        raise KeyError("wrong")

    found = run_stage("stage", programs(), 5.0, tmp_path, dict(os.environ))
    assert [(r.name, r.verdict) for r in found.records] == [("absent", "skipped"), ("stage", "bad")]


def test_losses_that_change_when_launches_wait_are_a_race():
    from gpu.running import Record
    from gpu.stages import races

    def run(*losses):
        return [Record("stage 3, fp32, disk", "good", "", {"losses": list(losses)})]

    assert [r.verdict for r in races(run(5.5, 5.25), run(5.5, 5.25))] == ["good"]
    assert [r.verdict for r in races(run(5.5, 5.26), run(5.5, 5.25))] == ["bad", "good"]
    assert [r.verdict for r in races(run(5.5, float("nan")), run(5.5, 5.25))] == ["bad", "good"]
    assert [r.verdict for r in races(run(5.5), [])] == ["skipped"]


def test_stages_of_several_calls_stand_in_one_report(tmp_path):
    from gpu import report
    from gpu.running import Outcome, Record

    report.write(tmp_path, [Outcome("build", 1.0, 0.5, [Record("a|b", "skipped", "no nvcc")])], "c1", False)
    report.write(tmp_path, [Outcome("tests", 1.0, 0.5, [Record("t", "bad", "wrong\nthe stack")])], "c1", False)
    stages = json.loads((tmp_path / report.JSON).read_text())["stages"]
    assert {name: stage["verdict"] for name, stage in stages.items()} == {"build": "skipped", "tests": "bad"}
    page = (tmp_path / report.PAGE).read_text()
    assert "a\\|b" in page and "the stack" in page
    report.write(tmp_path, [Outcome("tests", 1.0)], "c2", False)  # another commit: nothing old may stand beside it
    assert list(json.loads((tmp_path / report.JSON).read_text())["stages"]) == ["tests"]


def test_unknown_stages_are_refused_and_versions_come_first():
    from devenv import DevError
    from gpu.command import chosen_stages

    assert chosen_stages(["speed"]) == ["versions", "speed"]
    assert chosen_stages([]) == chosen_stages(["all"]) and len(chosen_stages([])) == 9
    with pytest.raises(DevError, match="no stage 'spede'; expected some of all, versions, build"):
        chosen_stages(["spede"])


def here(tmp_path, simulated=True):
    from devenv import Environment
    from gpu.stages import Here

    return Here(Environment(Path(sys.prefix)), tmp_path / "logs", tmp_path / "report", simulated)


def records_of(stage, tmp_path):
    """What a stage finds on the simulated device."""
    import dsx_simcuda
    from dsx_simcuda.__main__ import SITE
    from gpu.running import run_stage
    from gpu.stages import STAGES

    if os.environ.get("CXX") is None and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler on this machine: the simulated device cannot be built")
    dsx_simcuda.build()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSX_SIMCUDA_M", "RANK", "WORLD_SIZE"))}
    env = {**kept, "DSX_SIMCUDA": "1", "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"}
    (tmp_path / "report").mkdir()
    found = run_stage(stage, STAGES[stage].programs(here(tmp_path)), 500.0, tmp_path / "logs", env)
    assert not [r for r in found.records if r.verdict in ("bad", "incomplete")], found.records
    return {record.name: record for record in found.records}


def test_versions_are_told_on_the_simulated_device(tmp_path):
    found = records_of("versions", tmp_path)
    assert found["device 0"].verdict == found["one sum on the device"].verdict == "good"
    assert "(simulated)" in found["device 0"].text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["parity", "syncs", "tests", "speed", "memory", "largest", "sanitize"])
def test_a_stage_can_be_rehearsed_on_the_simulated_device(stage, tmp_path):
    found = records_of(stage, tmp_path)
    expected = {
        "parity": "stage 3, bf16, parameters on host",
        "syncs": "waits of the host: stage 2, bf16, optimizer on host",
        "tests": "dsx: counts",
        "speed": "1.3B, fsdp2",
        "memory": "350M, stage 3, parameters on host",
        "largest": "parameters on host",
        "sanitize": "kernels",
    }[stage]
    others = {"speed": "noted", "memory": "noted", "largest": "noted", "sanitize": "skipped"}
    assert found[expected].verdict == others.get(stage, "good")


def test_missing_tools_of_cuda_only_skip(tmp_path, monkeypatch):
    from gpu import stages

    monkeypatch.setattr(stages, "cuda_toolkit", lambda: None)
    monkeypatch.setattr(stages.shutil, "which", lambda name, **rest: None)
    for stage, text in ((stages.build, "nvcc is neither"), (stages.sanitize, "compute-sanitizer is not on PATH")):
        (found,) = stage(here(tmp_path, simulated=False))
        assert found.verdict == "skipped" and text in found.text


def test_native_code_that_does_not_compile_is_told_and_kernels_are_built_all_the_same(tmp_path, monkeypatch):
    from dataclasses import replace

    from gpu import stages

    monkeypatch.setattr(stages, "cuda_toolkit", lambda: {"CUDA_HOME": "/opt/cuda"})
    monkeypatch.delenv("DSX_BUILD_NATIVE", raising=False)
    first, *rest = stages.build(replace(here(tmp_path, simulated=False), trouble="cc1plus: killed"))
    assert first.verdict == "bad" and "cc1plus: killed" in first.text
    assert len(rest) >= 2 and all("--no-index" in program.command for program in rest[:-1])
    assert rest[0].env["CUDA_HOME"] == "/opt/cuda" and rest[0].env["DSX_BUILD_CUDA"] == "1"


def test_counts_and_reasons_of_tests_are_records(tmp_path):
    from gpu.stages import test_records as records

    xml = tmp_path / "x.xml"
    case = '<testcase name="{}">{}</testcase>'
    cases = case.format("a", "") + case.format("b", '<skipped message="no CUDA kernels"/>')
    xml.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert [(r.name, r.verdict, r.text) for r in records("p", xml)] == [
        ("p: counts", "good", ""),
        ("p: b", "skipped", "no CUDA kernels"),
    ]
    xml.write_text(f"<testsuite>{case.format('a', '<error/>')}</testsuite>")
    assert [r.verdict for r in records("p", xml)] == ["bad"]
    assert list(records("p", tmp_path / "absent")) == []
