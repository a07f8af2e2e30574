"""Real launches on this machine: what ranks see, and that nothing survives a failure, Ctrl-C or a killed launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dsx_launch
import psutil
import pytest
from dsx_launch.processes import lives

LAUNCH = [sys.executable, "-m", "dsx_launch"]
QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning"}  # of torch, where numpy is not installed
TIMEOUT = 120  # loose: the machine may be busy; every failure below would otherwise sleep for ten minutes


def clean_environment(**more: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RANK")
    }
    return {**env, **QUIET, **more}


def launch(*argv: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *argv]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(**more), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait until ``count`` processes have written their ids into files named pid.*."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found = [path.name.split(".")[1] for path in folder.glob("pid.*")]
        if len(found) >= count:
            return [int(pid) for pid in found]
        time.sleep(0.05)
    raise TimeoutError(f"only {len(list(folder.glob('pid.*')))} of {count} processes came up")


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(map(lives, pids)):
            return True
        time.sleep(0.05)
    return False


SLEEPER = """
import os, signal, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for pid in (os.getpid(), grandchild.pid):
    open(f"pid.{pid}", "w").close()
while "die" in sys.argv and os.environ["RANK"] == "1":
    import glob
    if len(glob.glob("pid.*")) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
time.sleep(600)
"""


def test_ranks_see_their_place_and_their_arguments(tmp_path):
    script = write(
        tmp_path,
        """
import json, multiprocessing, os, pickle, sys
def shout(text): return text.upper()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
seen = {name: os.environ[name] for name in names}
seen.update(argv=sys.argv, name=__name__, path=sys.path[0], extra="DSX_WORKER" in os.environ)
seen["pickled"] = pickle.loads(pickle.dumps(shout))("x")
with open(f"seen{os.environ['RANK']}", "w") as file: json.dump(seen, file)
""",
    )
    done = launch(
        "--num_procs", "2", "--master_addr", "127.0.0.1", script, "--lr", "$$x ${local_rank} 'q'", "--", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
    seen = [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(2)]
    cores = len(os.sched_getaffinity(0))
    for rank, one in enumerate(seen):
        assert one["argv"] == [script, f"--local_rank={rank}", "--lr", "$$x ${local_rank} 'q'", "--"]
        assert (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_SIZE"], one["CROSS_RANK"]) == (
            str(rank),
            str(rank),
            "2",
            "2",
            "0",
        )
        assert one["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert (one["name"], one["pickled"], one["extra"]) == ("__main__", "X", False)
        assert os.path.samefile(one["path"], tmp_path)
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != "29500"


def test_programs_devices_and_log_files(tmp_path):
    words = "echo $RANK of $WORLD_SIZE, $CUDA_VISIBLE_DEVICES, $OMP_NUM_THREADS; exit 3"
    options = ["--num_procs", "1", "--enable_each_rank_log", "logs", "--no_python", "--no_local_rank"]
    done = launch(*options, "sh", "-c", words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="GPU-1f,GPU-2f", OMP_NUM_THREADS="7")
    assert done.returncode == 3 and done.stdout == ""
    assert (tmp_path / "logs" / "rank0.log").read_text() == "0 of 1, GPU-1f,GPU-2f, 7\n"
    assert done.stderr.startswith("[rank 0] failed on localhost") and "exited with code 3" in done.stderr


def test_a_module_runs_as_with_python_m(tmp_path):
    """The first code of a rank, without the agent around it."""
    (tmp_path / "job.py").write_text(
        "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:], __spec__.name,"
        " len(os.sched_getaffinity(0)))\n"
    )
    core = min(os.sched_getaffinity(0))
    settings = {"agent_pid": os.getpid(), "kind": "module", "pass_local_rank": True, "devices": ["4", "MIG-x"]}
    settings |= {"cores": [[core]], "log_dir": "", "pipes": "", "shown": None, "failure_dir": str(tmp_path)}
    env = {
        "DSX_WORKER": json.dumps(settings),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    command = [sys.executable, str(Path(dsx_launch.__file__).with_name("_worker.py")), "job", "a"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("4,MIG-x ['--local_rank=0', 'a'] job 1\n", 0), done.stderr


def test_a_rank_that_raises_is_shown_first_and_once_and_ends_the_others(tmp_path):
    """Rank 0 ignores SIGTERM and would sleep for ten minutes; rank 1 hangs in its own clean-up after raising."""
    script = write(
        tmp_path,
        """
import atexit, glob, os, signal, threading, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w").close()
    time.sleep(600)
while not os.path.exists("ready"):
    time.sleep(0.05)
