"""Importing a package does nothing but define names.

One fresh interpreter per package, watched by an audit hook: no process started, no file written, no environment
variable changed, no device touched, nothing printed. torch is imported before the watch begins: what it does is its own
affair.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

WATCH = """
import json, os, sys
sys.dont_write_bytecode = True
import torch
before, seen = dict(os.environ), []
FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.bind",
              "socket.connect", "os.mkdir", "os.remove", "os.rename")
def hook(event, args):
    if event in FORBIDDEN:
        seen.append([event, repr(args)[:200]])
    if event == "open" and isinstance(args[1], str) and any(c in args[1] for c in "wax+"):
        seen.append([event, repr(args)[:200]])
sys.addaudithook(hook)
known = set(sys.modules)
import MODULE
new = sorted(set(sys.modules) - known)
changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}
found = {"seen": seen, "changed": sorted(changed), "new": new, "cuda": torch.cuda.is_initialized()}
sys.__stdout__.write(json.dumps(found))
"""


def watched_import(module: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", WATCH.replace("MODULE", module)], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"importing {module} printed {done.stderr!r}"
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", [p.module for p in all_packages().values()])
def test_import_defines_names_and_nothing_else(package):
    result = watched_import(package)
    assert result["seen"] == []
    assert result["changed"] == []
    assert result["cuda"] is False


def test_dsx_loads_heavy_modules_only_when_used():
    new = watched_import("dsx")["new"]
    heavy = {
        "pydantic",
        "rich",
        "safetensors",
        "psutil",
        "tensorboard",
        "wandb",
        "comet_ml",
        "torch.distributed.elastic",
    }
    assert heavy.isdisjoint(new), f"import dsx also imports {sorted(heavy.intersection(new))}"


def test_the_watch_can_fail(tmp_path):
    (tmp_path / "loud.py").write_text("import os\nos.environ['X_LOUD'] = '1'\nopen(os.devnull, 'w').close()\n")
    code = WATCH.replace("import MODULE", f"sys.path.insert(0, {str(tmp_path)!r}); import loud")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["changed"] == ["X_LOUD"]
    assert result["seen"]
