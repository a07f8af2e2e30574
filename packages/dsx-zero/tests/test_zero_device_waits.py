"""Reductions and gathers on a device leave the host alone: no wait of theirs has a timeout, for which torch blocks the
host.

There is no device here: tensors are on "meta", torch's functions hand out works that record how they were waited for.
"""

from functools import partial
from types import SimpleNamespace

import dsx_zero.gather.publishing
import pytest
import torch
import torch.distributed as dist
from dsx_comm.lanes import HostLane
from dsx_testkit import run_ranks
from dsx_zero.grads.reductions import Reducer
from dsx_zero.transports.chosen import PlainTransports


class RecordingWork:
    def __init__(self):
        self.waits = []

    def wait(self, *arguments):
        self.waits.append(arguments)
        return True

    def is_completed(self):
        return False


class Group:
    """What transports and publishers know of a flat group."""

    def __init__(self, buffer, ranks):
        self.visible, self.ranks = buffer, ranks
        self.layout = SimpleNamespace(numel=8)
        self.key = SimpleNamespace(dtype=buffer.dtype, device=buffer.device)

    def shard_of(self, whole):
        return whole[:4]


def waits(rank, n):
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers a backend that moves nothing

    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    import dsx_comm
    from dsx_comm import RankSet

    dsx_comm.check_first_calls(0)
    works = []

    def issue(*args, **kwargs):
        works.append(RecordingWork())
        return works[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor"):
            patch.setattr(dist, name, issue, raising=False)
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            patch.setattr(dist, name, issue, raising=False)
        group, buffer = dist.group.WORLD, torch.ones(8, device="meta")
        for bucket in (1000, 4):  # in one message, and in pieces
            gathering = dsx_zero.gather.publishing.Gathering(bucket)
            flat = Group(buffer, RankSet.over(group))
            for wire, add in ((torch.float32, False), (torch.bfloat16, True)):

                def engine(scatters, wire=wire, bucket=bucket):
                    make = partial(PlainTransports(lambda dtype: wire, bucket).reduce, scatters=scatters)
                    return Reducer(flat.ranks, dsx_zero.Reduction(), make, HostLane())

                engine(False).all_reduce(buffer, flat, "test").finish()
                out = torch.ones(4, device="meta")
                engine(True).reduce_scatter(buffer, out, flat, "test", add=add).finish()
            gathering.publish(SimpleNamespace(plan="unit 0", trainable=[flat]))
            gathering.finish()
    assert len(works) >= 10 and all(work.waits == [()] for work in works), [work.waits for work in works]


def test_no_wait_has_a_timeout():
    run_ranks(waits, 1, backend=None)
