"""What ranks read of tensors is compared on its way to rank 0: for any cuts, and any order in which it is joined."""

import pickle
import random

import pytest
import torch
from dsx_checkpoint.boxes import Box, Region
from dsx_checkpoint.crc import Chunks, Sums, crc_of
from dsx_checkpoint.format import Entry, Placed, TensorSpec
from dsx_checkpoint.reads import Reads
from dsx_comm.object_tree import children_of

CHUNK = 24


def tensor_of(chosen, shape):
    """A tensor of bytes, and its entry in an index."""
    values = bytearray(chosen.randbytes(torch.Size(shape).numel()))
    sums = Sums(Chunks.grid(len(values), CHUNK, ()))
    sums.add(0, memoryview(values))
    spans = [Chunks.grid(len(values), CHUNK, ()).span(number) for number in range(-(-len(values) // CHUNK))]
    crcs = [crc_of(sums.registers()[number], stop - start) for number, (start, stop) in enumerate(spans)]
    placed = Placed(TensorSpec("w", "U8", shape), "f", 0)
    return values, Entry(placed, Chunks.grid(len(values), CHUNK, crcs))


def read(found, number, entry, values, region):
    """As a rank reads a region and hashes it."""
    sums = Sums(entry.chunks)
    for run in region.runs(entry.spec.shape):
        sums.add(run.at, memoryview(values)[run.at : run.at + run.numel])
    complete, registers = sums.complete(), sums.registers()
    assert all(registers[chunk] == entry.chunks.expected(chunk) for chunk in complete)
    found.add(number, region, {chunk: r for chunk, r in registers.items() if chunk not in complete})


def cut(chosen, box, ranks):
    """The regions of one copy of a box, one for each of the ranks; some of them are empty."""
    edges = sorted(chosen.randrange(box.numel + 1) for _ in range(ranks - 1))
    return [Region(box, start, stop) for start, stop in zip([0, *edges], [*edges, box.numel])]


def joined(ranks, entries):
    """As along the tree."""
    held = dict(enumerate(ranks))
    for rank in reversed(range(len(ranks))):
        for child, _ in children_of(rank, len(ranks)):
            held[rank] = Reads.joined(held[rank], pickle.loads(pickle.dumps(held.pop(child))), entries.__getitem__)
    return held[0]


def job(chosen, copies, ranks):
    """Two tensors, of which one is cut into columns, and what ranks read of `copies` copies of each."""
    tensors = [tensor_of(chosen, (5, 31)), tensor_of(chosen, (7, 12))]
    boxes = [[Box((0, 0), (5, 31))], [Box((0, 0), (7, 5)), Box((0, 5), (7, 7))]]
    read_by = [[] for _ in range(ranks)]
    for number in range(2):
        for box in boxes[number]:
            for _ in range(copies):
                regions = cut(chosen, box, ranks)
                chosen.shuffle(regions)
                for rank, region in enumerate(regions):
                    read_by[rank].append((number, region))
    return tensors, read_by


def reads_of(tensors, read_by, damaged=None):
    found = []
    for rank, regions in enumerate(read_by):
        found.append(Reads())
        for number, region in regions:
            values, entry = tensors[number]
            values = bytearray(values)
            if damaged is not None and damaged[0] == rank and damaged[1] == number:
                values[damaged[2]] ^= 1
            try:
                read(found[-1], number, entry, values, region)
            except AssertionError:
                return None  # the rank finds it alone
    return joined(found, [entry for _, entry in tensors])


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_of_any_cut_become_the_whole_tensor(copies):
    chosen = random.Random(copies)
    for _ in range(60):
        tensors, read_by = job(chosen, copies, chosen.randrange(1, 14))
        found = reads_of(tensors, read_by)
        entries = [entry for _, entry in tensors]
        assert found.judge(entries.__getitem__) == [] and not found.wrong
        assert [len(spots) for spots in found.by_box.values()] == [1, 1, 1]
        whole = next(iter(found.by_box[0, Box((0, 0), (5, 31))].values()))
        assert whole.registers == {} and whole.count == copies  # every chunk was compared on the way


def test_a_byte_that_one_rank_reads_differently_is_found_and_its_chunk_named():
    chosen, seen = random.Random(7), 0
    for _ in range(200):
        tensors, read_by = job(chosen, chosen.randrange(1, 3), 9)
        rank, number = chosen.randrange(9), chosen.randrange(2)
        byte = chosen.randrange(len(tensors[number][0]))
        mine = [region for n, region in read_by[rank] if n == number]
        shape = tensors[number][1].spec.shape
        if not any(run.at <= byte < run.at + run.numel for region in mine for run in region.runs(shape)):
            continue
        found = reads_of(tensors, read_by, (rank, number, byte))
        if found is None:
            continue
        assert found.judge([entry for _, entry in tensors].__getitem__) == []
        assert found.wrong == {(number, byte // CHUNK)}
        seen += 1
    assert seen > 30


def test_a_tensor_of_which_a_part_was_read_is_left_to_the_ranks():
    chosen = random.Random(3)
    tensors, read_by = job(chosen, 1, 6)
    entries = [entry for _, entry in tensors]
    lost = next((rank, item) for rank, items in enumerate(read_by) for item in items if item[1].numel and item[0] == 0)
    read_by[lost[0]].remove(lost[1])
    found = reads_of(tensors, read_by)
    assert found.judge(entries.__getitem__) == [0] and not found.wrong
    assert Reads().judge(entries.__getitem__) == []
