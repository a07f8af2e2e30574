"""Over the "dsx" backend shards and gradient buffers lie in memory that the ranks share: the same training, the same
bytes, nothing left.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_comm.shm import native
from dsx_comm.shm.process_group import ShmProcessGroup
from dsx_testkit import run_ranks
from dsx_testkit.leftovers import segments_of
from torch import nn

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}"),
]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(37, 50), nn.GELU(), nn.Linear(50, 37)) for _ in range(3))
        self.head = nn.Linear(37, 5)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(rank, world, stage, dtype, group):
    """Four steps, two backwards each; (parameters, bytes held, optimizer)."""
    model, optimizer = dsx_zero.shard(
        Blocks().to(dtype),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        stage=stage,
        process_group=group,
        config={"stage3_param_persistence_threshold": 40},
    )
    for step in range(4):
        for micro in range(2):
            x = torch.randn(3, 37, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)).to(dtype)
            model(x).float().square().mean().backward()
        held = optimizer.state_bytes()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
    return values, held, optimizer


def shared_shards(optimizer):
    """Which of the shards lie in memory that a group of this job shares."""
    import torch.distributed as dist

    groups = [g for g in dist.distributed_c10d._world.pg_map if isinstance(g, ShmProcessGroup)]
    shards = [g.shard.view() for unit in optimizer.runtime.units for g in unit.groups if g.layout.numel]
    return [any(dsx_comm.is_symmetric(shard, group) for group in groups) for shard in shards]


@contextmanager
def reductions():
    """For each reduction of gradients inside: does what it reduces lie in shared memory?"""
    found = []

    def watched(function, argument):
        def call(*args, group=None, **kwargs):
            found.append(dsx_comm.is_symmetric(args[argument], group))
            return function(*args, group=group, **kwargs)

        return call

    start = dsx_comm.PreparedCollective.start

    def watched_start(self, output, source):
        if self._call.op == "reduce_scatter_tensor":
            found.append(dsx_comm.is_symmetric(source, self._call.group))
        return start(self, output, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsx_comm, "all_reduce", watched(dsx_comm.all_reduce, 0))
        patch.setattr(dsx_comm.PreparedCollective, "start", watched_start)
        yield found


def gradient_bytes(optimizer):
    """Of all whole gradients, in pages."""
    groups = [g for unit in optimizer.runtime.units for g in unit.trainable]
    return sum(dsx_comm.SymmetricArena.space(g.layout.numel * g.key.dtype.itemsize) for g in groups)


def same_training(rank, world, stage):
    for dtype in (torch.float32, torch.bfloat16):
        with reductions() as reduced:
            ours, held, optimizer = train(rank, world, stage, dtype, None)
        gloo = dsx_comm.new_group(list(range(world)), backend="gloo")
        with reductions() as reduced_by_gloo:
            theirs, expected, other = train(rank, world, stage, dtype, gloo)
        for a, b in zip(ours, theirs):
            if world == 2:  # a sum of two has one order
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-5)
        buffers = held.pop("buffers")  # pages of the arena stay between backwards, those of ordinary buffers do not
        assert expected.pop("buffers") == 0 and held == expected
        assert (0 < buffers <= gradient_bytes(optimizer)) if stage >= 2 else buffers == 0
        units = len([unit for unit in optimizer.runtime.units if unit.trainable])
        assert sum(reduced) >= 4 * 2 * units  # the norm and the ranks' agreement are reduced too, in ordinary memory
        assert len(reduced) == len(reduced_by_gloo) and not any(reduced_by_gloo)
        assert all(flag == (stage > 0) for flag in shared_shards(optimizer))  # stage 0 gathers nothing
        assert not any(shared_shards(other))


@pytest.mark.parametrize("world, stages", [(2, (0, 1, 2, 3)), (3, (1, 3))])
def test_training_and_bytes_are_those_of_ordinary_memory(world, stages):
    for stage in stages:
        run_ranks(same_training, world, stage, backend="dsx")


def mapped():
    with open("/proc/self/maps") as f:
        return sum("dsx-comm-symmetric" in line for line in f)


def released(rank, world, stage):
    import gc

    before = mapped()
    kept = train(rank, world, stage, torch.float32, None)
    during, segments = mapped(), segments_of([os.getpid()])
    del kept
    gc.collect()
    dsx_comm.barrier()
    return before, during, mapped(), segments


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_goes_with_the_model_and_the_optimizer(stage):
    rows = run_ranks(released, 2, stage, backend="dsx")
    for before, during, after, _ in rows:
        assert before == 0 and during >= 2 and after == 0
    assert not [path for *_, segments in rows for path in segments if path.exists()]


def refused(rank, world):
    import resource

    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    values, _, optimizer = train(rank, world, 1, torch.float32, None)
    assert not any(shared_shards(optimizer))
    return [v.sum().item() for v in values]


def test_without_enough_shared_memory_ordinary_memory_serves_all():
    rows = run_ranks(refused, 2, backend="dsx")
    assert rows[0] == rows[1]


def set_aside(rank, world):
    model, optimizer = dsx_zero.shard(
        Blocks(), lambda p: torch.optim.SGD(p, lr=0.01), stage=0, reduction=dsx_zero.Reduction(op="sum")
    )
    with reductions() as shared:
        for _ in range(6):
            for _ in range(2):  # the second finds reduced values, which it must not reduce again
                model(torch.ones(2, 37)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(2, 37)).square().mean().backward()
            with optimizer.no_sync():
                model(torch.ones(2, 37)).square().mean().backward()
            optimizer.zero_grad()  # before what is new has been reduced
    units = [unit for unit in optimizer.runtime.units if unit.trainable]
    return sum(shared) / len(units)


def test_buffers_set_aside_come_back():
    assert run_ranks(set_aside, 2, backend="dsx") == [18, 18]


class Deep(nn.Module):
    """Eight blocks of a little more than 2^20 elements, so that each is a message of its own, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1031, 1031) for _ in range(8))
        self.head = nn.Linear(1031, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return self.head(x)


def kept_pages(rank, world, stage):
    model, optimizer = dsx_zero.shard(Deep(), lambda p: torch.optim.SGD(p, lr=0.01), stage=stage)
    found = []
    for step in range(4):
        with reductions() as shared:
            model(torch.ones(2, 1031)).square().mean().backward()
        found.append((optimizer.state_bytes()["buffers"], sum(shared)))
        optimizer.step()
        optimizer.zero_grad()
    return found, gradient_bytes(optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_buffers_of_a_few_units_stay_mapped(stage):
    for found, whole in run_ranks(kept_pages, 2, stage, backend="dsx"):
        for idle, shared in found:
            assert 0 < idle < 0.55 * whole  # four of nine: two on the wire, one being filled, the root's
            assert shared >= 9
