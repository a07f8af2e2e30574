"""The shared-memory transport when things go wrong: killed ranks, too little memory, several jobs, more ranks than
cores.
"""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import dsx_comm
import pytest
import torch
from dsx_comm.shm import native
from dsx_comm.shm.process_group import ShmProcessGroup
from dsx_testkit import run_ranks
from dsx_testkit.leftovers import segments_of, sockets_of, unix_inodes

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
pytestmark = pytest.mark.native

JOB = """
import os, sys, time, datetime, torch, dsx_comm
import torch.distributed as dist
rank, n, port, mode = map(int, sys.argv[1:5])
torch.set_num_threads(1)
dist.init_process_group("dsx", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n,
                        timeout=datetime.timedelta(seconds=60))
sub = dist.new_group([0, 1])
print("ready", flush=True)
small, large, got = torch.ones(64), torch.ones(300_000), torch.empty(100_000)
try:
    while True:
        if mode == 0:
            dist.all_reduce(small); dist.all_reduce(large)
        elif mode == 1:
            works = [dist.all_reduce(large, async_op=True) for _ in range(3)]
            torch.ones(300, 300) @ torch.ones(300, 300)
            for work in works: work.wait()
        elif mode == 3:  # rank 1 sees of the killed rank 2 only that rank 0 ends because of it
            dist.barrier(group=sub if rank == 1 else None)
        else:
            to, of = (rank + 1) % n, (rank - 1) % n
            a, b = dist.isend(large[:100_000], to), dist.irecv(got, of)
            a.wait(); b.wait()
except dsx_comm.CommError as error:
    print(f"{type(error).__name__} {error}", flush=True)
"""


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(n, mode, folder):
    script = folder / f"job{mode}.py"
    script.write_text(textwrap.dedent(JOB))
    port = free_port()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(n), str(port), str(mode)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        for r in range(n)
    ]
    for job in jobs:
        for line in job.stdout:  # warnings may come first
            if line.strip() == "ready":
                break
    return jobs


@needs_native
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["collectives", "asynchronous", "sends"])
def test_the_others_learn_who_was_killed(mode, tmp_path):
    generator = random.Random(mode)
    n = 3
    jobs = start(n, mode, tmp_path)
    segments = segments_of(job.pid for job in jobs)
    try:
        victim = generator.randrange(1, n)  # rank 0 holds the store
        time.sleep(generator.random() * 0.5)
        jobs[victim].send_signal(signal.SIGKILL)
        for rank, job in enumerate(jobs):
            text, _ = job.communicate(timeout=30)
            if rank == victim:
                continue
            kind, message = text.strip().splitlines()[-1].split(" ", 1)
            assert kind == "PeerLostError", text
            assert re.search(rf"rank(\(s\))? (\d+, )*{victim}\b", message), message
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert not [path for path in segments if path.exists()]


