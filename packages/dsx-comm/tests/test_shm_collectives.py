"""The shared-memory transport gives what gloo (or a formula) gives, for any dtype, size, operator, group and layout."""

import itertools
import random

import dsx_comm
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}"),
]

FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]


def values(dtype, numel, seed):
    """Small whole numbers: every operator is exact in every dtype, whatever the order."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) > 0.5
    whole = torch.randint(1, 4, (numel,), generator=generator)
    return torch.complex(whole.double(), -whole.double()).to(dtype) if dtype.is_complex else whole.to(dtype)


def reduced(parts, op):
    """The oracle, in float64 (integers: int64)."""
    if parts[0].is_complex():
        return torch.view_as_complex(reduced([torch.view_as_real(p) for p in parts], op))
    wide = torch.float64 if parts[0].is_floating_point() else torch.int64
    stack = torch.stack([p.to(wide) for p in parts])
    if parts[0].dtype == torch.bool:
        any_, all_ = stack.bool().any(0), stack.bool().all(0)
        return {"SUM": any_, "MAX": any_, "BOR": any_, "PRODUCT": all_, "MIN": all_, "BAND": all_}.get(
            op, stack.sum(0) % 2 == 1
        )
    if op in ("BAND", "BOR", "BXOR"):
        total = stack[0]
        for row in stack[1:]:
            total = {"BAND": total & row, "BOR": total | row, "BXOR": total ^ row}[op]
    else:
        total = {
            "SUM": lambda: stack.sum(0),
            "AVG": lambda: stack.mean(0),
            "PRODUCT": lambda: stack.prod(0),
            "MIN": lambda: stack.amin(0),
            "MAX": lambda: stack.amax(0),
        }[op]()
    return total.to(parts[0].dtype)


def every_dtype_and_operator(rank, n):
    import dsx_comm
    import torch.distributed as dist

    cases = [(d, op) for d in FLOATS for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")]
    cases += [(d, op) for d in [*INTEGERS, "bool"] for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
    cases += [(d, op) for d in ("complex64", "complex128") for op in ("SUM", "AVG")]
    cases += [("float8_e4m3fn", "SUM"), ("float8_e5m2", "MAX"), ("uint16", "SUM"), ("uint32", "BOR")]
    for i, (name, op) in enumerate(cases):
        if (name, op) == ("uint16", "SUM"):
            continue  # torch has no arithmetic for it
        dtype, kind = getattr(torch, name), getattr(dist.ReduceOp, op)
        for numel in (0, 37, 40_000 if op == "SUM" else 1):
            parts = [values(dtype, numel, 1000 * i + r) for r in range(n)]
            if name == "uint32":
                parts = [p.to(torch.int64).to(torch.uint32) for p in parts]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, kind)
            assert same(tensor, reduced(parts, op)), (name, op, numel)
            tensor = parts[rank].clone()
            dist.reduce(tensor, 1, kind)
            if rank == 1:
                assert same(tensor, reduced(parts, op)), ("reduce", name, op, numel)
            whole = [torch.cat([p] * n) for p in parts]
            output = torch.empty_like(parts[0])
            dist.reduce_scatter_tensor(output, whole[rank], kind)
            assert same(output, reduced(parts, op)), ("reduce_scatter", name, op, numel)
            out = torch.empty(n * numel, dtype=dtype)
            dist.all_gather_into_tensor(out, parts[rank])
            assert same(out, torch.cat(parts)), ("all_gather", name, numel)
    assert dsx_comm.get_backend() == "dsx"


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("n", [2, 3])
def test_every_dtype_and_operator_is_exact(n):
    run_ranks(every_dtype_and_operator, n, backend="dsx")


def rank_order(rank, n, stores):
    import torch.distributed as dist

    group = dist.new_group(pg_options=dsx_comm.ShmOptions(stores=stores))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in (1000, 700_001):
            parts = [
                torch.randn(numel, generator=torch.Generator().manual_seed(r)).mul_(10.0 ** (r - 1)).to(dtype)
                for r in range(n)
            ]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, total.to(dtype)), (dtype, numel)
            each = numel // n
            output = torch.empty(each, dtype=dtype)
            dist.reduce_scatter_tensor(output, parts[rank][: each * n].clone(), group=group)
            assert torch.equal(output, total.to(dtype)[rank * each : (rank + 1) * each])
            factor = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, factor, group=group)
            assert torch.equal(tensor, sum_halved(parts).to(dtype))
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
            assert torch.equal(tensor, (total / n).to(dtype))
            gathered = torch.empty(n * numel, dtype=dtype)
            dist.all_gather_into_tensor(gathered, parts[rank], group=group)
            assert torch.equal(gathered, torch.cat(parts))


def sum_halved(parts):
    total = parts[0].float() * 0.5
    for part in parts[1:]:
        total = total + part.float() * 0.5
    return total


@pytest.mark.parametrize("n, stores", [(2, "past"), (3, "past"), (3, "plain")])
def test_floats_are_summed_in_rank_order_and_rounded_once(n, stores):
    run_ranks(rank_order, n, stores, backend="dsx")


def stress(rank, n, seed, rounds):
    """Random calls, each on the same data over gloo and over dsx, in the world and in two overlapping groups."""
    import dsx_comm  # noqa: F401
    import torch.distributed as dist

    generator = random.Random(seed)
    lists = [list(range(n)), [0, n - 1], list(range(1, n)), [n - 1, 0]]
    pairs = [
        (
            ranks,
            dist.new_group(ranks, backend="dsx", sort_ranks=False),
            dist.new_group(ranks, backend="gloo", sort_ranks=False),
        )
        for ranks in lists
    ]
    waiting = []
    for step in range(rounds):
        ranks, ours, theirs = generator.choice(pairs)
        name = generator.choice(["all_reduce", "broadcast", "all_gather", "all_to_all", "gather", "scatter", "p2p"])
        numel = generator.choice([0, 1, 5, 1000, 4097, 70_001, 300_000])
        dtype = generator.choice([torch.float32, torch.float64, torch.int32, torch.uint8, torch.float16])
        later, pause = generator.random() < 0.5, generator.random() < 0.2
        root = generator.choice(ranks)
        if rank not in ranks:
            continue
        m = len(ranks)
        mine = values(dtype, numel, 10_000 * step + rank)
        sizes = [[(a * 7 + b * 3 + numel) % 11 * (numel // 50) for b in range(m)] for a in range(m)]
        me = ranks.index(rank)

        def once(group, asynchronous):
            if name == "all_reduce":
                out = mine.clone()
                return [out], dist.all_reduce(out, group=group, async_op=asynchronous)
            if name == "broadcast":
                out = mine.clone()
                return [out], dist.broadcast(out, root, group=group, async_op=asynchronous)
            if name == "all_gather":
                out = [torch.empty_like(mine) for _ in ranks]
                return out, dist.all_gather(out, mine, group=group, async_op=asynchronous)
            if name == "gather":
                out = [torch.empty_like(mine) for _ in ranks] if rank == root else None
                return out or [], dist.gather(mine, out, root, group=group, async_op=asynchronous)
            if name == "scatter":
                parts = [mine + i for i in range(m)] if rank == root else None
                out = torch.empty_like(mine)
                return [out, *(parts or [])], dist.scatter(out, parts, root, group=group, async_op=asynchronous)
            if name == "all_to_all":
                source = values(dtype, sum(sizes[me]), step * 31 + rank)
                arrives = [sizes[a][me] for a in range(m)]
                out = torch.empty(sum(arrives), dtype=dtype)
                work = dist.all_to_all_single(out, source, arrives, sizes[me], group=group, async_op=asynchronous)
                return [out, source], work
            to, of = ranks[(me + 1) % m], ranks[(me - 1) % m]
            out = torch.empty_like(mine)
            send, get = dist.isend(mine, to, group=group), dist.irecv(out, of, group=group)
            if not asynchronous or group is theirs:  # gloo's handles must not be dropped
                send.wait(), get.wait()
                return [out, mine], None
            return [out, mine], get

        if name == "p2p" and m == 1:
            continue
        expected, work = once(theirs, later)
        if work is not None:
            work.wait()
        got, work = once(ours, later)
        waiting.append((step, name, dtype, numel, expected, got, work))
        if pause or step == rounds - 1:
            check(waiting)
    check(waiting)


def check(waiting):
    for step, name, dtype, numel, expected, got, work in waiting:
        if work is not None:
            work.wait()
            assert work.is_completed()
        for a, b in zip(expected, got):
            assert torch.equal(a, b), (step, name, dtype, numel)
    waiting.clear()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_on_several_groups_agree_with_gloo(seed):
    run_ranks(stress, 4, seed, 120, backend="gloo", timeout=60)


def layouts(rank, n):
    import torch.distributed as dist

    # not contiguous: in, out and in place
    grid = torch.arange(60.0).view(6, 10)
    view = grid.clone().t() + rank
    dist.all_reduce(view)
    assert torch.equal(view, grid.t() * n + sum(range(n)))
    strided = torch.zeros(2 * n * 5)[::2]
    dist.all_gather_into_tensor(strided, torch.full((10,), float(rank))[::2])
    assert torch.equal(strided, torch.arange(n).repeat_interleave(5).float())
    work = dist.broadcast(target := torch.full((4, 4), float(rank)).t()[:, 1:], 1, async_op=True)
    work.wait()
    assert torch.equal(target, torch.ones(4, 3))
    # in place, and overlapping elsewhere than in the own part
    whole = torch.full((n * 1000,), -1.0)
    whole[rank * 1000 : (rank + 1) * 1000] = rank
    dist.all_gather_into_tensor(whole, whole[rank * 1000 : (rank + 1) * 1000])
    assert torch.equal(whole, torch.arange(n).repeat_interleave(1000).float())
    source = (torch.arange(n * 300_000) % 97).float()
    dist.reduce_scatter_tensor(source[rank * 300_000 : (rank + 1) * 300_000], source)
    assert torch.equal(source[rank * 300_000 : (rank + 1) * 300_000], expected_part(rank, n))
    other = (rank + 1) % n
    source = (torch.arange(n * 300_000) % 97).float()
    dist.reduce_scatter_tensor(source[other * 300_000 : (other + 1) * 300_000], source)
    assert torch.equal(source[other * 300_000 : (other + 1) * 300_000], expected_part(rank, n))
    # uneven parts
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.arange(r + 1.0) for r in range(n)])
    assert torch.equal(output, torch.arange(rank + 1.0) * n)
    # sparse tensors go the slow way
    sparse = torch.sparse_coo_tensor([[rank]], [2.0], (n,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.full((n,), 2.0))


def expected_part(rank, n):
    return (torch.arange(n * 300_000) % 97).float()[rank * 300_000 : (rank + 1) * 300_000] * n


def test_layouts_and_aliases():
    run_ranks(layouts, 3, backend="dsx")


def alone(rank, n):
    import dsx_comm
    import torch.distributed as dist

    tensor = torch.arange(5.0)
    dist.all_reduce(tensor)
    out = torch.empty(5)
    dist.all_gather_into_tensor(out, tensor)
    dist.reduce_scatter_tensor(out, tensor, dist.ReduceOp.AVG)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert torch.equal(out, torch.arange(5.0))
    with pytest.raises(dsx_comm.errors.CommArgumentError):
        dist.reduce_scatter_tensor(out, torch.ones(7))


def test_a_world_of_one_works():
    run_ranks(alone, 1, backend="dsx")


def points(rank, n):
    import torch.distributed as dist

    big = torch.full((1_000_000,), float(rank))
    got = torch.empty(1_000_000)
    other = 1 - rank
    send = dist.isend(big, other)  # both send first: more than the mailboxes hold
    dist.recv(got, other)
    send.wait()
    assert torch.equal(got, torch.full_like(got, float(other)))
    if rank == 0:  # tags decide, not the order
        for tag in (1, 2, 3):
            dist.send(torch.full((100_000 * tag,), float(tag)), 1, tag=tag)
        dist.send(torch.arange(3), 1, tag=9)
        dist.send(torch.zeros(0), 1, tag=10)
    else:
        any_source = torch.zeros(3, dtype=torch.int64)
        for tag in (3, 1, 2):
            tensor = torch.empty(100_000 * tag)
            dist.recv(tensor, 0, tag=tag)
            assert torch.equal(tensor, torch.full_like(tensor, float(tag)))
        assert dist.recv(any_source, tag=9) == 0
        assert torch.equal(any_source, torch.arange(3))
        dist.recv(torch.zeros(0), 0, tag=10)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 sent 16 bytes.*rank 1 expects 20"):
            dist.recv(torch.ones(5), 0)


def test_sends_and_receives():
    run_ranks(points, 2, backend="dsx")


def overlap(rank, n):
    """Asynchronous calls go on while the caller computes, and in two groups in opposite order."""
    import time

    import torch.distributed as dist

    one, two = dist.new_group(), dist.new_group()
    first, second = torch.full((200_000,), 1.0), torch.full((200_000,), 2.0)
    order = [(one, first), (two, second)] if rank == 0 else [(two, second), (one, first)]
    works = [dist.all_reduce(t, group=g, async_op=True) for g, t in order]
    for work in reversed(works):
        work.wait()
    assert first[0] == n and second[0] == 2 * n
    tensor = torch.ones(1_000_000)
    work = dist.all_reduce(tensor, async_op=True)
    until = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < until:  # nobody waits: a thread does it
        time.sleep(0.005)
    assert work.is_completed() and tensor[0] == n
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    assert future.wait()[0][0] == n
    dist.all_reduce(torch.ones(100_000), async_op=True)  # dropped: its memory has to last
    dist.barrier()


def test_asynchronous_calls_overlap():
    run_ranks(overlap, 2, backend="dsx")


def disagreements(rank, n):
    import dsx_comm
    import torch.distributed as dist

    sizes = [2, 2] if rank == 0 else [1, 2]
    cases = [
        (lambda: dist.all_reduce(torch.ones(10 + rank)), r"rank 0: all_reduce of 40 bytes.*rank 1: all_reduce of 44"),
        (lambda: dist.all_reduce(torch.ones(500_000 + rank)), "different collectives"),
        (lambda: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank])), "int32"),
        (lambda: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]), "MAX"),
        (lambda: dist.broadcast(torch.ones(4), rank), "root 1"),
        (lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(4)), "rank 1: barrier"),
        (
            lambda: dist.all_to_all_single(torch.empty(4), torch.ones(sum(sizes)), [2, 2], sizes),
            "rank 1 sends 4 bytes to rank 0, which expects 8",
        ),
        (
            lambda: dist.all_to_all_single(torch.empty(3), torch.ones(4), [1, 2], [2, 2]),
            "rank 0 sends 8 bytes to rank 0, which expects 4",
        ),
    ]
    for call, text in cases:
        with pytest.raises(dsx_comm.errors.MismatchError, match=text):
            call()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)  # nothing was exchanged: the group lives on
        assert torch.equal(tensor, torch.full((3,), float(n)))


def test_ranks_that_disagree_are_named():
    run_ranks(disagreements, 2, backend="dsx")


def test_kernels_give_the_same_bits_on_every_instruction_set():
    module = native.module()
    torch.manual_seed(0)
    for dtype, code in ((torch.float32, 0), (torch.bfloat16, 2), (torch.float16, 3), (torch.int32, 7)):
        for count in (1, 7, 1000, 5000):
            parts = [(torch.randn(count) * 100).to(dtype) for _ in range(3)]
            if dtype.is_floating_point:
                for part, special in zip(parts, (float("nan"), float("inf"), 1e-7)):
                    part[count // 2] = special
                    part[0] = 65504.0 if dtype == torch.float16 else 3e38
            outs = []
            for isa in module.isas():
                out = torch.empty_like(parts[0])
                module.reduce(out.data_ptr(), [p.data_ptr() for p in parts], count, code, 0, False, 1.0, isa, False)
                outs.append(out.view(torch.uint8))
            wide = torch.float32 if dtype.is_floating_point else dtype
            expected = ((parts[0].to(wide) + parts[1].to(wide)) + parts[2].to(wide)).to(dtype)
            for out in outs:
                assert torch.equal(out, outs[0])
                assert torch.equal(out.view(dtype).nan_to_num(1.5), expected.nan_to_num(1.5))


def ugly(dtype, numel, seed):
    """Numbers of every size, with NaNs, infinities, zeros of both signs and the ends of the integers."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max, (numel,), generator=generator, dtype=torch.int64).to(dtype)
    numbers = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 9, (numel,), generator=generator)
    for special in (float("nan"), float("inf"), -float("inf"), 0.0, -0.0):
        numbers[torch.rand(numel, generator=generator) < 0.05] = special
    return numbers.to(dtype)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_writing_past_the_cache_changes_no_bit(name):
    module, dtype = native.module(), getattr(torch, name)
    code = [*FLOATS, *INTEGERS].index(name)
    operators = range(4 if dtype.is_floating_point else 7)
    for sources, count, shift in itertools.product((1, 2, 3), (0, 1, 5, 63, 1027, 4100), (0, 1, 3, -1)):
        parts = [ugly(dtype, count + 3, 10 * r + shift)[abs(shift) :][:count] for r in range(sources)]
        for operator, average, isa in itertools.product(operators, (False, True), module.isas()):
            outs = []
            for past_cache in (False, True):
                out = torch.full((count + 8,), 7, dtype=dtype)
                at = out.data_ptr() + (
                    shift * dtype.itemsize if shift >= 0 else 1
                )  # 1: no place for a number of this size
                addresses = [part.data_ptr() for part in parts]
                module.reduce(at, addresses, count, code, operator, average, 1.0, isa, past_cache)
                outs.append(out.view(torch.uint8))
            same_bits = torch.equal(*outs) or torch.equal(*(o.view(dtype).nan_to_num(1.5) for o in outs))
            assert same_bits, (sources, count, shift, operator, average, isa)


def test_all_bit_patterns_of_half_precision_survive():
    module = native.module()
    for dtype, code in ((torch.float16, 3), (torch.bfloat16, 2)):
        bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        values_, zero = bits.view(dtype), torch.zeros(65536, dtype=dtype)
        for isa in module.isas():
            out = torch.empty_like(values_)
            module.reduce(out.data_ptr(), [values_.data_ptr(), zero.data_ptr()], 65536, code, 0, False, 1.0, isa, False)
            expected = (values_.float() + zero.float()).to(dtype)
            same_value = (out == expected) | (out.isnan() & expected.isnan())
            assert same_value.all(), (dtype, isa, bits[~same_value][:5])


def test_status_explains_itself():
    status = dsx_comm.native_status()
    assert status["native"] and status["isa"] in status["isas"] and status["reason"] == ""
