"""Why a rank has left the job is told to those who wait for it: its error, on every backend, and nothing where there
was none.
"""

import socket
import subprocess
import sys
import textwrap

import dsx_comm
import pytest
import torch
from dsx_comm.departures import Departures
from dsx_comm.shm import native
from dsx_testkit import run_ranks

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")

SCRIPT = """
import sys, torch, dsx_comm
import torch.distributed as dist
rank, how = int(sys.argv[1]), sys.argv[4]
dist.init_process_group(sys.argv[2], init_method=f"tcp://127.0.0.1:{sys.argv[3]}", rank=rank, world_size=2)
tensor = torch.ones(4)
try:
    for step in range(1000):
        if rank == 1 and step == 3:
            if how == "in order":
                break
            raise ValueError("boom of rank 1\\nin two lines")
        handle = dsx_comm.all_reduce(tensor, async_op=True)
        if how != "dropped":
            handle.wait()
        else:
            dsx_comm.barrier()
finally:
    if how == "destroys":
        dsx_comm.destroy_process_group()
"""


def run(backend, how, folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = folder / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "ignore", str(script)]
    jobs = [
        subprocess.Popen([*command, str(rank), backend, str(port), how], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return said[0]


@pytest.mark.parametrize(
    "backend, how", [("gloo", "raises"), ("gloo", "destroys"), pytest.param("dsx", "dropped", marks=needs_native)]
)
def test_the_error_is_named(backend, how, tmp_path):
    said = run(backend, how, tmp_path)
    assert "PeerLostError" in said and "rank 1 has left the job: ValueError: boom of rank 1" in said, said
    assert "in two lines" not in said


def test_a_rank_that_leaves_in_order_has_no_error(tmp_path):
    assert "has left the job" not in run("gloo", "in order", tmp_path)


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value.encode()

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]


def words(rank, n):
    from unittest import mock

    world, half = dsx_comm.get_world_group(), dsx_comm.new_group([0, 1])
    departures = Departures()
    departures.announce()  # not connected: nothing is said
    departures.connect(Store())
    departures.announce()  # no error: nothing is said
    name = world.group_name
    assert departures.of_group(name) == {}
    departures._store.add("left", 3)  # the third one's line is not there yet
    departures._store.set("left/1", "2 KeyError: 2")
    departures._store.set("left/2", "9 of another job")
    others = {} if rank == 2 else {2: "KeyError: 2"}
    assert departures.of_group(name) == others
    assert departures.of_group("unknown") == {}
    if rank < 2:
        assert departures.of_group(half.group_name) == {}  # rank 2 is no member
    with mock.patch.object(Store, "check", side_effect=RuntimeError("the store is gone")):
        assert departures.of_group(name) == {}
    dsx_comm.all_reduce(torch.ones(1))


def test_only_members_of_the_group_are_looked_for():
    run_ranks(words, 3)
