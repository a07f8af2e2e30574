"""The all-gather in rounds: every rank hears every other one, after as many messages as 2 has to be doubled."""

import math
import threading
from collections import defaultdict
from queue import SimpleQueue

import dsx_comm
import pytest
import torch
from dsx_comm.doubling import fill_in_rounds, rounds
from dsx_comm.shm import native
from dsx_testkit import run_ranks


class Sent:
    def wait(self):
        """It is in its queue."""


class Received:
    def __init__(self, into, queue):
        self.into, self.queue = into, queue

    def wait(self):
        self.into.copy_(self.queue.get(timeout=20))


class Recorded:
    """Ranks as threads: sends and receives by queues, with a record of who talks to whom."""

    def __init__(self):
        self.queues, self.sent = defaultdict(SimpleQueue), defaultdict(list)

    def of(self, rank):
        def start(tensor, peer, sending):
            if sending:
                self.sent[rank].append((peer, len(tensor)))
                self.queues[rank, peer].put(tensor.clone())
                return Sent()
            return Received(tensor, self.queues[peer, rank])

        return start


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 100])
def test_every_rank_hears_every_other_one(size):
    recorded, outputs = Recorded(), [torch.full((size, 3), -1) for _ in range(size)]
    for rank in range(size):  # made here: threads make a key only once
        for distance, _ in rounds(size):
            recorded.queues[rank, (rank - distance) % size]
    ranks = [
        threading.Thread(target=fill_in_rounds, args=(outputs[r], torch.arange(3) + 10 * r, r, size, recorded.of(r)))
        for r in range(size)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    want = torch.arange(3) + 10 * torch.arange(size)[:, None]
    assert all(torch.equal(out, want) for out in outputs)
    messages = math.ceil(math.log2(size))
    assert all(len(recorded.sent[rank]) == messages for rank in range(size))
    assert all(sum(blocks for _, blocks in recorded.sent[rank]) == size - 1 for rank in range(size))


def test_a_thousand_ranks_take_ten_messages():
    found = list(rounds(1000))
    assert len(found) == 10 and sum(blocks for _, blocks in found) == 999
    assert found[0] == (1, 1) and found[-1] == (512, 488)
    assert list(rounds(1)) == []


def gathers(rank, world):
    lane, outputs, handles = dsx_comm.StepLane(), [], []
    for call in range(4):
        mine = torch.arange(5, dtype=torch.int64) + 100 * rank + 1000 * call
        outputs.append(torch.empty(world * 5, dtype=torch.int64))
        handles.append(dsx_comm.all_gather_in_rounds(outputs[-1], mine, async_op=True, lane=lane))
        total = torch.ones(())
        dsx_comm.all_reduce(total)  # beside it, on the same group
        assert total.item() == world
    for call in range(4) if rank % 2 else reversed(range(4)):
        handles[call].wait()
        want = torch.cat([torch.arange(5) + 100 * r + 1000 * call for r in range(world)])
        assert torch.equal(outputs[call], want)
    last = torch.empty(world, dtype=torch.int64)
    with dsx_comm.count_traffic() as traffic:
        assert dsx_comm.all_gather_in_rounds(last, torch.tensor([rank]), lane=lane) is None
    assert last.tolist() == list(range(world))
    assert traffic.by_op() == {"all_gather_in_rounds": (1, 8 * (world - 1))}
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="group size"):
        dsx_comm.all_gather_in_rounds(last[:-1], torch.tensor([rank]), lane=lane)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_on_processes(world):
    run_ranks(gathers, world)


def refused(rank, world):
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="expected gloo"):
        dsx_comm.all_gather_in_rounds(torch.empty(2), torch.ones(1), lane=dsx_comm.StepLane())


@pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
def test_another_backend_is_refused():
    run_ranks(refused, 2, backend="dsx")
