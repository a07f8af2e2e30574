"""Masks keep what their definition says, among equal scores the first."""

import itertools

import pytest
import torch
from dsx_compress import CompressionError
from dsx_compress.masks import (
    block_mask,
    block_shape,
    kept_count,
    n_of_m_mask,
    row_norms,
    sparsity_at,
    straight_through_top,
    top_mask,
)


def oracle_top(scores, keep):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep]
    return [i in order for i in range(len(scores))]


def test_every_small_mask_with_ties():
    for scores in itertools.product([0.0, 1.0, 2.0], repeat=5):
        for keep in range(6):
            assert top_mask(torch.tensor(scores, dtype=torch.float64), keep).tolist() == oracle_top(scores, keep)


def test_the_count_is_the_ceiling_of_the_decimal_number():
    assert [kept_count(r, n) for r, n in ((0.5, 5), (0.1, 30), (0.3, 10), (1.0, 7), (0.01, 3))] == [3, 3, 3, 7, 1]
    for ratio, count in itertools.product((0.1, 0.2, 0.3, 0.6, 0.7, 0.9), range(1, 200)):
        assert kept_count(ratio, count) == -(-round(ratio * 10) * count // 10)


def test_one_element_and_zeros():
    assert top_mask(torch.zeros(1), 1).tolist() == [True]
    assert top_mask(torch.zeros(4), 2).tolist() == [True, True, False, False]


def test_row_norms_along_either_dimension():
    w = torch.tensor([[1.0, -2.0], [0.0, 3.0], [-1.0, 1.0]], dtype=torch.float64)
    assert row_norms(w).tolist() == [3.0, 3.0, 2.0]
    assert row_norms(w, 1).tolist() == [2.0, 6.0]
    conv = torch.arange(24.0).view(2, 3, 2, 2)
    assert row_norms(conv).tolist() == [66.0, 210.0]


def test_the_gradient_of_the_mask_reaches_the_scores():
    scores = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    mask = straight_through_top(scores, 2)
    assert mask.tolist() == [0.0, 1.0, 1.0]
    (mask * torch.tensor([5.0, 6.0, 7.0])).sum().backward()
    assert scores.grad.tolist() == [5.0, 6.0, 7.0]


def test_blocks_by_their_sums():
    scores = torch.tensor([[1.0, 9.0, 0.0], [1.0, 0.0, 0.0], [5.0, 0.0, 2.0], [5.0, 0.0, 2.0]])
    mask = block_mask(scores, (2, 1), 0.5)  # sums: 2 9 0 / 10 0 4
    assert mask.int().tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 1], [1, 0, 1]]


def test_n_of_m_keeps_n_of_every_m_inputs():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 5.0]])
    assert n_of_m_mask(scores, 2, 4).int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 1]]


def test_blocks_that_do_not_cover_a_weight_are_refused():
    with pytest.raises(CompressionError, match="layer: block_pattern 4x1 does not divide the weight of 6 x 4"):
        block_shape("4x1", torch.Size([6, 4]), "layer")
    assert block_shape("2:4", torch.Size([6, 4]), "layer") == (1, 4)


def test_sparsity_grows_as_a_cubic():
    found = [sparsity_at(step, 10, 20, 0.8) for step in (0, 10, 15, 20, 30)]
    assert found == pytest.approx([0.0, 0.0, 0.8 * (1 - 0.5**3), 0.8, 0.8])
    assert sparsity_at(5, 5, 5, 0.9) == 0.9
