"""Observers of waits hear how long a rank stood still for the others, in synchronous calls and in handles."""

import time

import pytest
from dsx_testkit import run_ranks


class Waits:
    def __init__(self):
        self.seconds, self.count, self.depth = 0.0, 0, 0

    def begin_wait(self):
        self.depth += 1
        return time.perf_counter()

    def end_wait(self, started):
        self.depth -= 1
        self.count += 1
        if self.depth == 0:
            self.seconds += time.perf_counter() - started


def meet(rank, world, asynchronous):
    import dsx_comm
    import torch

    tensor = torch.ones(4)
    dsx_comm.all_reduce(tensor)  # connections are made in the first call
    waits = Waits()
    stop = dsx_comm.observe(waits)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("set out", "1")
    else:  # half a second after rank 0 has set out, however busy the machine is
        store.wait(["set out"])
        time.sleep(0.5)
    if asynchronous:
        dsx_comm.all_reduce(tensor, async_op=True).wait()
    else:
        dsx_comm.all_reduce(tensor)
    stop()
    heard = waits.count
    dsx_comm.all_reduce(tensor)
    assert waits.count == heard > 0 and waits.depth == 0
    return waits.seconds


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_punctual_rank_waited_for_the_late_one(asynchronous):
    punctual, late = run_ranks(meet, 2, asynchronous)
    assert punctual > 0.1 and punctual > late


def test_a_wait_that_fails_ends_too():
    from dsx_comm import observe
    from dsx_comm.calls import waiting

    waits = Waits()
    stop = observe(waits)
    with pytest.raises(KeyError):
        waiting(lambda: {}["missing"])
    stop()
    assert (waits.count, waits.depth) == (1, 0)