@needs_native
def test_the_first_to_go_is_named_in_a_group_it_does_not_belong_to(tmp_path):
    jobs = start(3, 3, tmp_path)
    try:
        time.sleep(0.3)
        jobs[2].send_signal(signal.SIGKILL)
        texts = [job.communicate(timeout=30)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert "PeerLostError" in texts[1] and "rank(s) 0 ended while rank 1 waited" in texts[1], texts[1]
    ended = "; ended by now: rank(s) 0, 2 [DSX206] docs: dsx explain DSX206"  # torch's store warns before and after it
    assert any(line.endswith(ended) for line in texts[1].splitlines()), texts[1]
    assert "rank(s) 2 ended while rank 0 waited" in texts[0], texts[0]


@needs_native
def test_nothing_is_left_when_all_are_killed(tmp_path):
    jobs = start(2, 0, tmp_path)
    segments, sockets = (look([job.pid for job in jobs]) for look in (segments_of, sockets_of))
    for job in jobs:
        job.send_signal(signal.SIGKILL)
    for job in jobs:
        job.wait()
        job.stdout.close()
    assert not [path for path in segments if path.exists()]
    assert sockets & unix_inodes() == set()


@needs_native
def test_two_jobs_do_not_meet(tmp_path):
    first, second = start(2, 0, tmp_path), start(2, 0, tmp_path)
    try:
        first[1].send_signal(signal.SIGKILL)
        first[0].communicate(timeout=30)
        time.sleep(0.3)
        assert all(job.poll() is None for job in second)  # the other job goes on
    finally:
        for job in first + second:
            job.kill()
            job.wait()
            job.stdout.close()


def let_go(rank, n):
    """The memory of a destroyed group goes at once, not when the garbage collector comes."""
    import gc
    import weakref

    import torch.distributed as dist

    gc.collect()
    gc.disable()
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert left() is None


@needs_native
def test_a_destroyed_group_lets_go_of_its_memory():
    run_ranks(let_go, 2, backend="dsx")


def late(rank, n):
    """Who waits must not burn its core: more ranks than cores, one of them two seconds late."""
    import time

    import torch.distributed as dist

    dist.barrier()
    began = time.process_time()
    if rank == 0:
        time.sleep(2.0)
    dist.barrier()
    return time.process_time() - began


@needs_native
def test_waiting_ranks_sleep():
    assert max(run_ranks(late, 4, backend="dsx")) < 0.5


def absent(rank, n):
    import datetime

    import dsx_comm
    import torch.distributed as dist

    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 1:
        time.sleep(2.5)
        with pytest.raises(dsx_comm.errors.CollectiveTimeoutError, match=r"rank\(s\) 1 did not come within 1 s"):
            dist.all_reduce(torch.ones(3), group=group)
        return
    with pytest.raises(
        dsx_comm.errors.CollectiveTimeoutError, match=r"all_reduce #1: rank\(s\) 1 did not come within 1 s"
    ):
        dist.all_reduce(torch.ones(3), group=group)


@needs_native
def test_a_rank_that_does_not_come_is_named():
    run_ranks(absent, 2, backend="dsx")


def falls_back(rank, n, environ, limit):
    import resource

    for name, value in environ.items():
        os.environ[name] = value
    if limit and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    import dsx_comm
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dsx_comm.init_distributed("dsx")
    tensor = torch.ones(5, dtype=torch.bfloat16)
    dsx_comm.all_reduce(tensor)
    assert tensor[0] == n
    dsx_comm.all_reduce(tensor, dist.ReduceOp.AVG)
    assert not isinstance(dist.group.WORLD, ShmProcessGroup)
    dsx_comm.destroy_process_group()
    return [str(w.message) for w in seen if w.category is dsx_comm.shm.register.FallbackWarning]


def test_without_the_compiled_module_gloo_serves_and_says_why():
    texts = run_ranks(falls_back, 2, {"DSX_COMM_NATIVE": "0"}, 0, backend=None)
    assert "switched off by DSX_COMM_NATIVE=0" in texts[0][0] and "gloo" in texts[0][0]
    assert texts[1] == []


@needs_native
def test_too_little_memory_turns_all_to_gloo():
    texts = run_ranks(falls_back, 2, {}, 64 * 1024, backend=None)
    assert "rank 0: cannot make a shared-memory segment" in texts[0][0]


def small(rank, n):
    import dsx_comm
    import torch.distributed as dist

    tight = dist.new_group(pg_options=dsx_comm.ShmOptions(limit_bytes=400_000))
    assert isinstance(tight, ShmProcessGroup)
    tensor = torch.arange(100_001.0)
    dist.all_reduce(tensor, group=tight)
    assert torch.equal(tensor, torch.arange(100_001.0) * n)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        none = dist.new_group(pg_options=dsx_comm.ShmOptions(limit_bytes=10_000))
    assert not isinstance(none, ShmProcessGroup)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="multiple of 4096"):
        dsx_comm.ShmOptions(slice_bytes=1000)


@needs_native
def test_slices_shrink_to_the_limit():
    run_ranks(small, 2, backend="dsx")


def differing(rank, n):
    import dsx_comm
    import torch.distributed as dist

    for sizes in ({"one_shot_bytes": 4096 * rank}, {"slice_bytes": 8192 * (rank + 1)}):
        with pytest.raises(dsx_comm.errors.CommArgumentError, match=f"rank 1 has {next(iter(sizes))} .*rank 0 "):
            dist.new_group(pg_options=dsx_comm.ShmOptions(**sizes))
    tensor = torch.ones(5000)
    dist.all_reduce(
        tensor, group=dist.new_group(pg_options=dsx_comm.ShmOptions(one_shot_bytes=64, spin_us=100.0 * rank))
    )
    assert tensor[-1] == n


@needs_native
def test_sizes_that_differ_between_ranks_are_named():
    run_ranks(differing, 2, backend="dsx")


def interrupted(rank, n, call):
    import threading

    import dsx_comm
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.new_group()
    tensor = torch.ones(100)
    wait = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "recv": lambda: dist.recv(tensor, 1, group=group),
    }[call]
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()
    dist.barrier()
    if rank == 1 and call == "all_reduce":
        with pytest.raises(dsx_comm.errors.CommAbortedError, match="rank 0 was interrupted"):
            wait()
    dist.barrier()


@needs_native
@pytest.mark.parametrize("call", ["all_reduce", "async", "recv"])
def test_an_interrupt_ends_a_wait(call):
    run_ranks(interrupted, 2, call, backend="dsx")


def aborted(rank, n):
    import dsx_comm
    import torch.distributed as dist

    if rank == 0:
        time.sleep(0.3)
        dist.group.WORLD.abort("rank 0 has had enough")
        return
    with pytest.raises(dsx_comm.errors.CommAbortedError, match="rank 0 has had enough"):
        dist.barrier()


@needs_native
def test_a_group_can_be_given_up():
    run_ranks(aborted, 2, backend="dsx")


def test_import_needs_nothing():
    assert dsx_comm.native_status()["native"] in (True, False)
