"""A hang is explained on every rank, whoever causes it, and the waiting calls fail with the explanation."""

import subprocess
import sys
from types import SimpleNamespace

import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_comm import hang
from dsx_testkit import run_ranks


def one_is_missing(rank, n, missing, later):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=1.0, notice=0.5)
    tensor = torch.ones(100)
    for _ in range(3):
        dsx_comm.all_reduce(tensor)
    if rank == missing:
        time.sleep(6.0)  # the line that the report has to show
        return ""
    with pytest.raises(dsx_comm.errors.HangError) as caught:
        with dsx_comm.unit("layers.7.mlp"):
            handle = dsx_comm.all_gather_into_tensor(torch.empty(n * 100), tensor, async_op=later)
        if later:
            handle.wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize("missing, later", [(1, False), (0, True)])
def test_the_missing_rank_and_its_place_are_named(backend, missing, later, capfd):
    texts = run_ranks(one_is_missing, 3, missing, later, backend=backend)
    for rank, text in enumerate(texts):
        if rank == missing:
            continue
        assert f"Rank(s) {missing} did not enter it" in text, text
        assert "all_gather" in text.splitlines()[0] and "call #4" in text
        assert f"rank {missing}: in no communication; last call of this group: #3 all_reduce" in text
        line = next(t for t in text.splitlines() if t.startswith(f"  rank {missing}:"))
        assert "in one_is_missing" in line and "test_hang_explainer.py" in line
        assert "for layers.7.mlp" in next(t for t in text.splitlines() if t.startswith(f"  rank {rank}:"))


@pytest.mark.parametrize(("late", "expected"), [(2, "rank 1: in no communication"), (3, "Rank(s) 1 did not answer")])
def test_a_rank_that_looks_late_is_heard(late, expected, monkeypatch):
    """As on a host with more processes than cores. The pauses of the rank that makes the report are counted instead."""
    world = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2, is_initialized=lambda: True)
    monkeypatch.setattr(hang, "dist", world)
    monkeypatch.setattr(hang, "_my_groups", lambda: {"0"})
    watch, store, pauses = hang.Watch(), dist.HashStore(), []
    raised = {"group": "0", "what": "barrier", "number": 2, "waited": 2.0, "final": True, "by": 0}
    said = watch._describe(watch._state, raised)

    def wait(seconds):
        pauses.append(seconds)
        if len(pauses) == late:
            hang.answer(store, "alarm/0", 1, said)

    hang.answer(store, "alarm/0", 0, said)
    stop = SimpleNamespace(wait=wait, is_set=lambda: False)
    text, _ = watch._report(store, "alarm/0", raised, 0.1, stop)
    assert expected in text, text


def after_errors(rank, n, kind):
    import time

    from dsx_comm.hang import WATCH

    look, errors = WATCH._look, []

    def fails_at_first(*arguments):
        if len(errors) < 2:
            errors.append(kind)
            raise kind("of the explainer itself")
        look(*arguments)

    WATCH._look = fails_at_first
    dsx_comm.explain_hangs(limit=1.5, notice=0.5)
    dsx_comm.barrier()
    if rank == 1:
        time.sleep(4.5)
        return ""

    def cannot_be_ended(text):
        raise RuntimeError("of a wait")

    other = WATCH.enter(dsx_comm.get_world_group(), "another thread's call", abort=cannot_be_ended)
    WATCH._state.waiting[-1] = WATCH._state.waiting.pop(other.thread)  # it is in front of ours
    with pytest.raises(dsx_comm.errors.HangError) as caught:
        dsx_comm.all_reduce(torch.ones(100))
    assert len(errors) == 2 and other.failed
    return str(caught.value)


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_an_error_of_the_explainer_does_not_end_it(kind):
    text = run_ranks(after_errors, 2, kind, backend="dsx")[0]
    assert "Rank(s) 1 did not enter it" in text or "issued" in text, text


def missing_from(rank, n, call):
    import time

    dsx_comm.explain_hangs(limit=1.0, notice=0.5)
    dsx_comm.check_first_calls(0)
    dsx_comm.barrier()
    if rank == 1:
        time.sleep(6.0)
        return ""
    with pytest.raises(dsx_comm.errors.HangError) as caught:
        if call == "two phases":
            dsx_comm.all_reduce(torch.ones(100, dtype=torch.bfloat16), async_op=True).wait()
        else:
            dsx_comm.all_gather_object([None] * n, "x")
    return str(caught.value)


@pytest.mark.parametrize("call", ["two phases", "objects"])
def test_calls_of_several_messages_are_explained_too(call):
    text = run_ranks(missing_from, 2, call, backend="gloo")[0]
    assert "Rank(s) 1 did not enter it" in text, text


def waited_for_twice(rank, n):
    import time

    import torch.distributed as dist

    dsx_comm.explain_hangs(limit=20.0, notice=0.5)
    tensor = torch.ones(4)
    dsx_comm.all_reduce(tensor)
    if rank == 1:
        time.sleep(0.4)
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future()  # a thread waits for it, as the communication log lets one do
    work.wait()
    time.sleep(2.0)  # work of one's own, in no communication
    dsx_comm.barrier()
    return tensor[0].item()


def test_a_call_that_two_threads_waited_for_is_over_when_both_are_through(capfd):
    assert run_ranks(waited_for_twice, 2, backend="dsx") == [4.0, 4.0]
    printed = capfd.readouterr()
    assert "has waited" not in printed.out + printed.err


