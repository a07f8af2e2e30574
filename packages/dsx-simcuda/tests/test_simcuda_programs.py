"""Programs that know nothing of the device: `python -m dsx_simcuda`, its messages and files, and the pytest plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dsx_simcuda
import pytest
from dsx_simcuda.building import COMPILED_TOGETHER

RACE = """
import torch
side = torch.cuda.Stream()
values = torch.zeros(1000, device="cuda")
with torch.cuda.stream(side):
    values.fill_(1)
print(values.sum().item(), values.device)
"""


def test_a_right_program_ends_as_ever(run_program):
    done = run_program("-c", "import torch; print(torch.ones(3, device='cuda').sum().item())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


def test_a_program_may_look_for_torch_before_it_imports_it(run_program):
    code = "import importlib.util as i; found = i.find_spec('torch'), i.find_spec('torch'); import torch"
    done = run_program("-c", f"{code}; print(torch.ones(3, device='cuda').sum().item())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


def test_a_race_is_printed_with_both_lines_and_changes_the_exit_status(run_program, tmp_path):
    script = tmp_path / "race.py"
    script.write_text(RACE)
    done = run_program(str(script))
    assert done.returncode == 86
    assert "cuda:0" in done.stdout
    assert "write after write: aten::fill_ overwrites what aten::zero_ writes" in done.stderr
    assert "race.py:6 <module>" in done.stderr and "race.py:4 <module>" in done.stderr
    assert "fix: before the later line: later_stream.wait_stream(earlier_stream)" in done.stderr
    assert "2 reports: 1 x write after write, 1 x read before write" in done.stderr


def test_reports_that_pytest_has_captured_are_printed_at_the_end(run_program, tmp_path):
    (tmp_path / "test_race.py").write_text("def test_race():\n" + "".join(f"    {line}\n" for line in RACE.split("\n")))
    done = run_program("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert done.returncode == 86 and "1 passed" in done.stdout, done.stdout
    assert done.stderr.count("write after write: aten::fill_ overwrites what aten::zero_ writes") == 1
    assert "test_race.py:7 test_race" in done.stderr


def test_reports_are_written_as_json_and_as_a_page(run_program, tmp_path):
    script = tmp_path / "race.py"
    script.write_text(RACE)
    done = run_program(str(script), options=("--report", str(tmp_path / "out")))
    assert done.returncode == 86
    (file,), (page,) = (list((tmp_path / "out").glob(f"*.{suffix}")) for suffix in ("json", "html"))
    content = json.loads(file.read_text())
    assert [report["kind"] for report in content["reports"]] == ["write after write", "read before write"]
    assert content["reports"][0]["later"]["stack"][0][1:] == [6, "<module>"]
    assert [(s["what"], s["thread"], s["times"]) for s in content["host_syncs"]] == [("item", "MainThread", 1)]
    text = page.read_text()
    assert text.count("<svg") == 2 and "class=later" in text and "class=earlier" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text, (
        "needs no network"
    )
    assert "the default stream of cuda:0" in text


def test_children_run_on_the_device_too(run_program):
    child = "import torch; print(torch.cuda.is_available())"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_program("-c", code).stdout == "True\n"


def test_an_own_sitecustomize_is_run_too(run_program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    done = run_program("-c", "import torch; print(torch.cuda.is_available())", env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.endswith("mine\nTrue\n")


def test_a_program_without_torch_loads_nothing(run_program):
    done = run_program("-c", "import sys; print('torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_a_program_that_never_synchronises_is_told(run_program):
    done = run_program("-c", "import torch; torch.ones(3, device='cuda').add_(1)")
    assert done.returncode == 0
    assert "never waited for the device" in done.stderr


def test_an_error_that_no_wait_has_raised_is_told(run_program):
    code = "import torch; torch.ones(3, device='cuda')[torch.full((1,), 5, device='cuda')]"
    done = run_program("-c", code)
    assert done.returncode == 86
    assert "no wait of the program has raised it" in done.stderr and "out of" in done.stderr


def test_an_asynchronous_error_is_raised_by_the_next_wait(run_program):
    code = "import torch; torch.ones(3, device='cuda')[torch.full((1,), 5, device='cuda')]; torch.cuda.synchronize()"
    done = run_program("-c", code)
    assert done.returncode == 1 or done.returncode == 86
    assert "RuntimeError: CUDA error (simulated, raised by a later wait of the host)" in done.stderr


def test_a_host_access_to_device_memory_faults_with_the_line(run_program, tmp_path):
    script = tmp_path / "peek.py"
    script.write_text(
        "import ctypes, torch\nvalues = torch.ones(4, device='cuda')\n"
        "print(ctypes.c_float.from_address(values.data_ptr()).value)\n"
    )
    done = run_program(str(script))
    assert done.returncode == -11
    assert "host access to device memory: the host reads memory of cuda:0" in done.stderr
    assert 'peek.py", line 3' in done.stderr


FORK = """
import os, sys, torch
if sys.argv[1] == "late":
    torch.ones(3, device="cuda").sum().item()
