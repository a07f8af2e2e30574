"""Folders of an elastic job beside its checkpoints: held while it lives, made again if lost, removed when left."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from dsx.elasticity.memory import KEEP_S, NodeMemory, remove_leftovers
from dsx_core.holding import free, hold, note_in, remove_if_free

HOLDER = """
import sys, time
from dsx.elasticity.memory import NodeMemory
from pathlib import Path
disk, node, place = sys.argv[1:]
memory = NodeMemory.open(Path(disk), node, place)
(memory.path / "step2-0123456789ab").mkdir()
print(memory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def job(tmp_path, ended):
    """Make a node with a snapshot that a living process holds: its folder, and a way to kill the process."""
    living = []

    def make(disk, pid=ended):
        node = f"{socket.gethostname()}-{pid}"
        command = [sys.executable, "-c", HOLDER, str(tmp_path / disk), node, str(tmp_path / "memory")]
        (tmp_path / "memory").mkdir(exist_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        living.append(process)

        def kill():
            process.kill()
            process.wait()

        return Path(process.stdout.readline().strip()), kill

    yield make
    for process in living:
        process.kill()
        process.communicate()


def abandoned(tmp_path, disk):
    return list(NodeMemory.open(tmp_path / disk, "here", tmp_path / "memory")._abandoned())


def grow_old(folder):
    for path in folder.iterdir():
        then = time.time() - KEEP_S - 60
        os.utime(path, (then, then), follow_symlinks=False)


def test_a_node_of_another_pid_namespace_is_not_taken_for_dead_while_its_ranks_live(tmp_path, job):
    folder, kill = job("disk")  # its agent's number is nobody's here, as that of an agent in another container
    assert abandoned(tmp_path, "disk") == []
    NodeMemory.open(tmp_path / "disk", "here", tmp_path / "memory").keep_only("step4-0123456789ab")
    assert (folder / "step2-0123456789ab").is_dir()
    kill()
    assert abandoned(tmp_path, "disk") == [folder]
    own = NodeMemory.open(tmp_path / "disk", "here", tmp_path / "memory")
    own.keep_only("step4-0123456789ab")
    assert not folder.exists() and note_in(own.path) == str(tmp_path / "disk")
    with free(own.path) as is_free:
        assert not is_free


def test_a_node_whose_agent_lives_is_not_taken_for_dead_between_two_rounds(tmp_path, job):
    folder, kill = job("disk", os.getpid())
    kill()
    assert abandoned(tmp_path, "disk") == [] and folder.is_dir()


def test_what_a_killed_job_has_left_is_removed_by_the_next_elastic_job(tmp_path, job):
    (old, kill_old), (young, kill_young), (living, _) = job("old"), job("young"), job("living")
    own = NodeMemory.open(tmp_path / "own", "here", tmp_path / "memory")
    for folder in (old, living):
        grow_old(folder)
    remove_leftovers(own)
    assert old.is_dir()  # its ranks live
    kill_old()
    kill_young()
    remove_leftovers(own)
    assert not old.parent.exists()
    assert young.is_dir() and living.is_dir() and own.path.is_dir()  # the young one's job may come back for it


def test_a_link_of_another_user_is_not_followed(tmp_path, job):
    folder, kill = job("old")
    kill()
    grow_old(folder)
    own = NodeMemory.open(tmp_path / "own", "here", tmp_path / "memory")
    elsewhere = tmp_path / "elsewhere"
    folder.parent.rename(elsewhere)
    folder.parent.symlink_to(elsewhere)
    remove_leftovers(own)
    assert (elsewhere / folder.name).is_dir()


def test_a_folder_is_held_by_several_and_free_when_all_have_let_go(tmp_path):
    assert not remove_if_free(tmp_path)  # it was never held
    holds = [hold(tmp_path, "ours"), hold(tmp_path)]
    for one in holds:
        assert note_in(tmp_path) == "ours" and not remove_if_free(tmp_path)
        one.release()
        one.release()  # a second time: nothing
    assert remove_if_free(tmp_path) and not tmp_path.exists()
    with pytest.raises(FileNotFoundError):
        hold(tmp_path)
    tmp_path.mkdir()


LOSES_ITS_FOLDER = """
import os, shutil, signal, sys
from pathlib import Path

notes = Path(os.environ["DSX_ELASTIC_AGENT"])
marks = Path(sys.argv[-1])
rounds = len(list(marks.iterdir()))
(marks / str(rounds)).touch()
print(f"round {rounds} {notes.is_dir()}", flush=True)
if rounds < 2:
    shutil.rmtree(notes.parent if rounds == 0 else notes)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_lost_its_folder_gets_over_a_failure(tmp_path):
    script, marks, temporary = tmp_path / "train.py", tmp_path / "marks", tmp_path / "tmp"
    script.write_text(textwrap.dedent(LOSES_ITS_FOLDER))
    marks.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "dsx.launcher", "--elastic_training", "--num_procs", "1"]
    ran = subprocess.run(
        [*command, str(script), str(marks)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n") == ["round 0 True", "round 1 True", "round 2 True", ""]
    assert ran.stderr.count("was removed by another program") == 2 and "Traceback" not in ran.stderr
    assert os.listdir(temporary) == []
