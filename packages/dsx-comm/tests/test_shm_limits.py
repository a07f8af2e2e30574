"""Under a limit that forbids new threads, calls in shared memory are done by those who wait for them."""

import sys

import dsx_comm
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux bounds address space"),
]


def limited(rank, n):
    import resource

    tensor, large = torch.full((1000,), rank + 1.0), torch.full((300_000,), rank + 1.0)
    got = torch.empty_like(large)
    dsx_comm.all_reduce(torch.ones(10))  # the group's memory and the explainer's thread are there
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    # Less than the stack of a thread.
    resource.setrlimit(resource.RLIMIT_AS, (4096 * pages + (2 << 20), before[1]))
    try:
        handles = [dsx_comm.all_reduce(tensor, async_op=True) for _ in range(3)]
        handles += [dsx_comm.isend(large, 1 - rank), dsx_comm.irecv(got, 1 - rank)]
        for handle in handles:
            handle.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    dsx_comm.all_reduce(tensor, async_op=True).wait()  # now there is a thread
    return tensor.unique().tolist(), got.unique().tolist()


def test_asynchronous_calls_where_no_thread_can_be_started():
    for rank, found in enumerate(run_ranks(limited, 2, backend="dsx")):
        assert found == ([24.0], [2.0 - rank])
