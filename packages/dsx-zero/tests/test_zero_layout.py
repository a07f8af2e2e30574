"""The arithmetic of shards, for world sizes up to 1024: every element has exactly one owner, everything is aligned."""

from __future__ import annotations

import random

import pytest
from dsx_zero.plan.layout import FlatLayout, pieces


def random_shapes(rng, count):
    def size():
        return rng.choice([0, 1, 2, 3, 5, 7, 16, 63, 64, 65, 1000])

    return [(f"p{i}", rng.choice([(), (size(),), (size(), size())])) for i in range(count)]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64, 1024])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_element_has_one_owner(world, itemsize):
    rng = random.Random(world * 10 + itemsize)
    layout = FlatLayout.build(random_shapes(rng, 12), world_size=world, itemsize=itemsize)
    assert layout.numel == world * layout.shard_numel
    for name, size, offset in zip(layout.names, layout.sizes, layout.offsets):
        position = 0
        for rank in range(world):
            part = layout.local_slice(name, rank)
            if part is None:
                continue
            assert part.start == position and part.numel > 0
            begin, end = layout.shard_range(rank)
            assert begin + part.offset == offset + part.start and begin + part.offset + part.numel <= end
            position = part.stop
        assert position == size


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_alignment(itemsize):
    layout = FlatLayout.build(random_shapes(random.Random(1), 20), world_size=5, itemsize=itemsize)
    assert all(offset * itemsize % 64 == 0 for offset in layout.offsets)
    assert layout.shard_numel * itemsize % 16 == 0
    assert layout.shard_range(4)[1] == layout.numel


def test_gaps_are_exactly_what_no_parameter_covers():
    layout = FlatLayout.build(random_shapes(random.Random(3), 15), world_size=3, itemsize=4)
    covered = [False] * layout.numel
    for offset, size in zip(layout.offsets, layout.sizes):
        for i in range(offset, offset + size):
            assert not covered[i]
            covered[i] = True
    for start, stop in layout.gaps:
        for i in range(start, stop):
            assert not covered[i]
            covered[i] = True
    assert all(covered)


def test_padding_is_small():
    layout = FlatLayout.build([("w", (512, 512)), ("b", (512,))], world_size=8, itemsize=4)
    assert layout.numel == 512 * 513


def test_nothing_to_lay_out():
    layout = FlatLayout.build([], world_size=4, itemsize=2)
    assert layout.numel == 0 and layout.shard_range(3) == (0, 0) and layout.gaps == ()
    empty = FlatLayout.build([("e", (0, 3))], world_size=4, itemsize=2)
    assert empty.local_slice("e", 0) is None and empty.numel == 0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="unique"):
        FlatLayout.build([("a", (1,)), ("a", (2,))], world_size=1, itemsize=4)
    with pytest.raises(ValueError, match="rank"):
        FlatLayout.build([("a", (1,))], world_size=2, itemsize=4).shard_range(2)
    with pytest.raises(ValueError, match="world_size"):
        FlatLayout.build([], world_size=0, itemsize=4)


def test_pieces():
    assert pieces(10, 4) == ((0, 4), (4, 8), (8, 10))
    assert pieces(0, 4) == () and pieces(2, 0) == ((0, 1), (1, 2))
