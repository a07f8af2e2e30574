"""Damage on the disks of nodes: found and judged from hashes that are joined on their way to rank 0, for any places of
copies and any damage.
"""

import itertools
import pickle
import random
import zlib
from functools import partial

import pytest
from dsx_checkpoint.crc import Chunks, register_of
from dsx_checkpoint.format import Entry, FileEntry, Index, Placed, TensorSpec
from dsx_checkpoint.nodes.copies import Layout
from dsx_checkpoint.nodes.repairing import Judge, Looked, Part, judge, shares_of_node
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.nodes.transfers import Holders
from dsx_checkpoint.spans import Spans, unpack_ranges
from dsx_comm.object_tree import children_of


def made_up(values, header, sizes, chunk):
    """An index of one file of these bytes: a header, and tensors of these sizes."""
    entries, at = {}, header
    for number, size in enumerate(sizes):
        data = values[at : at + size]
        crcs = [zlib.crc32(data[first : first + chunk]) for first in range(0, size, chunk)]
        placed = Placed(TensorSpec(f"w{number}", "U8", (size,)), "f", at)
        entries[f"w{number}"] = Entry(placed, Chunks.grid(size, chunk, crcs))
        at += size
    files = {"f": FileEntry(len(values), header, zlib.crc32(values[:header]))}
    return Index(files, {"model": entries, "optimizer": {}, "client": {}}, {}, (), {}, {})


def register(layout, item, data):
    registers = {}
    layout.add(registers, item, memoryview(bytearray(data)))
    (found,) = registers.values()
    return found


def expected_by(layout):
    return lambda key: layout.as_bytes[key[:2]].chunks.expected(key[2])


def cut_into_parts(layout, cuts):
    return [
        Part("f", first, stop, key, nodes)
        for (begin, end), nodes in cuts
        for key, first, stop in layout.parts("f", begin, end)
    ]


def test_those_are_right_with_which_a_chunk_has_its_hash():
    chosen = random.Random(4)
    for _ in range(300):
        size, chunk = chosen.randrange(1, 60), chosen.randrange(1, 25)
        values = chosen.randbytes(size)
        edges = sorted({0, size, *(chosen.randrange(size + 1) for _ in range(3))})
        cuts = [
            (pair, tuple(sorted(chosen.sample(range(4), chosen.randrange(1, 4))))) for pair in itertools.pairwise(edges)
        ]
        layout = Layout.of_index(made_up(values, 0, [size], chunk))
        parts = cut_into_parts(layout, cuts)
        bad, seen = set(), []
        for number, part in enumerate(parts):
            seen.append({})
            for node in part.nodes:
                data = bytearray(values[part.begin : part.end])
                fate = chosen.random()
                if fate < 0.15:
                    data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
                    bad.add((number, node))
                seen[-1][node] = register(layout, part.range, data)
                if fate > 0.95:
                    seen[-1][node] = None
                    bad.add((number, node))
        damage = judge(parts, seen, expected_by(layout))
        hopeless = {part.chunk for n, part in enumerate(parts) if all((n, node) in bad for node in part.nodes)}
        lost = Spans.of(part.range for part in parts if part.chunk in hopeless)
        assert damage.lost == lost
        for node in range(4):
            wrong = [p.range for n, p in enumerate(parts) if (n, node) in bad and p.chunk not in hopeless]
            by_source = damage.wrong.get(node, {})
            assert Spans.of(item for spans in by_source.values() for item in spans) == Spans.of(wrong)
            for source, spans in by_source.items():
                for n, part in enumerate(parts):
                    if Spans.of([part.range]) & spans:
                        assert source in part.nodes and (n, source) not in bad


def test_a_register_is_that_of_its_bytes():
    layout = Layout.of_index(made_up(bytes(range(50)), 7, [43], 20))
    parts = cut_into_parts(layout, [((0, 50), (0,))])
    assert [(part.begin, part.end) for part in parts] == [(0, 7), (7, 27), (27, 47), (47, 50)]
    for part in parts:
        data = bytes(range(50))[part.begin : part.end]
        assert register(layout, part.range, data) == register_of(zlib.crc32(data), len(data))
        assert register(layout, part.range, data) == expected_by(layout)(part.chunk)


# - All of it, with files


