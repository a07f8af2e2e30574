"""Ranks that are forked from a process with torch loaded: they are like fresh ones, and fresh ones where that fails."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
from importlib.metadata import entry_points
from pathlib import Path

import dsx_launch
import psutil
import pytest
from dsx_launch.elastic_settings import Elastic
from dsx_launch.errors import ResourceError
from dsx_launch.notes import late_variables
from dsx_launch.options import parse
from dsx_launch.processes import lives
from dsx_launch.stand_by import FreshRanks, stand_by_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere every rank is a fresh process")

SCRIPT = """
import json, os, sys, time
loaded = "torch" in sys.modules
descriptors = sorted(os.listdir("/proc/self/fd"))
import random
from pathlib import Path
import numpy, psutil, torch
from dsx_launch.notes import late_variables

out, rank, turn = Path(sys.argv[-1]), int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
facts = {
    "loaded": loaded, "pid": os.getpid(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "cwd": os.getcwd(),
    "found": "loaded" in vars(sys.modules["__main__"]),
    "draws": [random.random(), numpy.random.rand(), torch.rand(1).item()], "threads": torch.get_num_threads(),
    "omp": os.environ["OMP_NUM_THREADS"], "late": late_variables(), "descriptors": descriptors,
    "inner": sorted(name for name in os.environ if name.startswith("DSX_")),
}
os.environ["OMP_NUM_THREADS"] = "77"
facts["later"] = late_variables()
path = out / f"{turn}.{rank}"
path.with_suffix(".part").write_text(json.dumps(facts))
path.with_suffix(".part").rename(path)
if turn == "0" and rank == 1:
    while not (out / "0.0").exists():
        time.sleep(0.05)
    ranks = [json.loads((out / f"0.{one}").read_text())["pid"] for one in range(2)]
    (stand_by,) = [child for child in psutil.Process(os.getppid()).children() if child.pid not in ranks]
    stand_by.kill()
    raise SystemExit(3)
while turn == "0":
    time.sleep(1)
"""


@linux
def test_a_forked_rank_is_like_a_fresh_one_which_there_is_when_the_stand_by_process_is_lost(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    words = ["--elastic_training", "--num_procs", "2", "script.py", str(tmp_path)]
    command = [sys.executable, "-m", "dsx_launch", *words]
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    said = launcher.communicate(timeout=240)[1]
    assert launcher.returncode == 0, said
    assert "rank 1: exited with code 3; starting again" in said, said
    assert said.count("ranks are started as fresh processes") == 1 and "Traceback" not in said, said
    forked, fresh = ([json.loads((tmp_path / f"{turn}.{rank}").read_text()) for rank in range(2)] for turn in "01")
    assert [one["loaded"] for one in (*forked, *fresh)] == [True, True, False, False]
    different = ("loaded", "pid", "draws", "later", "inner")
    for rank in range(2):
        alike = [{k: v for k, v in one.items() if k not in different} for one in (forked[rank], fresh[rank])]
        assert alike[0] == alike[1]
        assert forked[rank]["parent"] == launcher.pid and forked[rank]["leads"] and forked[rank]["found"]
        assert forked[rank]["argv"] == ["script.py", f"--local_rank={rank}", str(tmp_path)]
        assert forked[rank]["threads"] == int(forked[rank]["omp"])
        assert (forked[rank]["late"], forked[rank]["later"], fresh[rank]["later"]) == ([], ["OMP_NUM_THREADS"], [])
        assert set(forked[rank]["inner"]) - set(fresh[rank]["inner"]) == {"DSX_LOADED_WITH"}
    draws = [one["draws"] for one in (*forked, *fresh)]
    for generator in range(3):  # of Python, numpy and torch
        assert len({one[generator] for one in draws}) == 4, "each process draws its own seed"


def program():
    path = Path(dsx_launch.__file__).with_name("_stand_by.py")
    spec = importlib.util.spec_from_file_location("stand_by_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@linux
def test_a_process_with_threads_is_not_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert (
            "thread(s) run in a process that has only imported torch and what ranks need" in program().why_not_forked()
        )
    finally:
        done.set()
        thread.join()


LAUNCHER = """
import sys, time
from dsx_launch.host import HostJob, Program
from dsx_launch.stand_by import StandBy
started = StandBy.start(HostJob(Program("script.py"), 1))
print(started._process.pid, flush=True)
time.sleep(600)
"""


@linux
def test_it_ends_with_a_launcher_that_is_killed(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    stand_by = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate()
    stand_by.wait(timeout=120)  # raises where it lives on
    assert not lives(stand_by.pid)


@linux
def test_all_that_it_imports_is_there():
    named = [one.module for one in entry_points(group=program().WARM)]
    for name in (*program().IMPORTS, *named):
        assert importlib.util.find_spec(name) is not None, name


def test_it_can_be_left_out(monkeypatch):
    from dsx_launch.host import HostJob, Program

    assert isinstance(stand_by_for(HostJob(Program("train.py"), 1), wanted=False), FreshRanks)
    assert isinstance(stand_by_for(HostJob(Program("train.sh", kind="program"), 1), wanted=True), FreshRanks)
    assert FreshRanks().spawn([], {}) is None
    assert parse(["--elastic_training", "--no_stand_by", "train.py"]).no_stand_by
    with pytest.raises(ResourceError, match="--no_stand_by needs --elastic_training"):
        parse(["--no_stand_by", "train.py"])
    for stand_by in (True, False):
        assert Elastic.from_text(Elastic(1, 4, 3, stand_by).to_text()) == Elastic(1, 4, 3, stand_by)
    monkeypatch.delenv("DSX_LOADED_WITH", raising=False)
    assert late_variables() == []
