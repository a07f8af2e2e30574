"""gloo groups that connect on demand: what every operation gives, and what they are called."""

import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks


def few_are_many(whole_table=64):
    from dsx_comm import groups, on_demand

    on_demand.MANY_RANKS = groups.MANY_RANKS = 2
    on_demand.WHOLE_TABLE = whole_table


def operations(rank, world, group):
    """Results of operations that connect ranks in different orders."""
    mine = torch.arange(3.0) + 10 * rank
    found = {}
    found["rounds"] = torch.empty(3 * world)
    lane = dsx_comm.StepLane()
    for _ in range(2):  # the second time the ranks are connected
        dsx_comm.all_gather_in_rounds(found["rounds"], mine, group, lane=lane)
    found["gathered"] = torch.empty(3 * world)
    dsx_comm.all_gather_into_tensor(found["gathered"], mine, group)
    found["large"] = torch.empty(30_000 * world)  # is sent to each peer directly
    dsx_comm.all_gather_into_tensor(found["large"], torch.full((30_000,), float(rank)), group)
    found["sum"] = mine.clone()
    dsx_comm.all_reduce(found["sum"], group=group)
    found["part"] = torch.empty(2)
    dsx_comm.reduce_scatter_tensor(found["part"], torch.arange(2.0 * world) + rank, group=group)
    found["swapped"] = torch.empty(world)
    dsx_comm.all_to_all_single(found["swapped"], torch.arange(float(world)) + 10 * rank, group=group)
    found["sent"] = torch.full((2,), float(rank))
    dsx_comm.broadcast(found["sent"], src=world - 1, group=group)
    neighbour = torch.empty(1)
    works = dsx_comm.batch_isend_irecv(
        [
            dsx_comm.P2POp(dsx_comm.irecv, neighbour, group=group, group_peer=(rank + 1) % world),
            dsx_comm.P2POp(dsx_comm.isend, torch.tensor([float(rank)]), group=group, group_peer=(rank - 1) % world),
        ]
    )
    for work in works:
        work.wait()
    found["neighbour"] = neighbour
    objects = [None] * world
    dsx_comm.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": other} for other in range(world)]
    dsx_comm.barrier(group)
    return found


def both(rank, world):
    """The same operations on torch's own group, and on one that connects on demand."""
    plain = operations(rank, world, None)
    few_are_many()
    group = dsx_comm.new_group(backend=dsx_comm.host_backend(world), local=True)
    assert dsx_comm.get_backend(group) == "gloo_on_demand" and dsx_comm.can_gather_in_rounds(group)
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    some = dsx_comm.new_group([2, 0], backend="gloo_on_demand") if world > 2 else None
    if rank in (0, 2) and some is not None:
        order = [None, None]
        dsx_comm.all_gather_object(order, rank, group=some)
        assert order == [2, 0]
    return plain, operations(rank, world, group)


@pytest.mark.parametrize(("world", "backend"), [(2, "gloo"), (5, "gloo"), (3, "cpu:gloo,cuda:gloo")])
def test_operations_give_what_they_give_on_gloo(world, backend):
    for plain, lazy in run_ranks(both, world, backend=backend, timeout=90):
        for name, value in plain.items():
            assert torch.equal(lazy[name], value), name


def as_default(rank, world, whole_table):
    few_are_many(whole_table)
    dist.init_process_group("cpu:gloo_on_demand,cuda:gloo")
    assert dsx_comm.backend_for("cuda") == "gloo" and dsx_comm.backend_for("cpu") == "gloo_on_demand"
    assert dsx_comm.can_gather_in_rounds()
    found = operations(rank, world, None)
    inherits = dsx_comm.new_group(list(range(world)))
    assert dsx_comm.get_backend(inherits) == dsx_comm.get_backend()
    again = operations(rank, world, inherits)
    assert all(torch.equal(found[name], value) for name, value in again.items())
    dsx_comm.destroy_process_group()
    dist.init_process_group("gloo_on_demand", rank=rank, world_size=world)  # the store may have the old addresses
    once_more = operations(rank, world, None)
    assert all(torch.equal(found[name], value) for name, value in once_more.items())
    return found


@pytest.mark.parametrize("whole_table", [64, 2])
def test_the_default_group_meets_in_the_store(whole_table):
    found = run_ranks(as_default, 5, whole_table, backend=None, timeout=90)
    assert all(torch.equal(one["rounds"], torch.cat([torch.arange(3.0) + 10 * r for r in range(5)])) for one in found)


def between_machines(rank, world):
    from dsx_comm.shm import register, segment

    def nothing_in_common(member, options):
        raise segment.Unavailable("another machine")

    few_are_many()
    register.map_segment = nothing_in_common
    group = dsx_comm.new_group(backend="dsx", options=dsx_comm.ShmOptions(warn=False))
    from dsx_comm.groups import member

    assert not member(group).has_met
    return operations(rank, world, group)["gathered"].tolist()


def test_a_group_of_the_shared_memory_backend_between_machines():
    found = run_ranks(between_machines, 3, timeout=60)
    assert found == [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0]] * 3


def test_small_groups_are_torchs_own():
    assert dsx_comm.host_backend(8) == "gloo" and dsx_comm.host_backend(1024) == "gloo_on_demand"
