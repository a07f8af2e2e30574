"""A device's work is never waited for with a timeout (torch would block the host): the watching thread looks at it
instead.

There is no device here. Tensors are on "meta", torch's functions hand out works that record how they were waited for.
"""

import gc
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta

import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks

NAMES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "isend",
    "irecv",
    "barrier",
    "batch_isend_irecv",
]


class RecordingWork:
    """What a backend would return; `waits` are the arguments of each wait."""

    def __init__(self, completed=True):
        self.waits, self.completed = [], completed

    def wait(self, *arguments):
        self.waits.append(arguments)
        return True

    def is_completed(self):
        return self.completed


@contextmanager
def recording(completed=True):
    """Inside, torch's functions do nothing and return works, which are collected."""
    works = []

    def issue(*args, **kwargs):
        works.append(RecordingWork(completed))
        return works[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            if hasattr(dist, name):
                patch.setattr(dist, name, issue)
        patch.setattr(dist, "batch_isend_irecv", lambda ops: [issue() for _ in ops])
        patch.setattr(dist, "P2POp", lambda *args: args)  # torch's own knows its isend and irecv
        yield works


def begin():
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers a backend that moves nothing

    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    dsx_comm.check_first_calls(0)


def calls(device):
    whole, part = torch.ones(8, device=device), torch.ones(4, device=device)
    other = torch.ones(8, device=device)
    return [
        lambda **k: dsx_comm.all_reduce(whole, **k),
        lambda **k: dsx_comm.all_reduce(whole, dsx_comm.ReduceOp.AVG, **k),
        lambda **k: dsx_comm.reduce(whole, 0, **k),
        lambda **k: dsx_comm.broadcast(whole, 0, **k),
        lambda **k: dsx_comm.all_gather([part.clone(), part.clone()], part, **k),
        lambda **k: dsx_comm.all_gather_into_tensor(whole, part, **k),
        lambda **k: dsx_comm.reduce_scatter_tensor(part, whole, **k),
        lambda **k: dsx_comm.all_to_all_single(other, whole, **k),
        lambda **k: dsx_comm.all_reduce_coalesced([whole, part], **k),
        lambda **k: dsx_comm.all_gather_coalesced([whole], [part], **k),
    ]


def no_limits(rank, n, limit):
    begin()
    if limit is not None:
        dsx_comm.explain_hangs(limit=limit)
    with recording() as works:
        for call in calls("meta"):
            call()
            call(async_op=True).wait()
        tensor = torch.ones(4, device="meta")
        dsx_comm.isend(tensor, 1).wait()
        dsx_comm.recv(tensor, 1)
        for handle in dsx_comm.batch_isend_irecv([dsx_comm.P2POp(dsx_comm.isend, tensor, 1)] * 2):
            handle.wait()
        assert len(works) >= 24
        assert all(work.waits == [()] for work in works), [work.waits for work in works]


@pytest.mark.parametrize("limit", [None, 30.0], ids=["by default", "with a limit set"])
def test_a_device_is_waited_for_without_a_timeout(limit):
    run_ranks(no_limits, 1, limit, backend=None)


def host_limits(rank, n):
    begin()
    with recording() as works:
        for call in calls("cpu"):
            call()
            call(async_op=True).wait()
        limit = (
            timedelta(seconds=553),
        )  # nine tenths of ten minutes, two looks of five seconds, and time for a report
        assert works and all(work.waits == [limit] for work in works), [work.waits for work in works]


def test_waits_of_the_host_end():
    run_ranks(host_limits, 1, backend=None)


def hanging(rank, n):
    begin()
    dsx_comm.explain_hangs(limit=0.6, notice=0.3)
    with recording(completed=False) as works:
        with dsx_comm.unit("layers.3"):
            dsx_comm.all_reduce(torch.ones(256, device="meta"), async_op=True).wait()
        time.sleep(2.5)  # the host goes on
        held = weakref.ref(works[0])
        works[0].completed = True
        works.clear()
        time.sleep(0.5)
        gc.collect()
        assert held() is None, "a work that has completed must not be kept"


def test_a_work_that_does_not_complete_is_reported(capfd):
    run_ranks(hanging, 1, backend=None)
    said = capfd.readouterr()
    text = said.out + said.err
    assert "all_reduce of 1024 bytes (call #1 of group" in text
    assert "for layers.3" in text and "at" in text and "in hanging" in text


def nothing_to_report(rank, n):
    begin()
    dsx_comm.explain_hangs(limit=0.6, notice=0.3)
    with recording() as works:
        for _ in range(3):
            dsx_comm.all_reduce(torch.ones(256, device="meta"))
        held = weakref.ref(works[0])
        works.clear()
        time.sleep(1.5)
        gc.collect()
        assert held() is None


def test_a_work_that_completes_is_not(capfd):
    run_ranks(nothing_to_report, 1, backend=None)
    said = capfd.readouterr()
    assert "has waited" not in said.out + said.err


def own_limit(rank, n):
    begin()
    with recording(completed=False) as works:
        handle = dsx_comm.all_reduce(torch.ones(4, device="meta"), async_op=True)
        with pytest.raises(dsx_comm.errors.CollectiveTimeoutError, match=r"all_reduce of 16 bytes.*0\.05 s"):
            handle.wait(timedelta(seconds=0.05))
        assert works[0].waits == [] and not handle.is_completed()
        works[0].completed = True
        assert handle.wait(timedelta(seconds=5)) and handle.is_completed()
        assert works[0].waits == [()]


def test_a_callers_own_limit_ends_his_wait_and_not_the_call():
    run_ranks(own_limit, 1, backend=None)