def limits(rank, n, backend):
    from datetime import timedelta

    from dsx_comm.hang import WATCH

    dsx_comm.init_distributed(backend, timeout=timedelta(hours=1))
    groups = [dsx_comm.get_world_group(), dsx_comm.new_group(timeout=timedelta(hours=2))]
    enter, notes = WATCH.enter, []
    WATCH.enter = lambda *a, **k: notes.append(enter(*a, **k)) or notes[-1]
    for group in groups:
        dsx_comm.barrier(group)
    return [note.limit for note in notes]


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_the_limit_is_nine_tenths_of_the_groups_own(backend):
    assert run_ranks(limits, 2, backend, backend=None)[0] == pytest.approx([3240.0, 6480.0])


def slow_but_fine(rank, n):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=30.0, notice=0.5)
    tensor = torch.ones(4)
    dsx_comm.all_reduce(tensor)
    if rank == 1:
        time.sleep(2.5)
    dsx_comm.all_reduce(tensor)
    return tensor[0].item()


def test_a_notice_stops_nothing(capfd):
    assert run_ranks(slow_but_fine, 2, backend="gloo") == [4.0, 4.0]


def off(rank, n):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=0)
    if rank == 1:
        time.sleep(1.0)
    dsx_comm.barrier()
    import threading

    return [t.name for t in threading.enumerate() if t.name == "dsx-comm-watch"]


def test_it_can_be_turned_off():
    assert run_ranks(off, 2, backend="gloo") == [[], []]
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
        dsx_comm.explain_hangs(limit=-1.0)


def test_a_report_tells_who_is_missing_who_is_silent_and_who_calls_something_else():
    from dsx_comm.hang import explain

    raised = {"group": "0", "what": "barrier of 0 bytes", "number": 3, "waited": 12.0, "final": True}
    inside = {"group": "0", "what": "broadcast of 4 bytes", "number": 3, "label": ""}
    answer = {"issued": 3, "last": "x", "member": True, "in": inside, "for": 11.0, "at": "a.py:1 in f"}
    text = explain(raised, {0: answer, 1: {**answer, "issued": 2, "in": None, "for": None}})
    assert "Rank(s) 1 did not enter it" in text
    text = explain(raised, {0: answer, 1: answer})
    assert "All ranks have issued it: they may differ" in text and "in broadcast of 4 bytes" in text


def a_rank_that_computes_between_messages(rank, n):
    import time

    dsx_comm.explain_hangs(limit=1.0, notice=0.5)
    dsx_comm.barrier()
    tensor = torch.ones(4)
    if rank == 0:
        for _ in range(3):  # more calls than the other rank makes
            dsx_comm.isend(tensor, 1)
        time.sleep(4.5)
    try:
        for _ in range(4 if rank else 1):
            dsx_comm.recv(tensor, 1 - rank)
    except dsx_comm.errors.HangError as error:
        return str(error), error.ranks
    finally:
        time.sleep(0 if rank == 0 else 5.0)  # the process that was right to give up is still there
    return None


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_who_lets_the_others_wait_for_a_message_is_named_on_all_ranks(backend):
    first, second = run_ranks(a_rank_that_computes_between_messages, 2, backend=backend)
    assert first == second
    text, ranks = first
    assert ranks == (0,) and "Rank(s) 0 neither sent nor received meanwhile" in text
    assert "rank 0: in no communication" in text and "in a_rank_that_computes_between_messages" in text


def where_no_thread_can_be_started(rank, n):
    import threading

    from dsx_comm.hang import WATCH

    start = threading.Thread.start

    def fails(thread):
        raise RuntimeError("can't start new thread")

    WATCH.poke()
    threading.Thread.start = fails
    for _ in range(2):
        with pytest.raises(dsx_comm.CommError, match=r"the thread that explains hangs cannot be started .*ulimit -u"):
            dsx_comm.all_reduce(torch.ones(4))
    threading.Thread.start = start
    tensor = torch.ones(4)
    dsx_comm.all_reduce(tensor)
    assert WATCH._thread.is_alive()
    return tensor.tolist()


def test_a_watching_thread_that_cannot_start_is_a_named_error():
    assert run_ranks(where_no_thread_can_be_started, 2, backend="gloo") == [[2.0] * 4] * 2


def in_a_child_of_a_rank(rank, n):
    import os
    import threading

    from dsx_comm.hang import WATCH

    def looking():
        return [t.name for t in threading.enumerate() if t.name == "dsx-comm-watch"]

    dsx_comm.barrier()
    assert looking()
    child = os.fork()
    if child == 0:  # only the thread that forks is there: the next call has to start the other one again
        before = looking()
        WATCH.arm()
        os._exit(0 if looking() and not before else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_looks_for_itself():
    run_ranks(in_a_child_of_a_rank, 2)


LAST = """
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("dsx")], flush=True))
import dsx_comm
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
dsx_comm.barrier()
assert any(t.name == "dsx-comm-watch" for t in threading.enumerate())
"""


def test_a_process_ends_without_the_watching_thread(tmp_path):
    """A thread that returns from the store's C++ code into an ending interpreter would abort the process.

    A barrier has no tensor: Gloo's own thread frees a tensor after the caller has gone on, and aborts the process if
    the interpreter is ending by then. Plain torch does the same, so it would hide what is tested here.
    """
    command = [sys.executable, "-W", "ignore", "-c", LAST, str(tmp_path / "store")]
    jobs = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(2)]
    try:
        said = [job.communicate(timeout=60)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0]
    assert said == ["[]\n", "[]\n"]
