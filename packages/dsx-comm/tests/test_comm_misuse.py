"""What programs do to groups and tensors by mistake: it works, or it is an error that names the mistake; it is never
a wrong result.
"""

import os
import time

import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_comm.shm import native
from dsx_testkit import run_ranks

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")


# - forked processes


def in_a_child(work):
    """Run `work` in a fork; what it returned, or the error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"no error: {work()}"
        except BaseException as error:  # told to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def forked(rank, n):
    tensor = torch.full((5,), rank + 1.0)
    dsx_comm.all_reduce(tensor)
    pending = dsx_comm.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    if rank == 0:
        for work in (
            lambda: dsx_comm.all_reduce(torch.full((5,), 100.0)),
            lambda: dsx_comm.barrier(),
            lambda: dsx_comm.send(torch.ones(1), 1),
            lambda: dist.all_reduce(torch.full((5,), 100.0), async_op=True) if n == 2 else None,
        ):
            said = in_a_child(work)
            assert said.startswith("CommError") and "was forked from" in said and "which is rank 0" in said, said
        said = in_a_child(pending.wait)
        assert said.startswith("CommError"), said
    other = torch.full((5,), rank + 1.0)
    if rank == 1:
        dsx_comm.all_reduce(torch.ones(3))
    else:
        pending.wait()
    dsx_comm.all_reduce(other)  # the parent's place is the parent's
    return other[0].item()


@needs_native
def test_a_forked_child_cannot_take_its_parents_place():
    assert run_ranks(forked, 2, backend="dsx") == [3.0, 3.0]


def forked_on_gloo(rank, n):
    dsx_comm.barrier()
    said = in_a_child(lambda: dsx_comm.all_reduce(torch.ones(5)))
    assert said.startswith("CommError") and "was forked from" in said, said
    dsx_comm.barrier()


def test_nor_on_gloo():
    run_ranks(forked_on_gloo, 2)


def makes_its_own(rank, n, folder):
    def work():
        dist.distributed_c10d._update_default_pg(None)  # what a child has to do before it can make its own
        dsx_comm.init_distributed(rank=0, world_size=1, init_method=f"file://{folder}/own{rank}")
        tensor = torch.ones(2)
        dsx_comm.all_reduce(tensor)
        return tensor.tolist()

    dsx_comm.barrier()
    said = in_a_child(work)
    assert said == "no error: [1.0, 1.0]", said


def test_a_child_may_make_groups_of_its_own(tmp_path):
    run_ranks(makes_its_own, 2, str(tmp_path))


# - overlapping memory


def overlapping(rank, n):
    for numel in (8, 300_000):
        memory = torch.arange(3.0 * numel) + 1e6 * rank
        whole = [torch.arange(3.0 * numel) + 1e6 * r for r in range(n)]
        shift = numel // 2
        part = numel // n
        want = torch.cat([whole[r][shift + rank * part : shift + (rank + 1) * part] for r in range(n)])
        dsx_comm.all_to_all_single(memory[:numel], memory[shift : shift + numel])
        assert torch.equal(memory[:numel], want), numel

        memory = torch.arange(float(numel)) + 1e6 * rank
        want = torch.cat([whole[r][rank * part : (rank + 1) * part] for r in range(n)])
        dsx_comm.all_to_all_single(memory, memory)  # in place
        assert torch.equal(memory, want), numel

        memory = torch.arange(float(numel)) + 1e6 * rank
        pieces = list(memory.chunk(n))
        dsx_comm.all_to_all(pieces[::-1], pieces)  # places are other pieces
        want = [whole[r][rank * part : (rank + 1) * part] for r in range(n)][::-1]
        assert torch.equal(memory, torch.cat(want)), numel

        memory = torch.arange(float(numel)) + 1e6 * rank
        pieces = list(memory.chunk(n))
        dsx_comm.all_gather(pieces, pieces[(rank + 1) % n])  # sends a piece that will be written
        mine = [whole[r][(r + 1) % n * part : ((r + 1) % n + 1) * part] for r in range(n)]
        assert torch.equal(memory, torch.cat(mine)), numel

        memory = torch.arange(float(numel)) + 1e6 * rank
        pieces = list(memory.chunk(n))
        dsx_comm.scatter(pieces[1], pieces if rank == 0 else None, 0)  # rank 0's own part lands on rank 1's
        assert torch.equal(pieces[1], whole[0][rank * part : (rank + 1) * part]), numel

        memory = torch.arange(float(numel)) + 1e6 * rank
        pieces = list(memory.chunk(n))
        dsx_comm.gather(pieces[1] if rank == 0 else pieces[0], pieces if rank == 0 else None, 0)
        mine = [whole[0][part : 2 * part], *(whole[r][:part] for r in range(1, n))]
        assert rank or torch.equal(memory, torch.cat(mine)), numel


@pytest.mark.parametrize("backend", ["gloo", pytest.param("dsx", marks=needs_native)])
@pytest.mark.parametrize("n", [2, 4])
def test_overlapping_inputs_and_outputs(backend, n):
    run_ranks(overlapping, n, backend=backend)


# - what a receive is given


def other_dtype(rank, n):
    for count, sent, expected in ((4, torch.float32, torch.int32), (4, torch.float64, torch.float32)):
        if rank == 0:
            dsx_comm.send(torch.ones(count, dtype=sent), 1)
        else:
            got = torch.full((count,), 7, dtype=expected)
            with pytest.raises(
                dsx_comm.errors.MismatchError, match=f"sent .* {str(sent)[6:]} .*expects .* {str(expected)[6:]}"
            ):
                dsx_comm.recv(got, 0)
            assert got.tolist() == [7] * count, "what was refused must not be written"
    large = torch.full((300_000,), rank + 1.0)  # more than a mailbox holds, and sent before the receive is posted
    if rank == 0:
        work = dist.isend(large, 1, tag=1)
        dsx_comm.send(torch.ones(3), 1, tag=2)
        work.wait()
    else:
        dsx_comm.recv(torch.empty(3), 0, tag=2)
        with pytest.raises(dsx_comm.errors.MismatchError, match="float32"):
            dsx_comm.recv(torch.zeros(300_000, dtype=torch.int32), 0, tag=1)
    got = torch.empty(3)  # the two are in step afterwards
    if rank == 0:
        dsx_comm.send(torch.full((3,), 5.0), 1)
    else:
        dsx_comm.recv(got, 0)
        assert got.tolist() == [5.0] * 3


@needs_native
def test_a_receive_of_another_dtype_is_refused():
    run_ranks(other_dtype, 2, backend="dsx")


# - memory that goes away under a call


def freed(rank, n, how, call):
    tensor, out = torch.ones(4_000_000), torch.empty(4_000_000 * n)
    dsx_comm.barrier()
    if rank == 1:
        time.sleep(0.5)
        with pytest.raises(
            dsx_comm.errors.CommAbortedError, match="on rank 0 the memory of a tensor was freed or moved"
        ):
            dist.all_reduce(tensor) if call == "all_reduce" else dist.all_gather_single(out, tensor)
        return
    if call == "all_reduce":
        work = dist.all_reduce(tensor, async_op=True)
    else:
        work = dist.all_gather_single(out, tensor, async_op=True)
    time.sleep(0.1)
    if how == "resize":
        tensor.untyped_storage().resize_(0)
    elif how == "grow":
        tensor.untyped_storage().resize_(32_000_000)
    elif how == "resize the output":
        out.untyped_storage().resize_(0)
    with pytest.raises(dsx_comm.errors.CommAbortedError, match="on rank 0 the memory of a tensor was freed or moved"):
        work.wait()


@needs_native
@pytest.mark.parametrize(
    "how, call", [("resize", "all_reduce"), ("grow", "all_reduce"), ("resize the output", "all_gather")]
)
def test_memory_that_is_freed_under_a_call_is_named(how, call):
    run_ranks(freed, 2, how, call, backend="dsx")


def replaced(rank, n):
    """`tensor.data = other` frees nothing that a call still uses."""
    tensor = torch.full((4_000_000,), rank + 1.0)
    dsx_comm.barrier()
    if rank == 1:
        time.sleep(0.3)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        return
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(0.1)
    tensor.data = torch.empty(0)
    work.wait()


@needs_native
def test_data_that_is_replaced_under_a_call_stays_alive():
    run_ranks(replaced, 2, backend="dsx")


def freed_under_a_send(rank, n):
    tensor = torch.ones(4_000_000)  # much more than a mailbox holds
    dsx_comm.barrier()
    if rank == 0:
        work = dist.isend(tensor, 1)
        time.sleep(0.1)
        tensor.untyped_storage().resize_(0)
        with pytest.raises(
            dsx_comm.errors.CommAbortedError, match="send to rank 1: the memory of the tensor was freed or moved"
        ):
            work.wait()
    else:
        time.sleep(0.4)
        with pytest.raises(dsx_comm.errors.CommAbortedError, match="freed or moved"):
            dist.recv(tensor, 0)


@needs_native
def test_memory_that_is_freed_under_a_send_is_named():
    run_ranks(freed_under_a_send, 2, backend="dsx")


# - groups that are given up, destroyed, or inherited


def given_up(rank, n):
    """With looks an hour apart only the one who gives up can wake the others."""
    group = dsx_comm.new_group(options=dsx_comm.ShmOptions(look_seconds=3600.0))
    calls = [
        lambda: dist.all_reduce(torch.ones(3), group=group),
        lambda: dist.recv(torch.ones(3), 0, group=group),
        lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
    ]
    for number, call in enumerate(calls):
        group = dsx_comm.new_group(options=dsx_comm.ShmOptions(look_seconds=3600.0))
        dsx_comm.barrier()
        if rank == 0:
            time.sleep(0.2)  # the other one sleeps by now
            group.abort(f"rank 0 has had enough of {number}")
        else:
            with pytest.raises(dsx_comm.errors.CommAbortedError, match=f"enough of {number}"):
                call()
    dsx_comm.barrier()


@needs_native
def test_giving_up_a_group_wakes_those_who_sleep():
    run_ranks(given_up, 2, backend="dsx", timeout=30)


def destroyed_twice(rank, n):
    group = dsx_comm.new_group()
    dsx_comm.barrier(group)
    dsx_comm.destroy_process_group(group)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="was destroyed"):
        dsx_comm.destroy_process_group(group)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="was destroyed"):
        dsx_comm.barrier(group)
    dsx_comm.barrier()
    dsx_comm.destroy_process_group()
    dsx_comm.destroy_process_group()  # as in a `finally` after the end of a program
    with pytest.raises(dsx_comm.CommError, match="there is no process group"):
        dsx_comm.barrier()
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="was destroyed"):
        dsx_comm.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_destroying_twice(backend):
    run_ranks(destroyed_twice, 2, backend=backend)


def descriptors(rank, n):
    memory = dsx_comm.empty(1000)
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if "dsx-comm" in target:
            found[target] = os.get_inheritable(int(name))
    assert found and not any(found.values()), found
    assert memory.numel()


@needs_native
def test_programs_that_a_rank_starts_do_not_inherit_the_memory():
    run_ranks(descriptors, 2, backend="dsx")


def no_group(rank, world):
    for ask in (dsx_comm.get_rank, dsx_comm.get_world_size, dsx_comm.barrier):
        with pytest.raises(dsx_comm.errors.CommArgumentError, match="got int, expected a process group or None"):
            ask(2)
    single = torch.distributed.new_group([0])
    assert (dsx_comm.get_rank(single), dsx_comm.get_world_size(single)) == ((0, 1) if rank == 0 else (-1, -1))


def test_what_is_no_group_is_refused():
    run_ranks(no_group, 2)
