"""A rehearsal: one process as one rank of many, without the others."""

import os

import dsx_comm
import pytest
import torch
import torch.distributed as dist


class Watch(dsx_comm.RehearsalObserver):
    def __init__(self):
        self.messages, self.done = [], []

    def issued(self, message):
        self.messages.append(message)
        return len(self.messages) - 1

    def waited(self, token):
        self.done.append(token)


def test_collectives_as_equal_ranks_would_have_them():
    with dsx_comm.rehearse(4, 2, ranks_per_host=2):
        assert (dsx_comm.get_rank(), dsx_comm.get_world_size(), dsx_comm.get_local_rank()) == (2, 4, 0)
        x = torch.tensor([1.0, 2.0])
        dsx_comm.all_reduce(x)
        assert x.tolist() == [4.0, 8.0]
        dsx_comm.all_reduce(x, op=dsx_comm.ReduceOp.AVG)
        dsx_comm.all_reduce(x, op=dsx_comm.ReduceOp.MAX)
        assert x.tolist() == [4.0, 8.0]
        out = torch.empty(8)
        dsx_comm.all_gather_into_tensor(out, x)
        assert out.tolist() == [4.0, 8.0] * 4
        part = torch.empty(2)
        dsx_comm.reduce_scatter_tensor(part, torch.arange(8.0))
        assert part.tolist() == [16.0, 20.0]
        objects = [None] * 4
        dsx_comm.all_gather_object(objects, {"a": 1})
        assert objects == [{"a": 1}] * 4
        received = torch.empty(4)
        dsx_comm.all_to_all_single(received, torch.arange(4.0))
        assert received.tolist() == [2.0] * 4
        dsx_comm.broadcast(x, src=0)
        dsx_comm.barrier()
        pair = dsx_comm.new_group([2, 3], backend="gloo")
        y = torch.ones(1)
        dsx_comm.all_reduce(y, group=pair)
        assert y.item() == 2.0 and dsx_comm.get_world_size(pair) == 2
        assert dsx_comm.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER


def test_bytes_are_those_that_are_counted():
    watch = Watch()
    with dsx_comm.rehearse(3, observer=watch), dsx_comm.count_traffic() as traffic:
        handle = dsx_comm.all_reduce(torch.ones(10), async_op=True)
        assert not handle.is_completed() and watch.done == []
        handle.wait()
        assert watch.done == [0]
        dsx_comm.all_gather_into_tensor(torch.empty(30), torch.ones(10))
        dsx_comm.reduce_scatter_tensor(torch.empty(10), torch.ones(30))
        dsx_comm.all_to_all_single(torch.empty(9), torch.ones(9))
        sent = dsx_comm.isend(torch.ones(5), 1)
        assert sent.is_completed() and watch.done == list(range(4)), "it has left, and nobody has waited"
        sent.wait()
        assert watch.done == list(range(4))
        dsx_comm.isend(torch.ones(5), 1).wait()
        dsx_comm.irecv(torch.ones(5), 2).wait()
    assert sum(message.sent for message in watch.messages) == pytest.approx(traffic.sent_bytes())
    assert [message.op for message in watch.messages] == [
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send", "recv",
    ]  # fmt: skip
    assert sorted(watch.done) == [0, 1, 2, 3, 5, 6]


def test_nothing_is_left():
    before = dict(os.environ)
    for size in (1, 1024, 2):
        with dsx_comm.rehearse(size, size - 1):
            assert os.environ["WORLD_SIZE"] == str(size)
            assert dsx_comm.parallel_groups.get_data_parallel_world_size() == size
        assert not dist.is_initialized() and dict(os.environ) == before
    with pytest.raises(RuntimeError, match="inside"), dsx_comm.rehearse(2):
        raise RuntimeError("inside")
    assert not dist.is_initialized() and dict(os.environ) == before
    dsx_comm.init_distributed(verbose=False)
    try:
        with pytest.raises(dsx_comm.CommError, match="process group already"), dsx_comm.rehearse(2):
            pass
        assert dist.is_initialized()
    finally:
        dsx_comm.destroy_process_group()


@pytest.mark.parametrize(("size", "rank", "local"), [(0, 0, None), (4, 4, None), (4, 0, 3), (4, 0, 0)])
def test_numbers_that_do_not_fit(size, rank, local):
    with (
        pytest.raises(dsx_comm.errors.CommArgumentError, match="rehearse"),
        dsx_comm.rehearse(size, rank, ranks_per_host=local),
    ):
        pass
