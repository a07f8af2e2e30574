"""Batches cut over the ranks of a sequence: shifted labels, positions, masks, and batches of each rank of its own."""

import pytest
import torch
from dsx_activations import ActivationArgumentError, SequenceLoader, sequence_segments
from dsx_testkit import run_ranks


def batch(start, length):
    tokens = torch.arange(start, start + 2 * length).view(2, length)
    return {"input_ids": tokens, "labels": tokens + 100, "attention_mask": torch.ones_like(tokens), "name": "x"}


def parts(rank, world, order, own):
    batches = [batch(1000 * (rank if own else 0), 7), batch(1000 * (rank if own else 0) + 50, 9)]
    if own and rank == 1:
        batches.append(batch(0, 5))  # another rank has ended then
    return list(SequenceLoader(batches, order=order, own_batches=own))


@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize("own", [False, True])
def test_parts_make_the_batches(order, own):
    found = run_ranks(parts, 2, order, own)
    expected = [batch(1000 * r + s, n) for s, n in ((0, 7), (50, 9)) for r in range(2 if own else 1)]
    assert [len(one) for one in found] == [len(expected)] * 2
    for index, whole in enumerate(expected):
        length = whole["input_ids"].shape[1]
        shifted = torch.cat([whole["labels"][:, 1:], torch.full((2, 1), -100)], 1)
        places = torch.arange(length).expand(2, -1)
        wanted = {**whole, "shift_labels": shifted, "position_ids": places}
        for rank in range(2):
            got = found[rank][index]
            at = torch.cat([torch.arange(*one) for one in sequence_segments(length, 2, rank, order)])
            assert set(got) == {"input_ids", "attention_mask", "shift_labels", "position_ids", "name"}
            for key in ("input_ids", "attention_mask", "shift_labels", "position_ids"):
                assert torch.equal(got[key], wanted[key][:, at]), key


def test_mistakes_are_named():
    loader = SequenceLoader([])
    with pytest.raises(ActivationArgumentError, match="batch of type tuple"):
        loader.cut((torch.zeros(1, 4),))
    with pytest.raises(ActivationArgumentError, match="got a batch with pixels"):
        loader.cut({"pixels": torch.zeros(1, 4)})
    with pytest.raises(ActivationArgumentError, match=r"attention_mask: got shape \(1, 1, 4, 4\)"):
        loader.cut({"input_ids": torch.zeros(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)})


def too_short(rank, world):
    with pytest.raises(ActivationArgumentError, match="shorter than the group of 3 ranks"):
        SequenceLoader([]).cut({"input_ids": torch.zeros(1, 2)})


def test_a_sequence_shorter_than_the_group():
    run_ranks(too_short, 3)
