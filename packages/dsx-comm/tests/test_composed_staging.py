"""What a composed reduction takes beside its tensors, by `staging` and by PyTorch's allocator."""

import dsx_comm
import pytest
import torch
from dsx_comm.composed import staging
from dsx_testkit import run_ranks
from dsx_testkit.allocated import count_allocations, most_allocated

FLOAT, LOW = torch.float32, torch.bfloat16
CASES = {
    "reduce_scatter": ("reduce_scatter", FLOAT, 120_000),
    "reduce_scatter, 16 bits": ("reduce_scatter", LOW, 120_000),
    "reduce_scatter, 16 bits, in blocks": ("reduce_scatter", LOW, 1_200_000),
    "reduce_scatter, small": ("reduce_scatter", FLOAT, 12_000),
    "all_reduce, 16 bits": ("all_reduce", LOW, 120_000),
}


def taken(rank, world):
    count_allocations()
    found = {}
    for name, (op, dtype, numel) in CASES.items():
        whole, part = torch.ones(numel, dtype=dtype), torch.empty(numel // world, dtype=dtype)
        with most_allocated() as memory:
            if op == "all_reduce":
                dsx_comm.all_reduce(whole)
            else:
                dsx_comm.reduce_scatter_tensor(part, whole)
        found[name] = memory.most - memory.first
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_staging_is_what_the_allocator_gives(world):
    real = run_ranks(taken, world, backend="gloo")
    for name, (op, dtype, numel) in CASES.items():
        element = dtype.itemsize
        received = numel // world * element * (world - 1) * (2 if op == "all_reduce" else 1)
        arriving, at_end = staging(op, received, element, world)
        for rank in real:
            assert rank[name] == pytest.approx(arriving + at_end, abs=8192), (name, world)


def test_what_takes_nothing():
    assert staging("all_reduce", 1 << 20, 4, 2) == (0, 0)  # gloo's own
    assert staging("all_gather", 1 << 20, 4, 2) == (0, 0)
    assert staging("reduce_scatter", 1 << 20, 4, 1) == (0, 0)
    assert staging("reduce_scatter", 31 * 8192, 4, 32) == (0, 0)  # many ranks, small parts: gloo's own
