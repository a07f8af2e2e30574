"""Every collective against its definition, computed in float64 from inputs that all ranks can draw themselves."""

import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_testkit import count_calls, run_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8]
R = dsx_comm.ReduceOp


def draw(rank, shape, dtype, salt=0):
    """Rank `rank`'s input: whole numbers, small enough that every dtype holds every sum and product exactly."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def definition(parts, op):
    stack = torch.stack([p.double() for p in parts])
    return {
        "SUM": lambda: stack.sum(0),
        "AVG": lambda: stack.mean(0),
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
    }[op]()


def close(got, want, dtype):
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}.get(dtype, 1e-12)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0.0)


def reductions(rank, n):
    for dtype in DTYPES:
        ops = ["SUM", "PRODUCT", "MIN", "MAX"] + (["AVG"] if dtype.is_floating_point else [])
        for shape in [(3, 5), ()]:
            for op in ops:
                kind = getattr(R, op)
                inputs = [draw(r, shape, dtype) for r in range(n)]
                want = definition(inputs, op)
                for form in (kind, R(kind)):  # the enum and the object that holds it
                    t = inputs[rank].clone()
                    if dtype != torch.int16 or op != "PRODUCT":
                        assert dsx_comm.all_reduce(t, form) is None
                        close(t, want, dtype)
                t = inputs[rank].clone()
                handle = dsx_comm.all_reduce(t, kind, async_op=True)
                handle.wait()
                assert handle.is_completed()
                close(t, want, dtype)
                for dst in range(n):
                    t = inputs[rank].clone()
                    dsx_comm.reduce(t, dst, kind)
                    if rank == dst:
                        close(t, want, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reductions(world_size):
    run_ranks(reductions, world_size)


def scatters(rank, n):
    for dtype in DTYPES:
        for op in ["SUM", "MAX"] + (["AVG"] if dtype.is_floating_point else []):
            for share in (7, 40_000):  # small ones take another road than large ones
                inputs = [draw(r, (n, share), dtype) for r in range(n)]
                want = definition(inputs, op)[rank]
                out = torch.empty(share, dtype=dtype)
                dsx_comm.reduce_scatter_tensor(out, inputs[rank], getattr(R, op))
                close(out, want, dtype)
                whole = inputs[rank].clone()
                handle = dsx_comm.reduce_scatter_tensor(whole[rank], whole, getattr(R, op), async_op=True)
                handle.wait()
                close(whole[rank], want, dtype)
                other = inputs[rank].clone()  # into a part that is not this rank's
                dsx_comm.reduce_scatter_tensor(other[(rank + 1) % n], other, getattr(R, op))
                close(other[(rank + 1) % n], want, dtype)
    uneven = [[draw(r, (p + 1,), torch.float32) for p in range(n)] for r in range(n)]
    out = torch.empty(rank + 1)
    dsx_comm.reduce_scatter(out, uneven[rank])
    close(out, definition([uneven[r][rank] for r in range(n)], "SUM"), torch.float32)
    dsx_comm.reduce_scatter_fn(out, torch.cat([draw(rank, (rank + 1,), torch.float32)] * n)) if n == 1 else None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter(world_size):
    run_ranks(scatters, world_size)


def gathers(rank, n):
    extra = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int8]
    for dtype in DTYPES + extra:
        for share in (6, 70_000):
            inputs = [draw(r, (share,), dtype) for r in range(n)]
            want = torch.cat([i.to(torch.complex128) for i in inputs])
            out = torch.empty(n * share, dtype=dtype)
            dsx_comm.all_gather_into_tensor(out, inputs[rank])
            assert torch.equal(out.to(torch.complex128), want)
            inplace = torch.zeros(n * share).to(dtype)
            part = inplace[rank * share : (rank + 1) * share]
            part.copy_(inputs[rank])
            dsx_comm.allgather_fn(inplace, part, async_op=True).wait()
            assert torch.equal(inplace.to(torch.complex128), want)
            listed = [torch.empty(share, dtype=dtype) for _ in range(n)]
            dsx_comm.all_gather(listed, inputs[rank])
            assert torch.equal(torch.cat(listed).to(torch.complex128), want)
            for root in range(n):
                outs = [torch.empty(share, dtype=dtype) for _ in range(n)] if rank == root else None
                dsx_comm.gather(inputs[rank], outs, root)
                assert outs is None or torch.equal(torch.cat(outs).to(torch.complex128), want)
                got = torch.empty(share, dtype=dtype)
                dsx_comm.scatter(got, inputs if rank == root else None, root)
                assert torch.equal(got.to(torch.complex128), inputs[rank].to(torch.complex128))
                got = inputs[rank].clone()
                dsx_comm.broadcast(got, root)
                assert torch.equal(got.to(torch.complex128), inputs[root].to(torch.complex128))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathers_scatter_and_broadcast(world_size):
    run_ranks(gathers, world_size)


def exchanges(rank, n):
    inputs = [draw(r, (2 * n, 3), torch.bfloat16) for r in range(n)]
    out = torch.empty(2 * n, 3, dtype=torch.bfloat16)
    dsx_comm.all_to_all_single(out, inputs[rank])
    assert torch.equal(out, torch.cat([i[2 * rank : 2 * rank + 2] for i in inputs]))
    # rank r sends (r + p) % 3 rows to rank p: some pieces are empty
    splits = [[(r + p) % 3 for p in range(n)] for r in range(n)]
    inputs = [draw(r, (sum(splits[r]), 2), torch.float32, 1) for r in range(n)]
    receives = [splits[r][rank] for r in range(n)]
    out = torch.empty(sum(receives), 2)
    dsx_comm.all_to_all_single(out, inputs[rank], receives, splits[rank], async_op=True).wait()
    assert torch.equal(out, torch.cat([i.split(s)[rank] for i, s in zip(inputs, splits)]))
    places = [torch.empty(c, 2) for c in receives]
    dsx_comm.all_to_all(places, list(inputs[rank].split(splits[rank])))
    assert torch.equal(torch.cat(places), out)
    handle = dsx_comm.barrier(async_op=True)
    handle.wait()
    dsx_comm.barrier()
    dsx_comm.monitored_barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_to_all_and_barriers(world_size):
    run_ranks(exchanges, world_size)


def odd_tensors(rank, n):
    empty = torch.empty(0)
    dsx_comm.all_reduce(empty)
    dsx_comm.broadcast(empty, 0)
    dsx_comm.all_gather_into_tensor(torch.empty(0), empty, async_op=True).wait()
    dsx_comm.reduce_scatter_tensor(torch.empty(0), empty)
    dsx_comm.all_to_all_single(torch.empty(0), empty)
    dsx_comm.gather(empty, [torch.empty(0)] * n if rank == 0 else None)
    inputs = [draw(r, (6, 4), torch.bfloat16) for r in range(n)]
    view = inputs[rank].clone().t()[::2]
    dsx_comm.all_reduce(view, R.AVG)
    close(view, definition([i.t()[::2] for i in inputs], "AVG"), torch.bfloat16)
    view = inputs[rank].clone().t()
    dsx_comm.broadcast(view, n - 1)
    assert torch.equal(view, inputs[n - 1].t())
    out = torch.empty(n * 24, dtype=torch.bfloat16)
    dsx_comm.all_gather_into_tensor(out, inputs[rank].t())
    assert torch.equal(out, torch.cat([i.t().reshape(-1) for i in inputs]))
    flag = torch.tensor([rank == 0, True])
    dsx_comm.all_reduce(flag, R.BAND)
    assert flag.tolist() == [n == 1, True]
    z = torch.tensor([1 + 1j * rank], dtype=torch.complex64)
    dsx_comm.all_reduce(z, R.AVG)
    assert z.item() == pytest.approx(complex(1, (n - 1) / 2))
    with torch.enable_grad():
        leaf = torch.ones(4, requires_grad=True)
        dsx_comm.broadcast(leaf, 0)
        dsx_comm.all_gather_into_tensor(torch.empty(4 * n), leaf)


@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_strided_boolean_and_complex_tensors(world_size):
    run_ranks(odd_tensors, world_size)


def subgroup(rank, n):
    pairs = [dsx_comm.new_group([2, 0]), dsx_comm.new_group([1])]
    mine = pairs[0] if rank in (0, 2) else pairs[1]
    order = [2, 0] if rank in (0, 2) else [1]
    assert dsx_comm.get_all_ranks_from_group(mine) == order
    assert dsx_comm.get_rank(mine) == order.index(rank) and dsx_comm.get_world_size(mine) == len(order)
    assert dsx_comm.get_global_rank(mine, 0) == order[0] and dsx_comm.get_group_rank(mine, rank) == order.index(rank)
    out = torch.empty(len(order))
    dsx_comm.all_gather_into_tensor(out, torch.tensor([float(rank)]), mine)
    assert out.tolist() == order
    part = torch.empty(1)
    dsx_comm.reduce_scatter_tensor(part, torch.arange(float(len(order))), R.SUM, mine)
    assert part.item() == len(order) * order.index(rank)
    t = torch.tensor([float(rank)])
    dsx_comm.broadcast(t, order[-1], mine)
    assert t.item() == order[-1]
    got: list = [None] * len(order)
    dsx_comm.all_gather_object(got, ("r", rank), mine)
    assert got == [("r", r) for r in order]
    if rank == 1:
        with pytest.raises(dsx_comm.errors.CommArgumentError, match="rank 1 is not a member"):
            dsx_comm.all_reduce(t, group=pairs[0])
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="src: got global rank"):
        dsx_comm.broadcast(t, 1 if rank != 1 else 0, mine)


def test_subgroups_keep_their_order_and_use_global_ranks():
    run_ranks(subgroup, 3)


def wide_sums(rank, n):
    # in bf16 256 + 1 = 256: summed there one by one the ones would be lost
    value = 256.0 if rank == 0 else 1.0
    got = []
    for form in ("all_reduce", "reduce", "reduce_scatter"):
        t = torch.full((n,), value, dtype=torch.bfloat16)
        if form == "all_reduce":
            dsx_comm.all_reduce(t)
        elif form == "reduce":
            dsx_comm.reduce(t, 0)
        else:
            dsx_comm.reduce_scatter_tensor(t[:1], t.clone())
        got.append(t[0].item())
    return got


def test_16_bit_sums_are_accumulated_in_float32():
    got = run_ranks(wide_sums, 3)
    assert [g[0] for g in got] == [258.0] * 3
    assert got[0][1] == 258.0
    assert [g[2] for g in got] == [258.0] * 3


def same_bits(rank, n, share):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(n * share, generator=generator)
    out = torch.empty(share)
    dsx_comm.reduce_scatter_tensor(out, x)
    whole = torch.empty(n * share)
    dsx_comm.all_gather_into_tensor(whole, out)
    everyone = [torch.randn(n * share, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    want = everyone[0].clone()
    for other in everyone[1:]:
        want += other
    assert torch.equal(whole, want)


@pytest.mark.parametrize("share", [1000, 50_000])
def test_sums_are_taken_in_rank_order_bit_by_bit(share):
    run_ranks(same_bits, 3, share)


def outstanding(rank, n):
    sizes = [1, 50_000, 7, 20_000, 300]
    reduced, gathered, halves = [], [], []
    for k, size in enumerate(sizes):
        source = torch.full((n, size), float(rank + k))
        out = torch.empty(size)
        reduced.append((dsx_comm.reduce_scatter_tensor(out, source, async_op=True), out, k))
        whole = torch.empty(n * size)
        gathered.append(
            (dsx_comm.all_gather_into_tensor(whole, torch.full((size,), rank * 10.0 + k), async_op=True), whole, k)
        )
        short = torch.full((size,), rank + k, dtype=torch.bfloat16)
        halves.append((dsx_comm.all_reduce(short, async_op=True), short, k))
    # ranks wait in opposite orders
    everything = [*reduced, *gathered, *halves]
    for handle, _, _ in everything if rank % 2 else reversed(everything):
        handle.wait()
    for _, out, k in reduced:
        assert (out == sum(r + k for r in range(n))).all()
    for _, whole, k in gathered:
        assert torch.equal(whole.view(n, -1)[:, 0], torch.tensor([r * 10.0 + k for r in range(n)]))
    for _, short, k in halves:
        assert (short == sum(r + k for r in range(n))).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_operations_may_be_outstanding_and_waited_for_in_any_order(world_size):
    run_ranks(outstanding, world_size)


def polled(rank, n):
    out, short = torch.empty(1000), torch.full((1000,), 1.0, dtype=torch.bfloat16)
    handles = [
        dsx_comm.reduce_scatter_tensor(out, torch.ones(n * 1000), async_op=True),
        dsx_comm.all_reduce(short, async_op=True),
        dsx_comm.all_reduce(torch.ones(3), R.AVG, async_op=True),
    ]
    while not all([h.is_completed() for h in handles]):
        pass
    assert (out == n).all() and (short == n).all()
    assert all(h.is_success() and h.exception() is None for h in handles)


def test_polling_completes_an_operation():
    run_ranks(polled, 2)


def left_to_gloo(rank, n):
    import dsx_comm.composed as composed

    composed.DIRECT_RANKS, composed.DIRECT_BYTES = 1, 1 << 20  # as if there were many ranks
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [draw(r, (n, 5), dtype) for r in range(n)]
        out = torch.empty(5, dtype=dtype)
        dsx_comm.reduce_scatter_tensor(out, inputs[rank], R.AVG)
        close(out, definition(inputs, "AVG")[rank], dtype)
        whole = torch.empty(5 * n, dtype=dtype)
        dsx_comm.all_gather_into_tensor(whole, out)
        close(whole.view(n, 5), definition(inputs, "AVG"), dtype)
        t = inputs[rank].clone()
        dsx_comm.all_reduce(t, R.AVG)
        close(t, definition(inputs, "AVG"), dtype)


def test_small_messages_between_many_ranks_are_left_to_gloo():
    run_ranks(left_to_gloo, 3)


def failing_peer(rank, n):
    handle = dsx_comm.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * n), async_op=True) if rank == 0 else None
    if rank == 1:
        return "left"
    from datetime import timedelta

    with pytest.raises(RuntimeError):
        handle.wait(timedelta(seconds=0.3))
    assert handle.exception() is not None and not handle.is_success()
    with pytest.raises(RuntimeError):
        handle.wait()
    return "raised"


def test_a_rank_that_does_not_come_makes_wait_raise():
    assert run_ranks(failing_peer, 2) == ["raised", "left"]


def mistakes(rank, n):
    E = dsx_comm.errors.CommArgumentError
    one, two = torch.ones(1), torch.ones(2)
    cases = [
        (
            lambda: dsx_comm.all_gather_into_tensor(torch.empty(3), one),
            r"output has 3 elements, input 1; expected output = 2",
        ),
        (
            lambda: dsx_comm.all_gather_into_tensor(two.double(), one),
            r"output is torch\.float64 on cpu, input torch\.float32",
        ),
        (lambda: dsx_comm.all_gather_into_tensor(torch.empty(4).view(2, 2).t(), two), "is not contiguous"),
        (
            lambda: (lambda o: dsx_comm.all_gather_into_tensor(o, o[1 - rank]))(torch.ones(2, 3)),
            "input overlaps output",
        ),
        (
            lambda: dsx_comm.reduce_scatter_tensor(one, torch.ones(3)),
            r"input has 3 elements, output 1; expected input = 2",
        ),
        (lambda: dsx_comm.reduce_scatter(one, [one]), r"got 1 tensors, expected a list of 2"),
        (lambda: dsx_comm.reduce_scatter(one, [two, two]), r"input_list\[\d\] has 2 elements, expected 1"),
        (lambda: dsx_comm.all_gather([one, two], one), r"tensor_list\[1\] is \(2,\)"),
        (lambda: dsx_comm.all_reduce([1.0]), "got list, expected a tensor"),
        (lambda: dsx_comm.all_reduce(one.to_sparse()), "expected a dense tensor"),
        (lambda: dsx_comm.all_reduce(one, "sum"), "expected a ReduceOp"),
        (lambda: dsx_comm.all_reduce(one.long(), R.AVG), r"AVG of torch\.int64 is not defined"),
        (lambda: dsx_comm.all_reduce(one, R.BAND), "BAND needs integers"),
        (lambda: dsx_comm.all_reduce(one, group="world"), "group: got str"),
        (lambda: dsx_comm.broadcast(one, 2), r"src: got global rank 2, expected a member of the group \[0, 1\]"),
        (lambda: dsx_comm.all_to_all_single(torch.empty(3), torch.ones(3)), "2 .group size. does not divide"),
        (lambda: dsx_comm.all_to_all_single(two, two, [1, 2], [1, 1]), "output_split_sizes: got"),
        (
            lambda: dsx_comm.gather(one, [one] if rank == 0 else None) if rank == 0 else dsx_comm.gather(one, [one]),
            "gather_list",
        ),
        (lambda: dsx_comm.send(one, rank), "would talk to itself"),
        (lambda: dsx_comm.new_group([0, 0]), "expected distinct ranks"),
        (lambda: dsx_comm.new_group([0, 7]), r"in \[0, 2\)"),
        (lambda: dsx_comm.all_reduce_coalesced([]), "empty list"),
        (lambda: dsx_comm.all_gather_object([None], 1), "got 1 entries, expected a list of 2"),
        (lambda: dsx_comm.initialize_mesh_device((3,), ("data",)), "product of 2"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(E, match=message):
            call()
    with pytest.raises(TypeError, match=r"unexpected keyword argument.*colour"):
        dsx_comm.all_reduce(one, colour="red")
    dsx_comm.barrier()  # nothing of the above has left a message on the wire


def test_mistakes_are_named_before_anything_is_sent():
    run_ranks(mistakes, 2)


def test_without_a_process_group_the_error_says_what_to_call():
    assert not dsx_comm.is_initialized() and dsx_comm.is_available()
    for call in (dsx_comm.barrier, dsx_comm.get_rank, lambda: dsx_comm.all_reduce(torch.ones(1))):
        with pytest.raises(dsx_comm.CommError, match="init_distributed"):
            call()
    assert not dist.is_initialized()


def calls_of(rank, world, op):
    tensor, whole = torch.ones(256), torch.ones(256 * world)
    dsx_comm.check_first_calls(0)
    counts = []
    for call in (lambda: dsx_comm.all_reduce(tensor, op), lambda: dsx_comm.reduce_scatter_tensor(tensor, whole, op)):
        call()
        with count_calls("dsx_comm") as found:
            call()
        counts.append(found.total)
    return counts


def test_a_mean_on_a_backend_without_one_is_a_sum_and_a_division():
    sums, means = (
        run_ranks(calls_of, 2, op, backend="gloo")[0] for op in (dsx_comm.ReduceOp.SUM, dsx_comm.ReduceOp.AVG)
    )
    assert all(mean <= plain + 3 for plain, mean in zip(sums, means)), (sums, means)
