"""Reductions and gathers on a device leave the host alone: no wait of theirs has a timeout, for which torch blocks the
host.

There is no device here: tensors are on "meta", torch's functions hand out works that record how they were waited for.
"""

from types import SimpleNamespace

import dsx_zero.gather.publishing
import dsx_zero.grads.reduction
import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks


class RecordingWork:
    def __init__(self):
        self.waits = []

    def wait(self, *arguments):
        self.waits.append(arguments)
        return True

    def is_completed(self):
        return False


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
            reducer = dsx_zero.grads.reduction.Reducer(RankSet.over(group), dsx_zero.Reduction(), bucket)
            reducer.all_reduce(buffer, torch.float32).finish()
            reducer.all_reduce(buffer, torch.bfloat16).finish()
            reducer.reduce_scatter(buffer, torch.ones(4, device="meta"), torch.float32, add=False).finish()
            reducer.reduce_scatter(buffer, torch.ones(4, device="meta"), torch.bfloat16, add=True).finish()
            gathering = dsx_zero.gather.publishing.Gathering(bucket)
            flat = SimpleNamespace(
                visible=buffer,
                shard_of=lambda whole: whole[:4],
                layout=SimpleNamespace(numel=8),
                ranks=RankSet.over(group),
            )
            gathering.publish(SimpleNamespace(plan="unit 0", trainable=[flat]))
            gathering.finish()
    assert len(works) >= 10 and all(work.waits == [()] for work in works), [work.waits for work in works]


def test_no_wait_has_a_timeout():
    run_ranks(waits, 1, backend=None)
