"""Which bytes lie where: sets of bytes against Python's sets, and the messages that bring them from node to node."""

import itertools
import json
import pickle
import random

import pytest
from dsx_checkpoint import CheckpointCorruptError
from dsx_checkpoint.boxes import Box, Region
from dsx_checkpoint.format import Placed, TensorSpec
from dsx_checkpoint.node_part import NodePart, read_part
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.nodes.transfers import (
    Holders,
    Transfer,
    by_rank,
    in_rounds,
    planned_transfers,
    transfers_between,
)
from dsx_checkpoint.plan import FileStart, plan_file
from dsx_checkpoint.spans import Spans, spans_of_region
from dsx_comm.object_tree import packed


def random_ranges(chosen, count):
    found = []
    for _ in range(chosen.randrange(count)):
        begin = chosen.randrange(40)
        found.append((chosen.choice("ab"), begin, begin + chosen.randrange(12)))
    return found


def as_set(ranges):
    return {(file, byte) for file, begin, end in ranges for byte in range(begin, end)}


def test_operations_are_those_of_sets_and_ranges_do_not_touch():
    chosen = random.Random(0)
    for _ in range(400):
        one, other = random_ranges(chosen, 9), random_ranges(chosen, 9)
        left, right = Spans.of(one), Spans.of(other)
        assert as_set(left) == as_set(one) and left.nbytes == len(as_set(one)) and bool(left) == bool(as_set(one))
        assert as_set(left | right) == as_set(one) | as_set(other)
        assert as_set(left & right) == as_set(one) & as_set(other)
        assert as_set(left - right) == as_set(one) - as_set(other)
        for spans in (left, left | right, left - right):
            assert Spans.of(reversed(list(spans))) == spans  # one form for one set
            for items in spans.by_file.values():
                assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(items))
        for file, begin, end in other:
            assert left.covers(file, begin, end) == (as_set([(file, begin, end)]) <= as_set(one))
        pieces = list(left.pieces(5))
        assert all(end - begin <= 5 for _, begin, end in pieces) and Spans.of(pieces) == left


def test_ranges_travel_as_they_are_and_regular_ones_as_almost_nothing():
    chosen = random.Random(4)
    for _ in range(100):
        ranges = tuple(random_ranges(chosen, 9))
        spans, transfer = Spans.of(ranges), Transfer(1, 2, ranges)
        assert pickle.loads(pickle.dumps(spans)) == spans and pickle.loads(pickle.dumps(transfer)) == transfer
    regular = Spans.of(("f", 1000 * number, 1000 * number + 17) for number in range(10_000))
    assert len(packed(pickle.dumps(regular))) < 2000


def test_a_header_travels_without_the_spaces_that_it_ends_in():
    plan = plan_file("f", [TensorSpec("w", "F32", (1 << 18,))], align=1 << 20)
    assert plan.header_bytes == 1 << 20 and len(pickle.dumps(plan.start)) < 500
    start = pickle.loads(pickle.dumps(plan.start))
    assert start.header == plan.header and len(start.header) == 1 << 20 and start.size == 2 << 20
    assert FileStart.of("f", plan.header, plan.size) == start


def test_a_header_is_the_json_of_its_tensors():
    specs = [TensorSpec('a "name" ü\n', "BF16", (2, 3)), TensorSpec("b", "F32", ()), TensorSpec("c", "BF16", (0,))]
    plan = plan_file("f", specs)
    length = int.from_bytes(plan.header[:8], "little")
    entries = {"__metadata__": {"format": "pt"}}
    for spec, (begin, end) in zip((specs[1], specs[0], specs[2]), ((0, 4), (4, 16), (16, 16))):
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    assert plan.header[8:].rstrip() == json.dumps(entries, separators=(",", ":")).encode()
    assert length == len(plan.header) - 8 and [placed.offset for placed in plan.tensors] == [
        len(plan.header) + begin for begin in (0, 4, 16)
    ]


