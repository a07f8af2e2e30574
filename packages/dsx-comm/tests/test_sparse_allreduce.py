"""Sparse gradients are reduced as entries: equal to the dense all-reduce, with the bytes the formula says."""

import dsx_comm
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

BACKENDS = ["gloo", pytest.param("dsx", marks=pytest.mark.skipif(native.module() is None, reason=native.reason()))]


def draw(rank, shape, entries, dense_dims, dtype):
    """A sparse tensor with `entries` entries at random places, some of them twice."""
    generator = torch.Generator().manual_seed(rank)
    sparse = shape[: len(shape) - dense_dims]
    places = torch.stack([torch.randint(0, n, (entries,), generator=generator) for n in sparse])
    values = torch.randn((entries, *shape[len(shape) - dense_dims :]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(places, values, shape)


def sums(rank, n):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        for shape, dense_dims in (((50, 8), 1), ((20, 30), 0), ((6, 5, 4), 1)):
            for most in (0, 1, 40):
                parts = [draw(r, shape, max(0, most - 7 * r), dense_dims, dtype) for r in range(n)]
                want = torch.stack([p.coalesce().to_dense().double() for p in parts]).sum(0)
                for op, divisor in ((dsx_comm.ReduceOp.SUM, 1), (dsx_comm.ReduceOp.AVG, n)):
                    got = dsx_comm.sparse_allreduce(parts[rank], op)
                    assert got.is_coalesced() and got.dtype == dtype and got.shape == shape
                    assert got.dense_dim() == dense_dims
                    torch.testing.assert_close(got.to_dense().double(), want / divisor, rtol=tolerance, atol=tolerance)
                    everybody = [torch.empty(shape, dtype=dtype) for _ in range(n)]
                    dsx_comm.all_gather(everybody, got.to_dense())
                    assert all(torch.equal(everybody[0], other) for other in everybody)  # the same bits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_it_is_the_dense_all_reduce(n, backend):
    run_ranks(sums, n, backend=backend)


def trained(rank, n):
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 16, sparse=True)
    other = torch.nn.Embedding(1000, 16)
    other.load_state_dict(table.state_dict())
    words = torch.randint(0, 1000, (32,), generator=torch.Generator().manual_seed(rank))
    for embedding in (table, other):
        embedding(words).square().sum().backward()
    dsx_comm.all_reduce(other.weight.grad, dsx_comm.ReduceOp.AVG)
    with dsx_comm.count_traffic() as traffic:
        table.weight.grad = dsx_comm.sparse_allreduce(table.weight.grad, dsx_comm.ReduceOp.AVG)
    torch.testing.assert_close(table.weight.grad.to_dense(), other.weight.grad)
    torch.optim.SparseAdam(table.parameters()).step()
    rows = max(
        len(torch.randint(0, 1000, (32,), generator=torch.Generator().manual_seed(r)).unique()) for r in range(n)
    )
    assert traffic.by_op() == {"sparse_allreduce": (1, (n - 1) * (16 + rows * (4 + 16 * 4)))}


def test_an_embedding_trains_on_the_bytes_of_its_rows():
    run_ranks(trained, 3)


def refused(rank, n):
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"got layout torch\.strided"):
        dsx_comm.sparse_allreduce(torch.ones(3))
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="sparse_allreduce takes sparse"):
        dsx_comm.all_reduce(torch.ones(3).to_sparse())
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"expected ReduceOp\.SUM"):
        dsx_comm.sparse_allreduce(torch.ones(3).to_sparse(), dsx_comm.ReduceOp.MAX)
    for mine in (torch.ones(3 + rank), torch.ones(3, dtype=[torch.float32, torch.float64][rank])):
        with pytest.raises(
            dsx_comm.errors.MismatchError, match=rf"rank\(s\) {rank} have \({len(mine)},\) {mine.dtype}"
        ):
            dsx_comm.sparse_allreduce(mine.to_sparse())
    dsx_comm.barrier()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend):
    run_ranks(refused, 2, backend=backend)