class Cluster:
    """Nodes of one to three ranks with a folder each, and what they hold of one file."""

    def __init__(self, root, chosen, copies):
        header, sizes = chosen.randrange(1, 9), [chosen.randrange(1, 60) for _ in range(chosen.randrange(1, 4))]
        self.values = chosen.randbytes(header + sum(sizes))
        self.index = made_up(self.values, header, sizes, chosen.randrange(3, 25))
        self.nodes = Nodes.labelled(
            [str(n) for n in range(chosen.randrange(2, 6)) for _ in range(chosen.randrange(1, 4))]
        )
        count = self.nodes.count
        edges = sorted({0, len(self.values), *(chosen.randrange(len(self.values)) for _ in range(count - 1))})
        self.held = {node: Spans() for node in range(count)}
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            places = copies(chosen, number, count)
            for node in places:
                self.held[node] |= Spans.of([("f", begin, end)])
        self.data = {}
        for node, spans in self.held.items():
            self.data[node] = bytearray(len(self.values))
            for _, begin, end in spans:
                self.data[node][begin:end] = self.values[begin:end]
            (root / str(node)).mkdir(parents=True)
        self.root = root

    def damaged(self, chosen, often):
        """Flip bytes that nodes hold; returns what each has wrong."""
        found = {}
        for node, spans in self.held.items():
            held = [byte for _, begin, end in spans for byte in range(begin, end)]
            found[node] = {byte for byte in held if chosen.random() < often}
            for byte in found[node]:
                self.data[node][byte] ^= 1 << chosen.randrange(8)
        return found

    def look(self):
        """As `mend` does, without processes; what rank 0 knows, and what it finds."""
        for node, data in self.data.items():
            (self.root / str(node) / "f").write_bytes(data)
        nodes, layout = self.nodes, Layout.of_index(self.index)
        held = []
        for node, members in enumerate(nodes.members):
            for share in shares_of_node(layout, self.held[node], len(members)):
                held.append(Looked.at(self.root / str(node), layout, share))
        for rank in reversed(range(len(held))):
            for child, _ in children_of(rank, len(held)):
                held[rank] = Looked.joined(held[rank], pickle.loads(pickle.dumps(held[child])), layout)
        first = Judge(nodes, layout, Holders.of(self.held))
        asked = first.ask(held[0])
        if asked[0] is None:
            return None, asked
        sights = [
            [self.sight(layout, node, item) for item in unpack_ranges(*ranges)]
            for node, ranges in zip(nodes.of_rank, asked)
        ]
        damage = first.decide(sights)
        orders = first.orders(damage)
        for number, given in enumerate(orders):
            for transfer in given.transfers if given else ():
                if transfer.target == number:
                    source, target = nodes.of_rank[transfer.source], nodes.of_rank[transfer.target]
                    for _, begin, end in transfer.ranges:
                        self.data[target][begin:end] = self.data[source][begin:end]
        return damage, asked

    def sight(self, layout, node, item):
        return register(layout, item, self.data[node][item[1] : item[2]])

    def chunk_of(self, byte):
        (key, first, stop), *_ = Layout.of_index(self.index).parts("f", byte, byte + 1)
        assert (first, stop) == (byte, byte + 1)
        return key


def two_in_a_ring(chosen, number, count):
    return {number % count, (number + 1) % count}


def anywhere(chosen, number, count):
    return chosen.sample(range(count), chosen.randrange(1, count + 1))


@pytest.mark.parametrize("copies", [two_in_a_ring, anywhere])
def test_all_damage_that_has_a_right_copy_is_mended_and_the_rest_is_named(tmp_path, copies):
    chosen, seen = random.Random(copies.__name__), [0, 0, 0]
    for number in range(150):
        cluster = Cluster(tmp_path / str(number), chosen, copies)
        bad = cluster.damaged(chosen, chosen.choice((0, 0.01, 0.05)))
        damage, _ = cluster.look()
        if not any(bad.values()):
            seen[0] += 1
            assert damage is None or (not damage.wrong and not damage.lost)
            assert damage is None or copies is anywhere  # copies in a ring are compared on the way
            continue
        right = all(cluster.data[node][b:e] == cluster.values[b:e] for node, s in cluster.held.items() for _, b, e in s)
        assert right == (not damage.lost)
        seen[1 if right else 2] += 1
        lost = {cluster.chunk_of(byte) for _, begin, end in damage.lost for byte in range(begin, end)}
        everywhere = set.intersection(
            *(bad[node] | {b for b in range(len(cluster.values)) if not cluster.held[node].covers("f", b, b + 1)}
              for node in bad)
        )  # fmt: skip
        assert {cluster.chunk_of(byte) for byte in everywhere} <= lost
    assert min(seen) > 15, seen


def test_only_holders_of_what_is_damaged_are_asked_again(tmp_path):
    chosen = random.Random(1)
    asked_for = 0
    for number in range(40):
        cluster = Cluster(tmp_path / str(number), chosen, two_in_a_ring)
        node = chosen.randrange(cluster.nodes.count)
        byte = chosen.choice([byte for _, begin, end in cluster.held[node] for byte in range(begin, end)])
        cluster.data[node][byte] ^= 1
        damage, asked = cluster.look()
        key = cluster.chunk_of(byte)
        assert damage.nodes == [node]
        for rank, ranges in enumerate(asked):
            for item in unpack_ranges(*ranges):
                asked_for += 1
                assert {cluster.chunk_of(at) for at in range(*item[1:])} == {key}
                assert cluster.held[cluster.nodes.of_rank[rank]].covers(*item)
    assert asked_for < 40 * 6


def test_what_is_joined_does_not_grow_with_the_nodes(tmp_path):
    """Copies that lie in a ring make up whole tensors on the way: rank 0 gets no register of them."""
    left = []
    for count in (2, 8, 40):
        values = random.Random(count).randbytes(60 * count)
        index = made_up(values, 0, [len(values)], 50)
        layout = Layout.of_index(index)
        looked = []
        for node in range(count):
            spans = Spans.of(("f", 60 * n, 60 * n + 60) for n in (node, (node - 1) % count))
            (share,) = shares_of_node(layout, spans, 1)
            seen = [(key, item, register(layout, item, values[item[1] : item[2]])) for key, item in share]
            looked.append(Looked.of(layout, seen))
        joining = partial(Looked.joined, layout=layout)
        for rank in reversed(range(count)):
            for child, _ in children_of(rank, count):
                looked[rank] = joining(looked[rank], looked[child])
        assert not looked[0].reads.wrong and not looked[0].reads.left
        left.append(sum(map(len, looked[0].reads.by_box.values())))
    assert left == [1, 1, 1]
