"""Collectives that are made ready once: same results, same watchers, same errors as the plain calls."""

import dsx_comm
import pytest
import torch
from dsx_testkit import RankError, count_calls, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64)


def _gathers(rank, world_size, numel):
    found = []
    for dtype in DTYPES:
        prepared = dsx_comm.prepare_all_gather(numel, dtype, torch.device("cpu"))
        for step in range(3):
            source = (torch.arange(numel) + 10 * rank + step).to(dtype)
            out, plain = torch.zeros(numel * world_size, dtype=dtype), torch.zeros(numel * world_size, dtype=dtype)
            prepared.start(out, source).wait()
            dsx_comm.all_gather_into_tensor(plain, source)
            found.append(torch.equal(out, plain))
    return all(found)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize("numel", [0, 1, 1000, 40_000])
def test_a_prepared_gather_gives_what_the_plain_one_gives(backend, numel):
    assert all(run_ranks(_gathers, 2, numel, backend=backend))


def test_one_rank_gathers_its_own():
    assert run_ranks(_gathers, 1, 5) == [True]


def _scatters(rank, world_size, numel, op):
    op, found = getattr(dsx_comm.ReduceOp, op), []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        prepared = dsx_comm.prepare_reduce_scatter(numel, dtype, torch.device("cpu"), op)
        for step in range(3):
            source = torch.randn(numel * world_size, generator=torch.Generator().manual_seed(rank + step)).to(dtype)
            out, plain = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
            prepared.start(out, source.clone()).wait()
            dsx_comm.reduce_scatter_tensor(plain, source, op)
            found.append(torch.equal(out, plain))
    return all(found)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_a_prepared_reduce_scatter_gives_what_the_plain_one_gives(backend, op):
    assert all(run_ranks(_scatters, 2, 1000, op, backend=backend))


def _wrong(rank, world_size):
    prepared = dsx_comm.prepare_all_gather(4, torch.float32, torch.device("cpu"))
    errors = []
    for out, source in ((8, 5), (7, 4)):
        with pytest.raises(dsx_comm.errors.CommArgumentError, match="prepared for 8 and 4"):
            prepared.start(torch.zeros(out), torch.zeros(source))
        errors.append(True)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="float64"):
        prepared.start(torch.zeros(8, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
        dsx_comm.prepare_all_gather(-1, torch.float32, torch.device("cpu"))
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="AVG"):
        dsx_comm.prepare_reduce_scatter(4, torch.int64, torch.device("cpu"), dsx_comm.ReduceOp.AVG)
    return errors


def test_tensors_of_another_size_or_dtype_are_refused():
    assert run_ranks(_wrong, 2) == [[True, True]] * 2


def _observed(rank, world_size):
    prepared = dsx_comm.prepare_all_gather(4, torch.float32, torch.device("cpu"))
    seen = []

    class Observer:
        def begin(self, call):
            seen.append((call.op, call.message, call.sent))

        def end(self, token, call, result, is_async):
            raise AssertionError("begin gave no token")

    prepared.start(torch.zeros(8), torch.zeros(4)).wait()
    stop = dsx_comm.calls.observe(Observer())
    prepared.start(torch.zeros(8), torch.zeros(4)).wait()
    stop()
    prepared.start(torch.zeros(8), torch.zeros(4)).wait()
    return seen


def test_observers_see_prepared_calls():
    assert run_ranks(_observed, 2) == [[("all_gather_into_tensor", 16, 16)]] * 2


def _differ(rank, world_size):
    dtype = torch.float32 if rank == 0 else torch.int32  # equal bytes: gloo ends a process for unequal ones
    dsx_comm.prepare_all_gather(4, dtype, torch.device("cpu")).start(
        torch.zeros(8, dtype=dtype), torch.zeros(4, dtype=dtype)
    ).wait()


def test_ranks_that_start_different_calls_are_told_so():
    with pytest.raises(RankError, match="different collectives"):
        run_ranks(_differ, 2)


def _calls(rank, world_size):
    prepared = dsx_comm.prepare_all_gather(4, torch.float32, torch.device("cpu"))
    out, source = torch.zeros(8), torch.zeros(4)
    dsx_comm.agreement.AGREEMENT.calls = 0
    for _ in range(2):
        prepared.start(out, source).wait()
    with count_calls("dsx_comm") as start:
        handle = prepared.start(out, source)
    with count_calls("dsx_comm") as wait:
        handle.wait()
    return start.total, wait.total


def test_a_start_and_a_wait_pass_few_python_calls():
    start, wait = run_ranks(_calls, 2)[0]
    assert start <= 6  # all_gather_into_tensor: 30
    assert wait <= 6