def test_the_nearest_node_sends_and_a_node_itself_is_nearest():
    held = {0: Spans.of([("f", 0, 10)]), 2: Spans.of([("f", 5, 20)]), 3: Spans.of([("f", 0, 30)])}
    holders = Holders.of(held)
    assert holders.spans == Spans.of([("f", 0, 30)])
    wanted = Spans.of([("f", 3, 25), ("g", 0, 1)])
    nearest = {
        1: {2: [(5, 20)], 3: [(3, 5), (20, 25)]},
        3: {3: [(3, 25)]},
        0: {0: [(3, 10)], 2: [(10, 20)], 3: [(20, 25)]},
    }
    for here, sources in nearest.items():
        found = holders.nearest(wanted, here)
        assert {node: list(spans.by_file["f"]) for node, spans in found.items()} == sources, here


def test_a_region_lies_where_its_runs_lie():
    placed = Placed(TensorSpec("w", "BF16", (4, 6)), "f", 100)
    region = Region(Box((0, 2), (4, 3)), 2, 7)  # the picture in boxes.py: c, then d e f, then g
    assert as_set(spans_of_region(placed, region)) == {
        ("f", 100 + 2 * element + byte) for element in (4, 8, 9, 10, 14) for byte in (0, 1)
    }


def test_what_a_node_has_is_kept_and_damage_is_named(tmp_path):
    part = NodePart("ab" * 32, True, 3.5, 1, 3, Spans.of([("m", 0, 9), ("m", 20, 30), ("o", 4, 5)]))
    part.write(tmp_path)
    assert read_part(tmp_path) == part and read_part(tmp_path / "none") is None
    path = tmp_path / "node.json"
    good = path.read_bytes()
    chosen = random.Random(1)
    for _ in range(200):
        damaged = bytearray(good)
        damaged[chosen.randrange(len(good))] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=r"node\.json"):
            read_part(tmp_path)


def walk(nodes, transfers, have):
    """Carry the messages out as ranks do, each in its own order; what the nodes have then."""
    queues = dict(enumerate(by_rank(nodes, transfers)))
    have, done = list(have), 0
    while any(queues.values()):
        ready = [q[0] for q in queues.values() if q and queues[q[0].source][:1] == queues[q[0].target][:1] == q[:1]]
        assert ready, "two ranks wait for each other"
        for transfer in {id(t): t for t in ready}.values():
            source, target = nodes.of_rank[transfer.source], nodes.of_rank[transfer.target]
            assert not Spans.of(transfer.ranges) - have[source]
            have[target] |= Spans.of(transfer.ranges)
            done += transfer.nbytes
            for rank in (transfer.source, transfer.target):
                queues[rank].pop(0)
    return have, done


def test_every_wish_is_brought_once_and_nobody_waits_for_ever():
    chosen = random.Random(2)
    for _ in range(150):
        labels = [f"n{chosen.randrange(4)}" for _ in range(chosen.randrange(1, 7))]
        nodes = Nodes.labelled(labels)
        have = [Spans.of(random_ranges(chosen, 12)) for _ in range(nodes.count)]
        everywhere = Spans.of(item for spans in have for item in spans)
        wishes = [Spans.of(random_ranges(chosen, 5)) & everywhere for _ in labels]
        missing = [wish - have[node] for wish, node in zip(wishes, nodes.of_rank)]
        transfers = planned_transfers(nodes, missing, Holders.of(dict(enumerate(have))), "ckpt")
        after, sent = walk(nodes, transfers, have)
        wished = [Spans.of(i for r in nodes.ranks_of(node) for i in wishes[r]) for node in range(nodes.count)]
        assert all(not wish - got for wish, got in zip(wished, after))
        assert sent == sum((wish - had).nbytes for wish, had in zip(wished, have))


def test_what_lies_nowhere_is_named():
    nodes = Nodes.labelled(["a", "b"])
    with pytest.raises(CheckpointCorruptError, match="ckpt: 3 bytes that node 1 needs lie on no node"):
        planned_transfers(nodes, [Spans(), Spans.of([("f", 0, 5)])], Holders.of({0: Spans.of([("f", 0, 2)])}), "ckpt")


def test_large_spans_are_cut_and_small_ones_travel_together():
    nodes = Nodes.labelled(["a", "a", "b"])
    spans = Spans.of([("f", 0, 40 << 20), *(("g", 10 * n, 10 * n + 5) for n in range(1000))])
    transfers = transfers_between(nodes, 0, 1, spans)
    assert len(transfers) == 3 and {t.source for t in transfers} == {0, 1} and {t.target for t in transfers} == {2}
    assert Spans.of(item for t in transfers for item in t.ranges) == spans
    assert in_rounds(nodes, transfers) == transfers
