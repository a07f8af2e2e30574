"""Ranks that call different collectives are named before data moves, on gloo too; programs that are in order notice
nothing.
"""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def disagreements(rank, n):
    import dsx_comm
    from dsx_comm import ReduceOp

    kind = [torch.float32, torch.int32][rank]
    empty, ones = torch.empty(4, dtype=kind), torch.ones(4, dtype=kind)
    rows = [torch.empty(4, dtype=kind) for _ in range(n)]
    cases = [
        (lambda: dsx_comm.all_gather(rows, ones), "int32"),
        (lambda: dsx_comm.all_gather_into_tensor(torch.empty(4 * n, dtype=kind), ones), "int32"),
        (lambda: dsx_comm.gather(ones, rows if rank == 0 else None), "int32"),
        (lambda: dsx_comm.scatter(empty, rows if rank == 0 else None), "int32"),
        (lambda: dsx_comm.broadcast(ones, 0), "int32"),
        (lambda: dsx_comm.all_to_all_single(empty, ones), "int32"),
        (lambda: dsx_comm.all_reduce_coalesced([ones, ones]), "int32"),
        (
            lambda: dsx_comm.all_reduce(torch.ones(10 + rank)),
            r"rank 0: all_reduce of 40 bytes.*rank 1: all_reduce of 44",
        ),
        (lambda: dsx_comm.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank])), "int32"),
        (lambda: dsx_comm.all_reduce(torch.ones(4), [ReduceOp.SUM, ReduceOp.MAX][rank]), "MAX"),
        (lambda: dsx_comm.broadcast(torch.ones(4), rank), "root 1"),
        (lambda: dsx_comm.barrier() if rank else dsx_comm.all_reduce(torch.ones(4)), "rank 1: barrier"),
    ]
    dsx_comm.check_first_calls(len(cases))
    for call, text in cases:
        with pytest.raises(dsx_comm.errors.MismatchError, match=text):
            call()
    tensor = torch.ones(3)
    dsx_comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), float(n)))


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_disagreements_are_named(backend):
    run_ranks(disagreements, 2, backend=backend)


def legal(rank, n):
    import dsx_comm

    dsx_comm.all_to_all_single(
        torch.empty(3 if rank else 1), torch.ones(2), [1, 2] if rank else [1, 0], [1, 1] if rank == 0 else [0, 2]
    )
    objects = [None] * n
    dsx_comm.all_gather_object(objects, "x" * 10**rank)
    one, two = dsx_comm.new_group(), dsx_comm.new_group()
    tensors = [torch.ones(2), torch.ones(5)]
    order = [(one, tensors[0]), (two, tensors[1])]
    handles = [dsx_comm.all_reduce(t, group=g, async_op=True) for g, t in (order if rank else order[::-1])]
    for handle in handles:
        handle.wait()
    assert tensors[0][0] == tensors[1][0] == n
    for _ in range(20):
        dsx_comm.barrier()
    if rank == 0:
        dsx_comm.send(torch.ones(1), 1)
    else:
        dsx_comm.recv(torch.ones(1), 0)


def test_what_may_differ_is_not_refused():
    run_ranks(legal, 2)


def test_the_number_of_calls_is_checked():
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
        dsx_comm.check_first_calls(-1)


class CountingStore:
    """A store in this process' memory that counts requests; `wait` does not wait (the threads below do not need it)."""

    def __init__(self, inner):
        self._inner, self.requests = inner, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._inner, name)


def lines_of(ranks, odd=()):
    """(requests of each rank, errors) of one call of `ranks` ranks, of which `odd` call something else."""
    from dsx_comm import agreement
    from torch._C._distributed_c10d import HashStore

    store, errors = HashStore(), {}
    stores = [CountingStore(store) for _ in range(ranks)]
    lines = [f"all_reduce of {4 + (rank in odd)} bytes" for rank in range(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(ranks):
            patch.setattr(agreement.dist, "get_rank", lambda rank=rank: rank)
            agreement._post(stores[rank], lines[rank], ranks)
        for rank in range(ranks):
            try:
                agreement._compare(stores[rank], lines[rank], list(range(ranks)), "call #1 of group 0")
            except dsx_comm.errors.MismatchError as error:
                errors[rank] = str(error)
    return [s.requests for s in stores], errors


def test_a_call_costs_a_rank_the_same_however_many_ranks_there_are():
    few, _ = lines_of(2)
    many, errors = lines_of(500)
    assert max(many) == max(few) <= 6 and not errors


def test_the_odd_ones_of_many_ranks_are_named_on_all():
    _, errors = lines_of(3, odd=(1,))
    assert len(errors) == 3
    assert "rank 0: all_reduce of 4 bytes; rank 1: all_reduce of 5 bytes; rank 2: all_reduce of 4 bytes" in errors[0]
    requests, errors = lines_of(300, odd=(7, 130))
    assert len(errors) == 300 and max(requests) < 20
    assert (
        "rank 7: all_reduce of 5 bytes; rank 130: all_reduce of 5 bytes; 2 of 300 ranks differ from the first"
        in errors[299]
    )
    _, errors = lines_of(300, odd=range(1, 300))  # the first one is the odd one
    assert len(errors) == 300 and errors[0].count("rank ") == 16 and "299 of 300 ranks differ" in errors[0]
