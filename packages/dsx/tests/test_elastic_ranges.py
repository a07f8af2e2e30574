"""Sets of byte ranges against sets of bytes."""

import itertools
import random

from dsx.elasticity.ranges import intersection, minus, total, union


def bytes_of(ranges):
    return {(file, byte) for file, parts in ranges.items() for start, stop in parts for byte in range(start, stop)}


def drawn(random_):
    found = {}
    for _ in range(random_.randint(0, 8)):
        start = random_.randint(0, 30)
        found.setdefault(random_.choice("ab"), []).append((start, start + random_.randint(0, 9)))
    return found


def test_operations_are_those_of_sets():
    random_ = random.Random(3)
    for _ in range(400):
        raw, other = drawn(random_), drawn(random_)
        left, right = union([raw]), union([other])
        assert bytes_of(left) == bytes_of(raw)
        assert bytes_of(union([left, right])) == bytes_of(left) | bytes_of(right)
        assert bytes_of(minus(left, right)) == bytes_of(left) - bytes_of(right)
        assert bytes_of(intersection(left, right)) == bytes_of(left) & bytes_of(right)
        assert total(left) == len(bytes_of(left))
        for found in (left, minus(left, right)):
            for parts in found.values():
                assert parts == sorted(parts) and all(start < stop for start, stop in parts) and parts
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(parts))
