"""torch's own distributed features on the dsx backend, as they are: the same results as without it."""

import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}"),
]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)
    ).double()


def batches(n):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4 * n, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def train(net, optimizer, inputs):
    losses = []
    for x in inputs:
        loss = net(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def data_parallel(rank, n, kind):
    import torch.distributed as dist

    reference = model()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), batches(n))
    net = model()
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        wrapped = fully_shard(net)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    losses = train(wrapped, optimizer, [x.chunk(n)[rank] for x in batches(n)])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in wrapped.parameters()]
    for got, want in zip(whole, reference.parameters()):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-7, atol=1e-9)
    if kind == "fsdp2":
        checkpoint(wrapped, rank)


def checkpoint(net, rank):
    import shutil
    import tempfile

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    before = {k: v.full_tensor().clone() for k, v in net.state_dict().items()}
    dcp.save(net.state_dict(), checkpoint_id=folders[0])
    state = net.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    dcp.load(state, checkpoint_id=folders[0])
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), before[name]), name
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_training_equals_one_process(kind):
    run_ranks(data_parallel, 2, kind, backend="dsx")


def tensors_over_a_mesh(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    full = torch.arange(48.0).view(8, 6)
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.full_tensor(), full)
    assert torch.equal(tensor.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), full)
    other = distribute_tensor(torch.eye(6), mesh, [Replicate(), Shard(0)])
    product = tensor.redistribute(placements=[Shard(0), Shard(1)]) @ other
    assert torch.equal(product.full_tensor(), full)
    line = init_device_mesh("cpu", (4,))
    partial = distribute_tensor(full, line, [Replicate()])
    from torch.distributed.tensor import DTensor

    summed = DTensor.from_local(partial.to_local(), line, [Partial()]).redistribute(placements=[Shard(0)])
    assert torch.equal(summed.full_tensor(), full * 4)


def test_dtensor_over_meshes_of_one_and_two_axes():
    run_ranks(tensors_over_a_mesh, 4, backend="dsx")


def functions(rank, n):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = torch.arange(8.0) + rank
    assert torch.equal(funcol.wait_tensor(funcol.all_reduce(x, "sum", group)), torch.arange(8.0) * n + sum(range(n)))
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(x, 0, group))
    assert torch.equal(gathered, torch.cat([torch.arange(8.0) + r for r in range(n)]))
    part = funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "avg", 0, group))
    assert torch.equal(part, (torch.arange(8.0) + sum(range(n)) / n).chunk(n)[rank])
    moved = funcol.wait_tensor(funcol.all_to_all_single(x, None, None, group))
    assert torch.equal(moved, torch.cat([(torch.arange(8.0) + r).chunk(n)[rank] for r in range(n)]))
    both = funcol.all_reduce_coalesced([x, x.double()], "max", group)
    assert torch.equal(funcol.wait_tensor(both[1]), torch.arange(8.0, dtype=torch.float64) + n - 1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(t):
        y = funcol.all_reduce(t * 2, "sum", group)
        return funcol.all_gather_tensor(y + 1, 0, group)

    expected = ((torch.arange(8.0) * n + sum(range(n))) * 2 + 1).repeat(n)
    assert torch.equal(compiled(x), expected)


def test_functional_collectives_eager_and_compiled():
    run_ranks(functions, 2, backend="dsx", timeout=120)


def objects(rank, n):
    import torch.distributed as dist

    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": rank, "data": list(range(rank * 1000))})
    assert everyone == [{"rank": r, "data": list(range(r * 1000))} for r in range(n)]
    box = [("from", rank), rank]
    dist.broadcast_object_list(box, 1)
    assert box == [("from", 1), 1]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, 0)
    assert got == [f"for {rank}"]
    gathered = [None] * n if rank == 2 else None
    dist.gather_object(rank * rank, gathered, 2)
    assert rank != 2 or gathered == [0, 1, 4]
    to, of = (rank + 1) % n, (rank - 1) % n
    received = torch.empty(70_000)
    ops = [dist.P2POp(dist.isend, torch.full((70_000,), float(rank)), to), dist.P2POp(dist.irecv, received, of)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(received, torch.full((70_000,), float(of)))
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        box = [None]
        assert dist.recv_object_list(box, 0) == 0
        assert box == [{"a": 1}]


def test_object_collectives_and_batches():
    run_ranks(objects, 3, backend="dsx")


def mixed_name(rank, n, path):
    import dsx_comm  # noqa: F401
    import torch.distributed as dist

    dist.init_process_group("cpu:dsx")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == n
    dist.destroy_process_group()
    # and again, after it was destroyed; at another store, since a rank may be back before rank 0 has closed the first
    dist.init_process_group("dsx", init_method=f"file://{path}", rank=rank, world_size=n)
    dist.barrier()
    dist.destroy_process_group()


def test_the_backend_can_be_named_with_its_device_and_made_again(tmp_path):
    import dsx_comm  # noqa: F401

    run_ranks(mixed_name, 2, str(tmp_path / "store"), backend=None)
