"""Asynchronous sparse reductions: both messages go on beside the caller, in the order of calls, with the results of
synchronous ones.
"""

import threading

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def draw(rank, call, dtype=torch.float32):
    """Rows of a table of 50 by 4; other numbers of them on every rank, and none on some."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    entries = (3 * call + 5 * rank) % 17
    places = torch.randint(0, 50, (1, entries), generator=generator)
    return torch.sparse_coo_tensor(places, torch.randn(entries, 4, generator=generator).to(dtype), (50, 4))


def together(rank, world, calls):
    group = dsx_comm.new_group(list(range(world)))
    lane = dsx_comm.StepLane()
    for op in (dsx_comm.ReduceOp.SUM, dsx_comm.ReduceOp.AVG):
        for dtype in (torch.float32, torch.bfloat16):
            with dsx_comm.count_traffic() as traffic:
                wanted = [dsx_comm.sparse_allreduce(draw(rank, call, dtype), op) for call in range(calls)]
            with dsx_comm.count_traffic() as overlapped:
                works = [
                    dsx_comm.sparse_allreduce(draw(rank, call, dtype), op, group, async_op=True, lane=lane)
                    for call in range(calls)
                ]
                # one that is not asynchronous takes its turn behind them
                last = dsx_comm.sparse_allreduce(draw(rank, 0, dtype), op, group, lane=lane)
                assert torch.equal(last.to_dense(), wanted[0].to_dense())
                for call in range(calls) if rank % 2 else reversed(range(calls)):
                    assert works[call].wait() and works[call].is_completed()
                    found = works[call].result()
                    assert found.is_coalesced() and found.dtype == dtype
                    assert torch.equal(found.to_dense(), wanted[call].to_dense())
            assert overlapped.calls() == traffic.calls() + (world > 1)
            more = traffic.sent_bytes() / calls if calls == 1 else None
            assert more is None or overlapped.sent_bytes() == 2 * more


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize(("world", "calls"), [(1, 2), (2, 1), (3, 5)])
def test_several_in_flight_give_what_synchronous_calls_give(world, calls, backend):
    run_ranks(together, world, calls, backend=backend)


def by_itself(rank, world):
    """The call returns before others have called, and the result comes though nobody asks."""
    group, lane, done = dsx_comm.new_group(list(range(world))), dsx_comm.StepLane(), threading.Event()
    wanted = dsx_comm.sparse_allreduce(draw(rank, 1))
    if rank:
        dsx_comm.barrier()  # rank 0 comes here after its call, which so far nobody answers
    work = dsx_comm.sparse_allreduce(draw(rank, 1), group=group, async_op=True, lane=lane)
    if not rank:
        assert not work.is_completed()
        dsx_comm.barrier()
    work.on_arrival(done.set)
    assert done.wait(20), "the second message was never sent"
    assert torch.equal(work.result().to_dense(), wanted.to_dense())


def test_the_second_message_needs_no_wait():
    run_ranks(by_itself, 2)


def labelled(rank, world):
    """What happens in the thread is on behalf of whom the caller acted."""
    from dsx_comm import sparse
    from dsx_comm.hang import WATCH

    seen, plain = [], sparse._counts
    sparse._counts = lambda *arguments: seen.append((WATCH.label(), threading.current_thread())) or plain(*arguments)
    group, lane = dsx_comm.new_group(list(range(world))), dsx_comm.StepLane()
    with dsx_comm.unit("the table"):
        work = dsx_comm.sparse_allreduce(draw(rank, 1), group=group, async_op=True, lane=lane)
    work.wait()
    assert [label for label, _ in seen] == ["the table"] and seen[0][1] is not threading.main_thread()


def test_a_hang_would_be_explained_with_the_callers_label():
    run_ranks(labelled, 2)


def refused(rank, world):
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"lane=dsx_comm\.StepLane\(\)"):
        dsx_comm.sparse_allreduce(draw(rank, 1), async_op=True)
    group, lane = dsx_comm.new_group(list(range(world))), dsx_comm.StepLane()
    mine = torch.ones(3 + rank).to_sparse()
    work = dsx_comm.sparse_allreduce(mine, group=group, async_op=True, lane=lane)
    for use in (work.wait, work.result):
        with pytest.raises(dsx_comm.errors.MismatchError, match=rf"rank\(s\) {rank} have"):
            use()
    # the lane goes on
    again = dsx_comm.sparse_allreduce(torch.ones(3).to_sparse(), group=group, async_op=True, lane=lane)
    assert again.result().to_dense().eq(world).all()


def test_mistakes_are_raised_where_somebody_waits():
    run_ranks(refused, 2)
