"""Over the "dsx" backend shards and gradient buffers lie in memory that the ranks share: the same training, the same bytes, nothing left."""

from __future__ import annotations

import os

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks
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


def shared_buffers(optimizer, stage):
    """Which of the buffers that the stage communicates lie in shared memory."""
    run = optimizer.runtime
    groups = [g for unit in run.units for g in unit.groups if g.layout.numel]
    found = {"shards": [g.shard for g in groups]}
    if stage < 2:
        found["gradients"] = [run.gradients._of[g].buffer for g in groups]
    gathers = {0: None, 1: None, 2: None, 3: "any"}[stage]
    return {name: [_shared(t, gathers) for t in tensors] for name, tensors in found.items()}


def _shared(tensor, gathers):
    import torch.distributed as dist

    known = [g for g in dist.distributed_c10d._world.pg_map if isinstance(g, dsx_comm.ShmProcessGroup)]
    return any(dsx_comm.is_symmetric(tensor, g) for g in (known if gathers else [None]))


def same_training(rank, world, stage):
    for dtype in (torch.float32, torch.bfloat16):
        ours, held, optimizer = train(rank, world, stage, dtype, None)
        gloo = dsx_comm.new_group(list(range(world)), backend="gloo")
        theirs, expected, other = train(rank, world, stage, dtype, gloo)
        for a, b in zip(ours, theirs):
            if world == 2:  # a sum of two has one order
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-5)
        assert held == expected
        shared = shared_buffers(optimizer, stage)
        assert all(all(flags) == (stage > 0) for flags in shared.values()), shared
        assert not any(any(flags) for flags in shared_buffers(other, stage).values())


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
    during = mapped()
    del kept
    gc.collect()
    dsx_comm.barrier()
    return before, during, mapped()


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_goes_with_the_model_and_the_optimizer(stage):
    shm = set(os.listdir("/dev/shm"))
    for before, during, after in run_ranks(released, 2, stage, backend="dsx"):
        assert before == 0 and during >= 2 and after == 0
    assert set(os.listdir("/dev/shm")) == shm


def refused(rank, world):
    import resource

    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    values, _, optimizer = train(rank, world, 1, torch.float32, None)
    assert not any(shared_buffers(optimizer, 1)["shards"])
    return [v.sum().item() for v in values]


def test_without_enough_shared_memory_ordinary_memory_serves_all():
    rows = run_ranks(refused, 2, backend="dsx")
    assert rows[0] == rows[1]
