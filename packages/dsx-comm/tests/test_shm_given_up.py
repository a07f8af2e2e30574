"""Sends and receives whose wait has failed give the caller's memory back, and leave the two sides in step."""

import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
NUMEL = 300_000  # more than a mailbox holds


def given_up_receive(rank, n):
    import datetime

    import dsx_comm
    import torch.distributed as dist

    lost, got = torch.zeros(NUMEL), torch.zeros(NUMEL)
    if rank == 0:
        work = dist.irecv(lost, 1)
        with pytest.raises(dsx_comm.errors.CollectiveTimeoutError, match="recv from rank 1"):
            work.wait(datetime.timedelta(seconds=0.2))
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(NUMEL), 0)
    else:
        dist.recv(got, 1)
    dist.barrier()
    return lost.abs().sum().item(), got.sum().item()


@needs_native
def test_a_receive_that_was_given_up_takes_nothing_and_writes_nowhere():
    lost, got = run_ranks(given_up_receive, 2, backend="dsx", timeout=60)[0]
    assert lost == 0.0, "data arrived in memory whose owner was told that it would not"
    assert got == NUMEL


def given_up_sends(rank, n):
    import datetime

    import dsx_comm
    import torch.distributed as dist

    if rank == 0:
        half, behind = torch.ones(NUMEL), torch.full((4,), 2.0)
        works = [dist.isend(half, 1), dist.isend(behind, 1)]  # the first fills the mailbox, the second cannot begin
        for work in works:
            with pytest.raises(dsx_comm.errors.CollectiveTimeoutError, match="send to rank 1"):
                work.wait(datetime.timedelta(seconds=0.2))
        half.fill_(7.0)
        behind.fill_(7.0)
        dist.barrier()
        dist.send(torch.full((4,), 3.0), 1)
        return None
    dist.barrier()
    first, second = torch.zeros(NUMEL), torch.zeros(4)
    dist.recv(first, 0)
    dist.recv(second, 0)
    return first.unique().tolist(), second.tolist()


@needs_native
def test_a_send_that_was_given_up_half_way_ends_as_it_began():
    first, second = run_ranks(given_up_sends, 2, backend="dsx", timeout=60)[1]
    assert first == [1.0], "the message was finished from memory that its owner had changed since"
    assert second == [3.0] * 4, "a send that had not begun was called off"
