"""Whatever way a rank dies, the report names it first and the launcher returns its exit code.

The other rank waits in a collective over shared memory, which notices the death at once, often before the launcher
does; or, where dsx is not installed, in one of gloo.
"""

import json
import subprocess
import sys

import pytest
from dsx_launch.failures import RankFailure

SCRIPT = """
import importlib.util, json, os, signal, sys
import torch
import torch.distributed as dist

if importlib.util.find_spec("dsx"):
    import dsx
    dsx.init_distributed(verbose=False)
else:
    dist.init_process_group("gloo")
how = sys.argv[-1]
x = torch.ones(1000)
dist.all_reduce(x)

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

if dist.get_rank() == 1:
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        signal.pause()
    if how == "segfault":
        import ctypes
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how.startswith("exit"):
        sys.exit(int(how[4:]))
    if how.startswith("_exit"):
        os._exit(int(how[5:]))
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "unprintable":
        raise Unprintable
    raise ValueError("the cause")
for _ in range(3):
    dist.all_reduce(x)
"""

CODES = {
    "segfault": 139, "SIGKILL": 137, "interrupt": 130, "_exit7": 7, "unprintable": 1,
    "SIGTERM": 143, "SIGABRT": 134, "abort": 134, "SIGSEGV": 139, "SIGBUS": 135, "SIGFPE": 136, "SIGHUP": 129,
    "exit3": 3, "raise": 1,
}  # fmt: skip
SAMPLE = ("segfault", "SIGKILL", "interrupt", "unprintable")
CASES = [pytest.param(how, marks=() if how in SAMPLE else pytest.mark.slow) for how in CODES]


@pytest.mark.parametrize("how", CASES)
def test_the_rank_that_died_is_named_first_with_its_code(how, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dsx_launch", "--num_procs", "2", "--no_local_rank", "script.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    report = [line for line in done.stderr.splitlines() if " failed on " in line]
    assert len(report) == 1 and "rank 1" in report[0], done.stderr
    assert done.returncode == CODES[how], done.stderr


@pytest.mark.parametrize("name", ["PeerLostError", "CommAbortedError", "CollectiveTimeoutError", "HangError"])
def test_what_dsx_comm_says_of_a_dead_peer_is_a_consequence(name):
    assert RankFailure(rank=0, host="h", time=1.0, exitcode=1, type=name, message="rank(s) 1 ended").follows_another


def test_what_a_rank_says_of_itself_is_a_cause():
    for name in ("ValueError", "MismatchError", "CommArgumentError"):
        text = "PeerLostError is what the other rank said"
        assert not RankFailure(rank=0, host="h", time=1.0, exitcode=1, type=name, message=text).follows_another


def test_a_record_of_an_error_without_text_can_be_read(tmp_path):
    from dsx_launch.failures import read_records

    (tmp_path / "rank1.json").write_text(json.dumps({"rank": 1, "time": 1.0, "type": "E", "message": "m"}))
    assert read_records(tmp_path, host="h")[0].rank == 1
