"""The package itself: its README, its report, running without native code and with chosen engines, a silent import."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import dsx_nvme
import dsx_nvme.errors
import pytest
from dsx_nvme import native

README = Path(__file__).resolve().parents[1] / "README.md"


def python(code, *arguments, **env):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(examples) >= 2
    for example in examples:
        exec(compile(example, str(README), "exec"), {})


def test_readme_names_everything_public():
    text = README.read_text()
    hidden = {"__version__", "Access", "Buffer", "Ticket"}
    missing = [n for n in dsx_nvme.__all__ if n not in text and n not in hidden and not n.endswith("Error")]
    assert not missing


def test_import_is_silent_and_loads_nothing_native():
    code = (
        "import sys, dsx_nvme; assert 'dsx_nvme._C' not in sys.modules;"
        "import torch; assert not torch.cuda.is_initialized();"
        "late = {'asyncio', 'argparse', 'multiprocessing.pool', 'pydantic', 'numpy.testing'};"
        "assert not late & set(sys.modules) - before"
    )
    assert python("import sys, torch; before = set(sys.modules);" + code) == (0, "", "")


def test_everything_works_without_native_code(tmp_path):
    code = """
import json, sys, torch, dsx_nvme
s = dsx_nvme.native_status()
h = dsx_nvme.aio_handle(intra_op_parallelism=2)
t = torch.arange(100_000)
h.async_pwrite(t, sys.argv[1] + "/t"); n = h.wait()
back = torch.zeros_like(t); h.sync_pread(back, sys.argv[1] + "/t")
with dsx_nvme.TensorStore(sys.argv[1] + "/s") as store:
    store.put("a", t); same = torch.equal(store.get("a").result(), t)
print(json.dumps([s["native"], s["reason"], n, torch.equal(back, t), same, dsx_nvme.explain(sys.argv[1])]))
"""
    returncode, out, err = python(code, tmp_path, DSX_NVME_NATIVE="0")
    assert returncode == 0 and not err, err
    has_native, reason, count, right, same, explained = json.loads(out)
    assert (has_native, reason, count, right, same) == (False, "switched off by DSX_NVME_NATIVE=0", 1, True, True)
    assert "engine python" in explained and "DSX_NVME_NATIVE=0" in explained


def test_an_engine_that_is_not_there_is_named():
    code = "import dsx_nvme\ntry: dsx_nvme.{}\nexcept dsx_nvme.errors.OptionError as e: print(e)"
    said = python(code.format("explain('/tmp', engine='io_uring')"), DSX_NVME_NATIVE="0")[1]
    assert "'io_uring' is not available: switched off" in said
    said = python(code.format("Engine()"), DSX_NVME_ENGINE="magic")[1]
    assert "engine 'magic': expected one of auto, io_uring" in said


@pytest.mark.native
@pytest.mark.skipif(native.module() is None, reason="needs the compiled module")
def test_the_environment_chooses_the_engine(tmp_path):
    query = "import sys, dsx_nvme; print(dsx_nvme.access(sys.argv[1]).engine)"
    for name in (*(e for e in native.ENGINES if not native.refusal(e)), "python"):
        assert python(query, tmp_path, DSX_NVME_ENGINE=name)[1].strip() == name


@pytest.mark.native
@pytest.mark.skipif(native.module() is None, reason="needs the compiled module")
def test_refused_engines_are_passed_over_with_the_reason(tmp_path, monkeypatch):
    refusals = {"io_uring": "io_uring_setup: Operation not permitted (seccomp)", "libaio": "", "threads": ""}
    monkeypatch.setattr(native, "_refusals", refusals)
    found = dsx_nvme.access(tmp_path)
    if found.direct:
        assert (
            found.engine == "libaio"
            and "not io_uring: io_uring_setup: Operation not permitted (seccomp)" in found.reasons
        )
    refusals["libaio"] = "io_setup"
    assert dsx_nvme.access(tmp_path).engine == "threads"


def test_memory_file_systems_go_through_the_page_cache():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm")
    found = dsx_nvme.access("/dev/shm")
    assert not found.direct and found.engine in ("threads", "python")