atexit.register(time.sleep, 600)
def train(): raise ValueError("the loss is not a number")
train()
""",
    )
    done = launch("--num_procs", "2", script, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert "_worker.py" not in done.stderr
    assert done.stderr.count("ValueError: the loss is not a number") == 2  # the traceback's last line and the summary
    assert sum("Traceback" in line for line in lines) == 1
    assert lines[-1].startswith("[dsx] rank 1 failed on localhost")


def test_a_killed_rank_is_a_failure_and_leaves_nothing(tmp_path):
    done = launch("--num_procs", "2", write(tmp_path, SLEEPER), "die", "stubborn", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "[rank 1] failed" in done.stderr and "killed by SIGKILL" in done.stderr
    assert all_gone(pids_in(tmp_path, 4))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_launcher_leaves_nothing(number, tmp_path):
    command = [*LAUNCH, "--num_procs", "2", "--save_pid", write(tmp_path, SLEEPER)]
    env = clean_environment(TMPDIR=str(tmp_path))
    # a file, not a pipe: the grandchildren of a killed launcher would keep a pipe open
    with (
        open(tmp_path / "said", "w+") as said,
        subprocess.Popen(command, cwd=tmp_path, env=env, stderr=said) as launcher,
    ):
        pids = pids_in(tmp_path, 4)
        ranks = [pid for pid in pids if psutil.Process(pid).ppid() == launcher.pid]
        assert len(ranks) == 2
        assert (tmp_path / f"{launcher.pid}.dsx").read_text() == f"{launcher.pid}\n"
        launcher.send_signal(number)
        launcher.wait(TIMEOUT)
    if number == signal.SIGKILL:
        assert all_gone(ranks)  # the kernel ends the ranks; a session they opened on purpose is theirs to end
        for pid in set(pids) - set(ranks):
            psutil.Process(pid).kill()
        return
    assert launcher.returncode == 128 + number
    text = (tmp_path / "said").read_text()
    assert "Traceback" not in text and signal.Signals(number).name in text
    assert all_gone(pids)
    assert not list(tmp_path.glob("*.dsx")) and not list(tmp_path.glob("dsx_launch_*"))


def test_a_missing_script_starts_nothing(tmp_path):
    done = launch("--num_procs", "2", "gone.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("python -m dsx_launch: no such script: gone.py")
    assert "torch" not in done.stderr


def test_dry_run_of_one_machine(tmp_path):
    done = launch("--num_procs", "2", "--dry_run", "train.py", "a b", cwd=tmp_path)
    first, second = done.stdout.splitlines()
    assert first.startswith("LOCAL_RANK=0 LOCAL_SIZE=2 CROSS_RANK=0 ") and first.endswith(
        "train.py --local_rank=0 'a b'"
    )
    assert second.endswith("train.py --local_rank=1 'a b'")


def test_num_gpus_without_devices_counts_processes_and_says_so(tmp_path):
    # One write: the words and the line ends of two processes would mix where output is not buffered.
    script = write(tmp_path, "import os, sys; sys.stdout.write('world ' + os.environ['WORLD_SIZE'] + chr(10))")
    done = launch("--num_gpus", "2", "--no_local_rank", script, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["world 2"] * 2
    assert "this machine offers no device, so 2 process(es) without a device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("--num_procs", "1", "--master_addr", "no.such.host.invalid"),
            2, "--master_addr no.such.host.invalid: this name",
        ),
        (("--num_procs", "99999999999"), 2, "--num_procs: got a larger number"),
        (("--num_gpus", "99999999999"), 2, "--num_gpus: got a larger number"),
        (("--num_procs", "1", "--bind_core_list", "0-99999999999"), 2, "expected at most 65536"),
        (
            ("--num_procs", "1", "--enable_each_rank_log", "/dev/null"),
            1, "--enable_each_rank_log /dev/null: the folder",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused_at_once(arguments, code, words, tmp_path):
    script = write(tmp_path, "")
    done = launch(*arguments, script, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == code and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", [None, 0o644], ids=["missing", "not executable"])
def test_a_program_that_cannot_be_run_is_named(mode, tmp_path):
    if mode is not None:
        (tmp_path / "program").write_text("#!/bin/true")
        (tmp_path / "program").chmod(mode)
    done = launch("--num_procs", "1", "--no_python", "./program", cwd=tmp_path)
    assert done.returncode == 1
    assert "the program of --no_python: './program'" in done.stderr


HOLDER = """
import sys, time, pathlib
from dsx_core.holding import hold
held = hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_folders_of_killed_launchers_are_removed_by_the_next_and_those_of_running_ones_are_not(tmp_path):
    """Whoever runs in a container with another PID namespace knows the others by their lock alone."""
    left, kept, strange = (tmp_path / f"dsx_launch_{name}" for name in ("left", "kept", "strange"))
    holders = []
    for folder in (left, kept):
        folder.mkdir()
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "held\n"
        holders.append(holder)
    strange.mkdir()  # of no launcher: nobody has ever held it
    holders[0].kill()
    holders[0].wait()
    script = write(tmp_path, "")
    done = launch("--num_procs", "1", script, cwd=tmp_path, TMPDIR=str(tmp_path))
    for holder in holders:
        holder.kill()
        holder.communicate()
    assert done.returncode == 0
    assert {path.name for path in tmp_path.glob("dsx_launch_*")} == {kept.name, strange.name}


def test_a_process_may_end_between_two_questions():
    """Hundreds of short lives looked at while they end: no error, and none that was waited for is said to live."""
    for _ in range(300):
        child = subprocess.Popen(["true"])
        while lives(child.pid):
            pass  # it ends meanwhile
        assert child.wait() == 0 and not lives(child.pid)
    assert lives(os.getpid())
