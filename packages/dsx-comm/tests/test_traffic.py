"""Counted bytes against the volume formulas."""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def volumes(rank, n):
    one, many = torch.ones(10, dtype=torch.bfloat16), torch.ones(10 * n, dtype=torch.bfloat16)
    S, share = 20 * n, 20  # bytes in the dtype that travels, though sums are taken in float32
    expected = {}
    with dsx_comm.count_traffic() as t:
        dsx_comm.all_reduce(many)
        expected["all_reduce"] = 2 * S * (n - 1) / n
        dsx_comm.all_gather_into_tensor(many, one)
        expected["all_gather_into_tensor"] = S * (n - 1) / n
        dsx_comm.reduce_scatter_tensor(one, many, async_op=True).wait()
        expected["reduce_scatter_tensor"] = S * (n - 1) / n
        dsx_comm.broadcast(one, n - 1)
        expected["broadcast"] = share if rank == n - 1 and n > 1 else 0
        dsx_comm.reduce(one, 0)
        expected["reduce"] = share if rank else 0
        dsx_comm.all_gather([torch.empty_like(one) for _ in range(n)], one)
        expected["all_gather"] = share * (n - 1)
        dsx_comm.gather(one, [torch.empty_like(one) for _ in range(n)] if rank == 0 else None)
        expected["gather"] = share if rank else 0
        dsx_comm.scatter(one, [one] * n if rank == 0 else None)
        expected["scatter"] = share * (n - 1) if rank == 0 else 0
        dsx_comm.all_to_all_single(torch.empty_like(many), many)
        expected["all_to_all_single"] = S * (n - 1) / n
        dsx_comm.reduce_scatter(one, [torch.ones_like(one) for _ in range(n)])
        expected["reduce_scatter"] = share * (n - 1)
        dsx_comm.all_reduce_coalesced([many, torch.ones(n)])
        expected["all_reduce_coalesced"] = 2 * (S + 4 * n) * (n - 1) / n
        dsx_comm.all_gather_coalesced([many, many.clone()], [one, one])
        expected["all_gather_coalesced"] = 2 * S * (n - 1) / n
        dsx_comm.barrier()
        expected["barrier"] = 0
        assert t.sent_bytes() == pytest.approx(sum(expected.values()))
    dsx_comm.all_reduce(many)  # outside: not counted
    for op, want in expected.items():
        assert (op, t.sent_bytes(op)) == (op, want)
        assert t.calls(op) == 1
        assert isinstance(t.sent_bytes(op), int)
    assert t.by_op()["all_reduce"] == (1, expected["all_reduce"])
    assert t.calls() == len(expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_operation_counts_its_formula(world_size):
    run_ranks(volumes, world_size)


def by_group(rank, n):
    pair = dsx_comm.new_group([0, 1])
    with dsx_comm.count_traffic() as outer:
        dsx_comm.all_reduce(torch.ones(1))  # 4 bytes over 3 ranks: no whole number
        if rank < 2:
            with dsx_comm.count_traffic() as inner:
                dsx_comm.all_reduce(torch.ones(8), group=pair)
            assert inner.sent_bytes() == 32
            assert outer.sent_bytes(group=pair) == 32
            assert outer.sent_bytes("broadcast", pair) == 0
    assert outer.sent_bytes(group=dsx_comm.get_world_group()) == pytest.approx(16 / 3)
    for _ in range(2):
        with dsx_comm.count_traffic() as t:
            for _ in range(3):
                dsx_comm.all_reduce(torch.ones(1))
        assert t.sent_bytes() == 16  # three thirds make a whole
        t.reset()
        assert t.sent_bytes() == 0


def test_groups_are_counted_apart_and_blocks_nest():
    run_ranks(by_group, 3)


def pickles(rank, n):
    import pickle

    objects = [{"rank": r, "text": "x" * 100 * r} for r in range(n)]
    longest = max(len(pickle.dumps(o)) for o in objects)
    with dsx_comm.count_traffic() as t:
        got = [None] * n
        dsx_comm.all_gather_object(got, objects[rank])
        assert got == objects
    assert t.sent_bytes() == (longest + 8) * (n - 1)


def test_object_collectives_count_their_pickles():
    run_ranks(pickles, 3)
