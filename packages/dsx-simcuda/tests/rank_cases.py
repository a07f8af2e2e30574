"""Run on two ranks of the simulated device by test_simcuda_group.py: collectives, their mistakes, FSDP2 and DDP.

`rank_cases.py FOLDER CASE...` writes FOLDER/rank0.json and rank1.json.
"""

import json
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import dsx_simcuda
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

CASES = {}
SIZE = 1 << 14


def case(function):
    CASES[function.__name__] = function
    return function


def filled(count, value, **kw):
    return torch.full((count,), float(value), device="cuda", **kw)


@case
def reductions(rank, world):
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        values = filled(10, rank + 1)
        dist.all_reduce(values, op=op)
        found.append(values[3].item())
    values = filled(10, rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(values, async_op=True).wait()
    found.append(values[0].item())
    values = filled(10, rank + 1)
    dist.reduce(values, 1)
    found.append(values[0].item())
    out = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * world, device="cuda"))
    found.append(out.tolist())
    outs = torch.empty(2, device="cuda")
    dist.reduce_scatter(outs, [filled(2, 1), filled(2, 2)])
    found.append(outs.tolist())
    return found


@case
def premultiplied_sums(rank, world):
    """Each rank's own factor multiplies what it gives: a number, or a tensor on the device."""
    number = filled(4, rank + 1)
    dist.all_reduce(number, op=dist._make_nccl_premul_sum(0.5))
    own = filled(4, 1)
    dist.all_reduce(own, op=dist._make_nccl_premul_sum(filled(1, 10 if rank else 1)))
    return number[0].item(), own[0].item()


@case
def read_with_pythons_lock_held(rank, world):
    """Operators on DTensors wait with Python's lock held; the stream needs it to drop a tensor that Python knows."""
    mesh = init_device_mesh("cuda", (world,))
    found = []
    for _ in range(20):
        values = distribute_tensor(torch.ones(8, 8, device="cuda"), mesh, [Shard(0)])
        dropped = [filled(4096, number) for number in range(8)]
        quotients = [1.0 / tensor for tensor in dropped]
        del dropped, quotients
        found.append(bool((values > 2).any()))
    return sum(found)


@case
def timeout_of_a_group(rank, world):
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=3), dist.new_group([0, 1]))
    return True


@case
def gathers(rank, world):
    all_of_them = torch.empty(world * 2, device="cuda", dtype=torch.bfloat16)
    dist.all_gather_into_tensor(all_of_them, filled(2, rank, dtype=torch.bfloat16))
    pieces = [torch.empty(2 + r, device="cuda") for r in range(world)]  # uneven
    dist.all_gather(pieces, filled(2 + rank, rank))
    exchanged = torch.empty(world, device="cuda")
    dist.all_to_all_single(exchanged, filled(world, rank))
    lists = [torch.empty(1, device="cuda") for _ in range(world)]
    dist.all_to_all(lists, [filled(1, rank * 10 + r) for r in range(world)])
    sent = filled(3, rank)
    dist.broadcast(sent, 1)
    scattered = torch.empty(1, device="cuda")
    dist.scatter(scattered, [filled(1, 5), filled(1, 6)] if rank == 0 else None, src=0)
    gathered = [torch.empty(1, device="cuda") for _ in range(world)] if rank == 0 else None
    dist.gather(filled(1, rank + 3), gathered, dst=0)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    found = [all_of_them.tolist(), [p.tolist() for p in pieces], exchanged.tolist(), [x.item() for x in lists]]
    return [*found, sent[0].item(), scattered.item(), [g.item() for g in gathered or []], objects[1]["rank"]]


@case
def point_to_point(rank, world):
    mine, theirs = filled(3, rank), torch.empty(3, device="cuda")
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)])
    for work in works:
        work.wait()
    again = torch.zeros(3, device="cuda")
    if rank == 0:
        dist.send(filled(3, 7), 1)
    else:
        dist.recv(again, 0)
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
        first, second = filled(2, rank), filled(2, 10 * rank)
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    return theirs.tolist(), again[0].item(), first[0].item(), second[0].item()


@case
def split_communicators(rank, world):
    alone = dist.split_group(split_ranks=[[0], [1]])
    both = dist.new_group([0, 1], pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    values = filled(2, rank + 1)
    dist.all_reduce(values, group=alone)
    one = values[0].item()
    dist.all_reduce(values, group=both)
    return one, values[0].item(), dist.get_world_size(alone), dist.get_backend(both)


@case
def a_forgotten_wait(rank, world):
    values = filled(SIZE, 1)
    work = dist.all_reduce(values, async_op=True)
    doubled = values * 2
    work.wait()
    torch.cuda.synchronize()
    return doubled.shape[0]


@case
def wait_on_another_stream(rank, world):
    """wait() lets the stream wait that is current at the time: the other one is not ordered."""
    side = torch.cuda.Stream()
    values = filled(SIZE, 1)
    work = dist.all_reduce(values, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    doubled = values * 2
    torch.cuda.synchronize()
    return doubled.shape[0]


@case
def communicators_in_one_order(rank, world):
    """Collectives of two groups, of which each waits for the one before."""
    other = dist.new_group([0, 1])
    a, b = filled(SIZE, 1), filled(SIZE, 1)
    dist.all_reduce(a, async_op=True).wait()
    dist.all_reduce(b, group=other, async_op=True).wait()
    dist.all_reduce(b)
    return a[0].item(), b[0].item()


def linears():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]).cuda()


def losses(model, rank, optimizer):
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 16, device="cuda") * (rank + 1)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return [round(value, 4) for value in found]


@case
def fsdp2(rank, world):
    model = linears()
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses(model, rank, torch.optim.SGD(model.parameters(), lr=1e-3))


@case
def ddp(rank, world):
    model = DistributedDataParallel(linears(), device_ids=[torch.cuda.current_device()])
    return losses(model, rank, torch.optim.SGD(model.parameters(), lr=1e-3))


@case
def different_order(rank, world):
    """The last case: the group is of no use afterwards."""
    first, second = filled(10, 1), filled(20, 1)
    for values in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(values, async_op=True)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)


def flight_record():
    compiled = torch._C._distributed_c10d
    record = pickle.loads(compiled._dump_nccl_trace())
    record["carrying"] = pickle.loads(compiled._dump_fr_trace())
    record["carrying_status"] = pickle.loads(compiled._dump_fr_trace(includeCollectives=False))["pg_status"]
    record["active"] = len(pickle.loads(compiled._dump_nccl_trace(onlyActive=True))["entries"])
    record["without"] = sorted(pickle.loads(compiled._dump_nccl_trace(includeCollectives=False)))
    return record


def main():
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in chosen or CASES:
        with dsx_simcuda.watch() as seen:
            try:
                result = CASES[name](rank, world)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        found[name] = {
            "result": result,
            "reports": [r.as_dict() for r in seen.reports],
            "text": list(map(str, seen.reports)),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    found["record"] = flight_record()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    (folder / f"nccl_trace_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