child = os.fork()
if child == 0:
    try:
        print(torch.ones(3, device="cuda").sum().item(), flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_has_the_device_only_if_its_parent_has_not_used_it(run_program, tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    assert run_program(str(script), "early").stdout == "3.0\n"
    assert "Cannot re-initialize CUDA in forked subprocess" in run_program(str(script), "late").stdout


def test_a_hang_says_what_runs(run_program):
    code = "import torch; torch.cuda._sleep(15_000_000_000); torch.cuda.synchronize()"
    done = run_program("-c", code, env={"DSX_SIMCUDA_HANG_S": "1"})
    assert done.returncode == 99
    assert "hang: device 0 stream 0 did not finish in 1 s; it runs 'sleep'" in done.stderr
    assert "most recent call first" in done.stderr, "the Python stacks"


def test_the_first_lines_of_a_program_may_install_it(built):
    code = "import dsx_simcuda as s; s.install(devices=2, seed=3); import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize("arguments", [["--mode", "fast", "x.py"], ["--devices", "99", "x.py"], []])
def test_wrong_arguments_are_named(built, arguments):
    done = subprocess.run([sys.executable, "-m", "dsx_simcuda", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and ("fast" in done.stderr or "99" in done.stderr or "which program" in done.stderr)


def test_two_processes_build_once(built, tmp_path):
    """The lock and the rename, with a compiler that only makes files."""
    fake = tmp_path / "cxx"
    fake.write_text(
        "#!/bin/sh\necho x >> " + str(tmp_path / "calls") + "\nwhile [ $# -gt 0 ]; do "
        '[ "$1" = -o ] && { sleep 0.05; : > "$2"; }; shift; done\n'
    )
    fake.chmod(0o755)
    env = {**os.environ, "CXX": str(fake), "DSX_SIMCUDA_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "import dsx_simcuda; print(dsx_simcuda.build())"]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0] for process in both}
    assert len(folders) == 1
    sources = list((Path(dsx_simcuda.__file__).parent / "csrc").glob("*.cpp"))
    compiled = len(sources) - sum(len(unit) - 1 for unit in COMPILED_TOGETHER)
    assert len((tmp_path / "calls").read_text().splitlines()) == compiled + 2, "compiled and linked once"


PLUGIN = """
import pytest
import torch


def test_right():
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_race():
    side = torch.cuda.Stream()
    values = torch.zeros(1000, device="cuda")
    with torch.cuda.stream(side):
        values.fill_(1)


@pytest.mark.simcuda(mode="lazy", allow_reports=True)
def test_race_that_is_wanted(simcuda):
    assert simcuda.get_option("mode") == "lazy"
    test_race()
    assert [report.kind for report in simcuda.reports()[-1:]] == ["write after write"]


def test_waits(simcuda, host_waits):
    torch.ones(3, device="cuda").sum().item()
    assert host_waits().total() == 1
    assert simcuda.get_option("mode") == "slow-side"
"""


def run_pytest(folder, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_the_plugin_fails_tests_with_reports(built, tmp_path):
    (tmp_path / "test_sample.py").write_text(PLUGIN)
    done = run_pytest(tmp_path, "--device", "simcuda", "--simcuda-mode", "slow-side", "--simcuda-report", str(tmp_path))
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_sample.py::test_race - Failed: 1 reports of the simulated device" in done.stdout
    assert "test_sample.py:14 test_race" in done.stdout
    assert len(list(tmp_path.glob("*.html"))) == 1


def test_without_the_option_marked_tests_are_skipped(tmp_path):
    (tmp_path / "test_sample.py").write_text("import pytest\n@pytest.mark.simcuda\ndef test_it():\n    assert 0\n")
    done = run_pytest(tmp_path)
    assert "1 skipped" in done.stdout, done.stdout


def test_torch_before_the_plugin_is_a_usage_error(built, tmp_path):
    (tmp_path / "early.py").write_text("import torch\n")
    (tmp_path / "test_sample.py").write_text("def test_it():\n    pass\n")
    env_path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "early", "--device", "simcuda", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env_path)
    assert done.returncode == 4 and "[DSX901]" in done.stderr


def test_registered_memory_is_pinned_before_anything_else_of_the_device(run_program):
    code = (
        "import torch; host = torch.zeros(9)\n"
        "torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)\n"
        "print(host.is_pinned(), torch.zeros(9).is_pinned())\n"
        "torch.cuda.cudart().cudaHostUnregister(host.data_ptr()); print(host.is_pinned())\n"
    )
    done = run_program("-c", code)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr
