import dsx_comm
import pytest
import torch
import torch.distributed as dist
from dsx_comm import object_tree
from dsx_testkit import run_ranks


def objects(rank, n):
    for src in range(n):
        values = [f"from {src}", {"n": src}, None] if rank == src else [None, None, "old"]
        dsx_comm.broadcast_object_list(values, src)
        assert values == [f"from {src}", {"n": src}, None]
        got = [None] * n if rank == src else None
        dsx_comm.gather_object(("object", rank), got, src)
        assert got is None or got == [("object", r) for r in range(n)]
        out = [None]
        dsx_comm.scatter_object_list(out, [b"x" * r for r in range(n)] if rank == src else None, src)
        assert out == [b"x" * rank]
    got = [None] * n
    dsx_comm.all_gather_object(got, torch.full((rank,), rank))
    assert [t.tolist() for t in got] == [[r] * r for r in range(n)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_object_collectives(world_size):
    run_ranks(objects, world_size)


def ring(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        mine, got = torch.full((5,), rank % 2, dtype=dtype), torch.empty(5, dtype=dtype)
        sending = dsx_comm.isend(mine, right, tag=3)
        receiving = dsx_comm.irecv(got, left, tag=3)  # a blocking irecv or isend could not get here
        assert sending.wait() and receiving.wait()
        assert torch.equal(got, torch.full((5,), left % 2, dtype=dtype))
    mine, got = torch.tensor([float(rank)]), torch.empty(1)
    ops = [dsx_comm.P2POp(dsx_comm.isend, mine, right), dsx_comm.P2POp(dist.irecv, got, left)]
    with dsx_comm.count_traffic() as t:
        for handle in dsx_comm.batch_isend_irecv(ops):
            handle.wait()
    assert got.item() == left and t.sent_bytes("batch_isend_irecv") == 4
    if rank == 0:
        dsx_comm.send(torch.tensor([7, 8]), 1)
    if rank == 1:
        pair = torch.zeros(2, dtype=torch.int64)
        assert dsx_comm.recv(pair, 0) == 0
        assert pair.tolist() == [7, 8]


@pytest.mark.parametrize("world_size", [2, 3])
def test_point_to_point(world_size):
    run_ranks(ring, world_size)


def two_tags(rank, n):
    a, b = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        handles = [dsx_comm.isend(torch.tensor([1.0]), 1, tag=1), dsx_comm.isend(torch.tensor([2.0]), 1, tag=2)]
    else:
        handles = [dsx_comm.irecv(b, 0, tag=2), dsx_comm.irecv(a, 0, tag=1)]
    for handle in handles:
        handle.wait()
    return a.item(), b.item()


def test_tags_match_sends_with_receives():
    assert run_ranks(two_tags, 2)[1] == (1.0, 2.0)


def bad_p2p(rank, n):
    t = torch.ones(4)
    for call, message in [
        (lambda: dsx_comm.P2POp(print, t, 1 - rank), "expected dsx_comm.isend or"),
        (lambda: dsx_comm.batch_isend_irecv([]), "empty list"),
        (lambda: dsx_comm.isend(t[::2], 1 - rank), "not contiguous"),
        (lambda: dsx_comm.isend(t, 1 - rank, tag=-1), "tag: got -1"),
    ]:
        with pytest.raises(dsx_comm.errors.CommArgumentError, match=message):
            call()


def test_point_to_point_mistakes_are_named():
    run_ranks(bad_p2p, 2)


def coalesced(rank, n):
    tensors = [
        torch.full((3, 2), float(rank)),
        torch.full((5,), rank, dtype=torch.bfloat16),
        torch.full((1,), float(rank)),
    ]
    strided = torch.zeros(4, 2)[:, 0]
    total = sum(range(n))
    dsx_comm.all_reduce_coalesced([*tensors, strided.add_(rank)])
    assert all((t == total).all() for t in [*tensors, strided])
    handle = dsx_comm.all_reduce_coalesced(tensors, dsx_comm.ReduceOp.AVG, async_op=True)
    handle.wait()
    assert all((t.float() - total).abs().max() < 1e-6 for t in tensors)
    sources = [torch.tensor([float(rank)]), torch.tensor([rank, -rank])]
    outputs = [torch.empty(n), torch.empty(2 * n, dtype=torch.int64)]
    dsx_comm.all_gather_coalesced(outputs, sources, async_op=True).wait()
    assert outputs[0].tolist() == list(range(n))
    assert outputs[1].tolist() == [s * r for r in range(n) for s in (1, -1)]
    parts = [torch.empty(1), torch.empty(2)]
    dsx_comm.coalesced.reduce_scatter_coalesced(parts, [torch.arange(float(n)), torch.ones(2 * n)])
    assert parts[0].item() == n * rank and parts[1].tolist() == [n, n]
    t = torch.tensor([1.0 + rank])
    dsx_comm.inference_all_reduce(t)
    assert t.item() == total + n
    assert dsx_comm.has_all_gather_into_tensor() and dsx_comm.has_reduce_scatter_tensor()
    assert dsx_comm.has_all_reduce_coalesced() and dsx_comm.has_coalescing_manager()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalesced_forms(world_size):
    run_ranks(coalesced, world_size)


def lonely(rank, n):
    from datetime import timedelta

    if rank == 1:
        return
    with pytest.raises(RuntimeError, match=r"(?s)[Rr]ank.* 1"):
        dsx_comm.monitored_barrier(timeout=timedelta(seconds=0.5))


def test_monitored_barrier_names_the_missing_rank():
    run_ranks(lonely, 2)


def by_group_ranks(rank, n):
    group = dsx_comm.new_group([2, 0])  # its rank 0 is rank 2, its rank 1 rank 0
    if rank == 1:
        return
    first, place = rank == 2, 0 if rank == 2 else 1
    tensor = torch.tensor([float(rank)])
    dsx_comm.broadcast(tensor, group=group, group_src=1)
    assert tensor.item() == 0.0
    tensor = torch.tensor([rank + 1.0])
    dsx_comm.reduce(tensor, group=group, group_dst=0)
    assert not first or tensor.item() == 4.0
    rows = [torch.empty(1), torch.empty(1)] if first else None
    dsx_comm.gather(torch.tensor([float(rank)]), rows, group=group, group_dst=0)
    assert rows is None or [r.item() for r in rows] == [2.0, 0.0]
    dsx_comm.scatter(tensor, None if first else [torch.tensor([5.0]), torch.tensor([6.0])], group=group, group_src=1)
    assert tensor.item() == 5.0 + place
    other = torch.empty(1)
    dsx_comm.batch_isend_irecv(
        [
            dsx_comm.P2POp(dsx_comm.isend, tensor, group=group, group_peer=1 - place),
            dsx_comm.P2POp(dsx_comm.irecv, other, group=group, group_peer=1 - place),
        ]
    )[1].wait()
    assert other.item() == 6.0 - place
    if first:
        dsx_comm.send(tensor, group=group, group_dst=1)
        dsx_comm.isend(tensor, group=group, group_dst=1).wait()
    else:
        assert dsx_comm.recv(other, group=group, group_src=0) == 2 and other.item() == 5.0
        dsx_comm.irecv(other.zero_(), group=group, group_src=0).wait()
        assert other.item() == 5.0
    objects = [rank]
    dsx_comm.broadcast_object_list(objects, group=group, group_src=0)
    assert objects == [2]
    found = [None, None] if first else None
    dsx_comm.gather_object(rank, found, group=group, group_dst=0)
    assert found is None or found == [2, 0]
    dsx_comm.scatter_object_list(objects, ["a", "b"] if first else None, group=group, group_src=0)
    assert objects == ["ab"[place]]
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="got src=0 and group_src=0, expected one of them"):
        dsx_comm.broadcast(tensor, 0, group, group_src=0)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="got neither src nor group_src"):
        dsx_comm.broadcast(tensor, group=group)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="group_dst: got 2, expected 0 <= group_dst < 2"):
        dsx_comm.reduce(tensor, group=group, group_dst=2)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_roots_and_peers_may_be_given_by_their_rank_in_the_group(backend):
    run_ranks(by_group_ranks, 3, backend=backend)


def test_arguments_have_torchs_names():
    import inspect

    ours = {"prof", "log_name", "debug", "labels"}
    names = (
        "all_reduce reduce reduce_scatter_tensor reduce_scatter all_gather_into_tensor all_gather gather broadcast"
        " scatter"
    )
    names += (
        " all_to_all_single all_to_all barrier send recv isend irecv all_gather_object broadcast_object_list"
        " gather_object scatter_object_list"
    )
    for name in names.split():
        mine = inspect.signature(getattr(dsx_comm, name)).parameters
        torchs = inspect.signature(inspect.unwrap(getattr(dist, name))).parameters
        wanted = [p for p in torchs if p in mine or p not in ("timeout", "use_batch", "weights_only")]
        assert [p for p in mine if p not in ours and (p in torchs or not p.startswith("group_"))] == wanted, name


@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33, 1024, 10_000])
def test_the_tree_has_every_place_once(size):
    seen = [0]
    for place in range(size):
        at = place + 1
        for child, end in object_tree.children_of(place, size):
            assert object_tree.parent_of(child) == place and child == at < end
            at = end
            seen.append(child)
        assert len(list(object_tree.children_of(place, size))) <= 14
    assert sorted(seen) == list(range(size))


def through_the_tree(rank, world, root):
    found = [None] * world if rank == root else None
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.gather_object({"rank": rank, "text": "x" * 1000 * rank}, found, dst=root)
    joined = dsx_comm.objects.join_objects(f"{rank} ", lambda one, other: one + other, dst=root)
    mine = [None]
    given = [("same" * 1000, r) for r in range(world)] if rank == root else None
    dsx_comm.scatter_object_list(mine, given, src=root)
    shared = [b"y" * 300_000] * world if rank == root else None
    with dsx_comm.count_traffic() as scattered:
        other = [None]
        dsx_comm.scatter_object_list(other, shared, src=root)
    assert mine == [("same" * 1000, rank)] and other == [b"y" * 300_000]
    return found, joined, traffic.by_op()["gather_object"][1], scattered.by_op()["scatter_object_list"][1]


@pytest.mark.parametrize(("world", "root"), [(2, 1), (5, 0), (5, 3)])
def test_objects_go_through_the_tree(world, root):
    """Packed whole: what ranks say nearly alike, or all get, is sent nearly once."""
    results = run_ranks(through_the_tree, world, root, timeout=60)
    assert results[root][0] == [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(world)]
    assert results[root][1] == "".join(f"{(root + place) % world} " for place in range(world))
    assert all(found is None and joined is None for r, (found, joined, *_) in enumerate(results) if r != root)
    assert results[root][2] == 0 and all(0 < sent < 300 for r, (*_, sent, _) in enumerate(results) if r != root)
    assert sum(sent for *_, sent in results) < 4000 * (world - 1)


def joining_fails(rank, world, way):
    """What a rank's error says, and whether it has the cause; and that the group can be used afterwards."""

    def fails(one, other):
        if rank == 2:  # of 5 ranks: on the way, not the root
            raise ZeroDivisionError("no sum")
        return one + other

    joining = fails if way != "pickle" else lambda one, other: one
    obj = (lambda: None) if way == "pickle" and rank == 3 else [rank]
    dsx_comm.objects.MANY_RANKS = 2  # as of many ranks: by the tree
    try:
        if way == "merge":
            dsx_comm.merge_objects(obj, joining)
        else:
            dsx_comm.objects.join_objects(obj, joining, dst=0)
    except dsx_comm.CommError as error:
        said = str(error), type(error.__cause__).__name__
    joined = dsx_comm.objects.join_objects([rank], lambda one, other: one + other, dst=0)
    assert joined == ([*range(world)] if rank == 0 else None)
    return said


@pytest.mark.parametrize(
    ("way", "failing", "words"),
    [
        ("join", 2, "rank 2 failed joining: ZeroDivisionError: no sum"),
        ("merge", 2, "rank 2 failed joining: ZeroDivisionError: no sum"),
        ("pickle", 3, "rank 3 failed pickling its object"),
    ],
)
def test_all_ranks_raise_what_fails_on_the_way(way, failing, words):
    results = run_ranks(joining_fails, 5, way, timeout=60)
    assert len({said for said, _ in results}) == 1 and words in results[0][0]
    causes = [cause for _, cause in results]
    assert causes.pop(failing) in ("ZeroDivisionError", "AttributeError", "PicklingError")
    assert set(causes) == {"NoneType"}


def merged(rank, world, many):
    from dsx_comm import objects

    objects.MANY_RANKS = many
    with dsx_comm.count_traffic() as traffic:
        found = dsx_comm.merge_objects({rank: "x" * 100, "first": rank}, lambda one, other: {**other, **one})
    assert found == {"first": 0, **{r: "x" * 100 for r in range(world)}}
    return set(traffic.by_op())


@pytest.mark.parametrize("many", [2, 32])
def test_merged_objects_are_on_every_rank(many):
    ways = {"join_objects", "broadcast_object_list"} if many == 2 else {"all_gather_object"}
    assert run_ranks(merged, 3, many) == [ways] * 3


def one_speaks(rank, world, speaker):
    from dsx_comm import objects

    objects._EVEN_BYTES = 1000
    said = "x" * 100_000 if rank == speaker else None
    found = [None] * world
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.all_gather_object(found, said)
    assert found == ["x" * 100_000 if other == speaker else None for other in range(world)]
    return traffic.by_op()["all_gather_object"][1]


@pytest.mark.parametrize("speaker", [0, 2])
def test_what_one_rank_says_is_not_sent_by_all(speaker):
    sent = run_ranks(one_speaks, 3, speaker)
    assert all(count < 100 for rank, count in enumerate(sent) if rank != speaker)
    assert 100_000 < sent[speaker] < 100_200
