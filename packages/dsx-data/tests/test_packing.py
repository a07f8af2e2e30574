"""Packed rows: every sequence gets the outputs and gradients that it has alone."""

import random

import pytest
import torch
from dsx_data import PackingCollator
from dsx_data.batching import block_diagonal_mask, pack_lengths
from dsx_data.errors import DataArgumentError


def fewest(lengths):
    """A bound from below on the rows of 64 tokens: tokens, and sequences of which no two fit into one row."""
    return max(-(-sum(lengths) // 64), sum(size > 32 for size in lengths))


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_every_sequence_once_and_few_are_used(seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(0, 65) for _ in range(draw.randrange(1, 300))]
    rows = pack_lengths(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 64
    # Best fit decreasing uses at most 11/9 of the fewest rows, and one more (Johnson 1973).
    assert len(rows) <= 11 / 9 * fewest(lengths) + 1
    with pytest.raises(DataArgumentError, match="a sequence of 65 tokens"):
        pack_lengths([65], 64)


def test_the_mask_is_block_diagonal():
    segments = torch.tensor([[1, 1, 2, 0]])
    causal = block_diagonal_mask(segments, causal=True)[0, 0].int().tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    both = block_diagonal_mask(segments, causal=False, dtype=torch.float32)[0, 0]
    low = torch.finfo(torch.float32).min
    assert both.tolist() == [[0, 0, low, low], [0, 0, low, low], [low, low, 0, low], [low, low, low, 0]]


def test_a_packed_gpt2_has_the_losses_and_gradients_of_single_sequences():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 30, "n_positions": 24}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)).double().train()
    sequences = [torch.randint(0, 30, (n,)) for n in (9, 4, 11, 7, 2, 12)]
    total = sum(len(s) - 1 for s in sequences)
    for sequence in sequences:
        logits = model(input_ids=sequence[None]).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum") / total).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    batch = PackingCollator(24)(sequences)
    assert batch["input_ids"].shape == (2, 24), "45 tokens in two rows"
    segments, labels = batch.pop("segment_ids"), batch["labels"]
    assert (labels[segments == 0] == -100).all() and int((labels != -100).sum()) == total
    wanted = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1].flatten(0, 1)  # the model's own loss is in float32
    torch.nn.functional.cross_entropy(logits, wanted.flatten()).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[name], atol=1e-12), name


def test_labels_of_samples_are_kept():
    batch = PackingCollator(6, causal=False, pad_token_id=9)(
        [{"input_ids": [1, 2], "labels": [5, -100]}, {"input_ids": [3]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9]] and batch["labels"].tolist() == [
        [5, -100, 3, -100, -100, -100]
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 0, 0]]
    with pytest.raises(DataArgumentError, match="1 labels for 2 tokens"):
        PackingCollator(6)([{"input_ids": [1, 2], "labels": [5]}])
