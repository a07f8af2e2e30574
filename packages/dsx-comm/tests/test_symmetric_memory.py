"""Tensors in symmetric memory: the same results as ordinary ones, read where they lie, and the rules of their use."""

import dsx_comm
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")


def same_results(rank, n):
    import torch.distributed as dist

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (1, 1000, 400_003):
            parts = [(torch.arange(n * numel) % 50 + r).to(dtype) for r in range(n)]
            total = torch.stack([p.double() for p in parts]).sum(0).to(dtype)
            shard = dsx_comm.empty(numel, dtype=dtype)
            assert dsx_comm.is_symmetric(shard) and shard.shape == (numel,) and shard.dtype == dtype
            shard.copy_(parts[rank][:numel])
            out = torch.empty(n * numel, dtype=dtype)
            dsx_comm.all_gather_into_tensor(out, shard)
            assert torch.equal(out, torch.cat([p[:numel] for p in parts]))
            whole = dsx_comm.empty((n, numel), dtype=dtype)
            whole.view(-1).copy_(parts[rank])
            result = torch.empty(numel, dtype=dtype)
            dsx_comm.reduce_scatter_tensor(result, whole)
            assert torch.equal(result, total.view(n, -1)[rank])
            assert torch.equal(whole.view(-1), parts[rank])  # only read
            works = [dist.all_reduce(whole, async_op=True)]
            works[0].wait()
            assert torch.equal(whole.view(-1), total)
            # in place: each rank's shard at another offset, the result over the peers' parts
            whole[rank].fill_(rank + 7)
            dsx_comm.all_gather_into_tensor(whole, whole[rank])
            assert torch.equal(whole, (torch.arange(n)[:, None] + 7).expand(n, numel).to(dtype))
            whole.view(-1).copy_(parts[rank])
            dsx_comm.barrier()
            dsx_comm.reduce_scatter_tensor(whole[rank], whole)
            assert torch.equal(whole[rank], total.view(n, -1)[rank])


@needs_native
@pytest.mark.parametrize("n", [2, 3])
def test_results_are_those_of_ordinary_tensors(n):
    run_ranks(same_results, n, backend="dsx")


def rules(rank, n):

    symmetric = dsx_comm.empty(100)
    with pytest.raises(dsx_comm.CommError, match="different sizes"):
        dsx_comm.empty(10_000 * (rank + 1))
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
        dsx_comm.empty(-1)
    assert dsx_comm.empty(0).numel() == 0
    sub = dsx_comm.new_group([0])
    if rank == 0:
        assert not dsx_comm.is_symmetric(dsx_comm.empty(4, group=sub), sub)  # alone: nobody to share with
        assert not dsx_comm.is_symmetric(symmetric, sub)  # belongs to another group
    view = symmetric[10:20]
    view.fill_(rank + 1.0)
    dsx_comm.all_reduce(view)
    assert torch.equal(view, torch.full((10,), 3.0))
    del symmetric, view
    dsx_comm.barrier()


@needs_native
def test_rules_of_symmetric_memory():
    run_ranks(rules, 2, backend="dsx")


def some_have_it(rank, n):
    """Symmetric memory on some ranks only, or different memory: slower, never wrong."""
    for numel in (8, 3000, 500_003):
        a, b = dsx_comm.empty(n, numel), dsx_comm.empty(n, numel)
        for who in range(n):
            for mine in (a if rank == who else torch.empty(n, numel), a if rank == who else b):
                for _ in range(2):
                    mine.copy_((torch.arange(float(numel)) + rank).expand(n, numel))
                    dsx_comm.barrier()
                    total = n * torch.arange(float(numel)) + sum(range(n))
                    result = torch.empty(numel)
                    dsx_comm.reduce_scatter_tensor(result, mine)
                    assert torch.equal(result, total), (numel, who)
                    out = torch.empty(n, numel)
                    dsx_comm.all_gather_into_tensor(out, mine[0])
                    assert torch.equal(out, torch.arange(float(numel)) + torch.arange(float(n))[:, None])
                    dsx_comm.all_reduce(mine)
                    assert torch.equal(mine, total.expand(n, numel))
                    dsx_comm.barrier()


@needs_native
def test_it_need_not_be_had_by_all():
    run_ranks(some_have_it, 3, backend="dsx")


def on_gloo(rank, n):

    tensor = dsx_comm.empty(3, 4, dtype=torch.float64)
    assert tensor.shape == (3, 4) and not dsx_comm.is_symmetric(tensor)
    dsx_comm.all_reduce(tensor.fill_(1.0))
    assert tensor[0, 0] == n


def test_other_groups_get_ordinary_tensors():
    run_ranks(on_gloo, 2)
