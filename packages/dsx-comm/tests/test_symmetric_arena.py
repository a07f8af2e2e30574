"""`SymmetricArena`: each rank takes and gives tensors as it likes, collectives find them, nothing is lost."""

import dsx_comm
import pytest
import torch
from dsx_comm.arena import Ranges
from dsx_comm.shm import native
from dsx_testkit import run_ranks

needs_native = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
PAGE = 4096


def at_different_places(rank, n):
    arena = dsx_comm.SymmetricArena(1 << 22)
    before = [arena.take(3000 * (k + 1)) for k in range(rank)]  # so that the ranks' tensors lie at different offsets
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        numel = n * 5001
        parts = [((torch.arange(numel) + 3 * r) % 40).to(dtype) for r in range(n)]
        total = torch.stack([p.double() for p in parts]).sum(0).to(dtype)
        mine = arena.take(n, 5001, dtype=dtype)
        assert mine.shape == (n, 5001) and mine.dtype == dtype and dsx_comm.is_symmetric(mine)
        assert mine.untyped_storage().nbytes() == numel * dtype.itemsize  # its own, not that of the arena
        mine.view(-1).copy_(parts[rank])
        result = torch.empty(5001, dtype=dtype)
        dsx_comm.reduce_scatter_tensor(result, mine)
        assert torch.equal(result, total.view(n, -1)[rank])
        gathered = torch.empty(n * numel, dtype=dtype)
        dsx_comm.all_gather_into_tensor(gathered, mine.view(-1))
        assert torch.equal(gathered, torch.cat(parts))
        dsx_comm.all_reduce(mine)
        assert torch.equal(mine.view(-1), total)
        arena.give(mine)
    for tensor in before:
        arena.give(tensor)
    return arena.idle_bytes()


@needs_native
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_need_not_take_alike(n):
    run_ranks(at_different_places, n, backend="dsx")


def shared_pages():
    """Bytes of symmetric memory of which this process has pages."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ")[0]:
                inside = "dsx-comm-symmetric" in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def pages(rank, n):
    arena = dsx_comm.SymmetricArena(100 * PAGE)
    assert shared_pages() == arena.idle_bytes() == 0  # address space
    a, b, c = (arena.take(size * PAGE, dtype=torch.uint8).fill_(size) for size in (10, 20, 30))
    assert shared_pages() == 60 * PAGE and arena.idle_bytes() == 0
    arena.give(a)
    arena.give(c)
    assert arena.idle_bytes() == 40 * PAGE
    arena.trim(keep=40 * PAGE + 1)  # the first tensor's pages and the first ten of the third
    assert shared_pages() == 40 * PAGE and arena.idle_bytes() == 20 * PAGE
    assert b.eq(20).all()
    arena.trim()
    assert shared_pages() == 20 * PAGE
    assert b.eq(20).all()
    arena.give(b)
    whole = arena.take(100 * PAGE, dtype=torch.uint8)  # what was given back is one piece again
    assert dsx_comm.is_symmetric(whole)
    more = arena.take(5)  # full
    assert not dsx_comm.is_symmetric(more)
    arena.give(more)
    arena.give(whole)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="once"):
        arena.give(whole)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="once"):
        arena.give(arena.take(1000)[500:])
    assert arena.take(0).numel() == 0
    for size in (-1, (2, -3)):
        with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
            arena.take(size)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="at least 0"):
        dsx_comm.SymmetricArena(-1)
    kept = arena.take(1000).fill_(2.5)
    del arena, whole, a, b, c
    assert kept.eq(2.5).all()  # a tensor holds the memory
    del kept
    dsx_comm.barrier()
    return shared_pages()


@needs_native
def test_pages_room_and_wrong_use():
    assert run_ranks(pages, 2, backend="dsx") == [0, 0]


def no_memory(rank, n, limit):
    import resource

    if rank == n - 1:  # one rank's trouble is everybody's
        resource.setrlimit(*limit)
    with pytest.raises(dsx_comm.SymmetricMemoryError, match=f"rank {n - 1}"):
        dsx_comm.SymmetricArena(1 << 40)
    with pytest.raises(dsx_comm.SymmetricMemoryError, match="different sizes"):
        dsx_comm.SymmetricArena(PAGE * (rank + 1))
    dsx_comm.barrier()


@needs_native
def test_all_ranks_learn_that_there_is_no_memory():
    import resource

    run_ranks(no_memory, 2, (resource.RLIMIT_AS, (1 << 39, 1 << 39)), backend="dsx")


def ordinary(rank, n):
    arena = dsx_comm.SymmetricArena(1 << 20)
    tensor = arena.take(3, 4, dtype=torch.float64)
    assert tensor.shape == (3, 4) and not dsx_comm.is_symmetric(tensor)
    arena.give(tensor)
    arena.give(tensor)  # just dropped
    arena.trim()
    assert arena.idle_bytes() == 0


@pytest.mark.parametrize("backend, n", [("gloo", 2), ("gloo", 1), ("dsx", 1)])
def test_other_groups_get_ordinary_tensors(backend, n):
    run_ranks(ordinary, n, backend=backend)


def test_ranges_against_a_list_of_cells():
    """Ten thousand random takings and givings: no two ranges overlap, and what does not fit would not fit anywhere."""
    import random

    choose, size = random.Random(0), 60
    ranges, cells, taken = Ranges(size), [0] * size, {}
    for turn in range(1, 10_001):
        if taken and choose.random() < 0.5:
            begin = choose.choice(list(taken))
            ranges.give(begin)
            for at in range(begin, begin + taken.pop(begin)):
                cells[at] = 0
        else:
            length = choose.randint(1, 15)
            room = next((at for at in range(size - length + 1) if not any(cells[at : at + length])), None)
            begin = ranges.take(length)
            assert begin == room  # the first that fits
            if begin is not None:
                cells[begin : begin + length] = [turn] * length
                taken[begin] = length
        assert ranges.end == max((begin + length for begin, length in taken.items()), default=0)
        assert sum(end - begin for begin, end in ranges.free) == cells.count(0)
