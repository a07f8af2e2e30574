"""Layers are cut into consecutive parts as published: equally long, or equally heavy."""

import itertools
import random

import pytest
from dsx.utils import partition_balanced, partition_uniform


@pytest.mark.parametrize(
    ("items", "parts", "borders"),
    [(10, 4, [0, 3, 6, 8, 10]), (2, 4, [0, 1, 2, 2, 2]), (0, 2, [0, 0, 0]), (3, 1, [0, 3])],
)
def test_uniform(items, parts, borders):
    assert partition_uniform(items, parts) == borders


@pytest.mark.parametrize(
    ("weights", "parts", "borders"),
    [
        ([1, 1, 1, 1, 5, 1, 1, 1], 4, [0, 2, 4, 5, 8]),
        ([0, 1, 1, 1, 0, 0], 2, [0, 3, 6]),
        ([1, 1, 1, 1], 1, [0, 4]),
        ([3], 3, [0, 1, 1, 1]),
    ],
)
def test_balanced(weights, parts, borders):
    assert partition_balanced(weights, parts) == borders


def test_two_parts_are_as_even_as_any():
    for seed in range(30):
        random.seed(seed)
        weights = [random.randint(0, 9) for _ in range(random.randint(3, 9))]
        borders = partition_balanced(weights, 2)
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(borders)]
        best = min(abs(sum(weights[:k]) - sum(weights[k:])) for k in range(1, len(weights)))
        assert max(sums) - min(sums) == best
        assert borders[0] == 0 and borders[-1] == len(weights) and borders == sorted(borders)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="1 part"):
        partition_uniform(3, 0)
    with pytest.raises(ValueError, match="weight of -1"):
        partition_balanced([1, -1, 2], 2)
