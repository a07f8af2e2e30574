"""Masks mean what torch's arguments of their names mean, and numbers that could mean two things are refused."""

import pytest
import torch
from dsx_sparse_attn import DenseSparsityConfig, Softmax, SparseSelfAttention, block_sparse_attention
from dsx_sparse_attn.errors import ArgumentError
from torch.nn import functional

FULL = torch.ones(1, 3, 3, dtype=torch.int64)


def inputs(batch=2, heads=2, seq=48, dim=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, seq, dim, generator=generator).unbind(0)


def padding():
    """True where there is padding, as torch's `key_padding_mask`."""
    hidden = torch.zeros(2, 48, dtype=torch.bool)
    hidden[0, 40:] = hidden[1, 17:] = True
    return hidden


def test_a_bool_key_padding_mask_is_that_of_torchs_multihead_attention():
    torch.manual_seed(0)
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 48, 16)
    expected, _ = layer(x, x, x, key_padding_mask=padding(), need_weights=False)
    q, k, v = (functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).view(2, 48, 3, 2, 8)
               .permute(2, 0, 3, 1, 4).unbind(0))  # fmt: skip
    got = block_sparse_attention(q, k, v, FULL, key_padding_mask=padding())
    assert torch.allclose(layer.out_proj(got.transpose(1, 2).reshape(2, 48, 16)), expected, atol=1e-5)


def test_a_bool_attn_mask_is_that_of_scaled_dot_product_attention():
    q, k, v = inputs()
    seen = torch.ones(48, 48, dtype=torch.bool).tril()
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    for mode in ("add", "mul"):
        got = block_sparse_attention(q, k, v, FULL, attn_mask=seen, attn_mask_mode=mode)
        assert torch.allclose(got, expected, atol=1e-5)


def test_every_way_to_write_padding_gives_the_same():
    q, k, v = inputs()
    hidden = padding()
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None, None])
    added = torch.zeros(2, 48).masked_fill(hidden, float("-inf"))
    tokenizer = (~hidden).long()
    module = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=48)
    multiplied = SparseSelfAttention(DenseSparsityConfig(2, block=16), "mul", max_seq_length=48)
    scores = q @ k.transpose(-1, -2)
    blocks = scores.unflatten(-1, (3, 16)).unflatten(2, (3, 16)).permute(0, 1, 2, 4, 3, 5).reshape(2, 18, 16, 16)
    for got in (
        block_sparse_attention(q, k, v, FULL, key_padding_mask=hidden),
        block_sparse_attention(q, k, v, FULL, key_padding_mask=added),
        block_sparse_attention(q, k, v, FULL, key_padding_mask=tokenizer == 0),
        block_sparse_attention(q, k, v, FULL, key_padding_mask=tokenizer, key_padding_mask_mode="mul"),
        block_sparse_attention(q, k, v, FULL, key_padding_mask=tokenizer.float(), key_padding_mask_mode="mul"),
        module(q, k, v, key_padding_mask=hidden),
        module(q, k, v, key_padding_mask=added[:, None, None]),
        multiplied(q, k, v, key_padding_mask=tokenizer),
        module.attend(q, k, v, ~hidden),  # Hugging Face: True is seen
        module.attend(q, k, v, (~hidden)[:, None, None]),
        module.attend(q, k, v, added[:, None, None]),
    ):
        assert torch.allclose(got, expected, atol=1e-5)
    weights = Softmax(FULL.expand(2, 3, 3), 16)(blocks, 8**-0.5, key_padding_mask=hidden)
    dense = weights.view(2, 2, 3, 3, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(2, 2, 48, 48)
    assert torch.allclose(dense @ v, expected, atol=1e-5)


def test_floats_of_0_and_1_are_not_added():
    q, k, v = inputs()
    ones = (~padding()).float()
    module = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=48)
    for call in (
        lambda: block_sparse_attention(q, k, v, FULL, key_padding_mask=ones),
        lambda: module(q, k, v, key_padding_mask=ones[:, None, None]),
        lambda: module.attend(q, k, v, ones),
        lambda: Softmax(FULL.expand(2, 3, 3), 16)(torch.zeros(2, 18, 16, 16), key_padding_mask=ones),
        lambda: block_sparse_attention(q, k, v, FULL, attn_mask=torch.ones(48, 48).tril(), attn_mask_mode="add"),
    ):
        with pytest.raises(ArgumentError, match="of floats that are all 0 or 1"):
            call()
    nothing_hidden = torch.zeros(2, 48)  # an added mask of a batch without padding
    got = block_sparse_attention(q, k, v, FULL, key_padding_mask=nothing_hidden)
    assert torch.allclose(got, functional.scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_an_added_mask_is_not_multiplied():
    q, k, v = inputs()
    added = torch.full((48, 48), float("-inf")).triu(1)
    with pytest.raises(ArgumentError, match='negative numbers and attn_mask_mode="mul"'):
        block_sparse_attention(q, k, v, FULL, attn_mask=added)
    got = block_sparse_attention(q, k, v, FULL, attn_mask=added, attn_mask_mode="add")
    assert torch.allclose(got, functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)


def test_a_mask_that_was_written_to_is_judged_again():
    q, k, v = inputs()
    mask = torch.zeros(2, 48)
    block_sparse_attention(q, k, v, FULL, key_padding_mask=mask)
    mask[:, :9] = 1
    with pytest.raises(ArgumentError, match="all 0 or 1"):
        block_sparse_attention(q, k, v, FULL, key_padding_mask=mask)
    both = torch.zeros(4, 48)  # views of one tensor are told apart
    both[2:] = 1
    block_sparse_attention(q, k, v, FULL, key_padding_mask=both[:2])
    with pytest.raises(ArgumentError, match="all 0 or 1"):
        block_sparse_attention(q, k, v, FULL, key_padding_mask=both[2:])


def test_the_values_of_a_mask_are_read_once(monkeypatch):
    from dsx_sparse_attn import masks

    read, calls = masks._read, []
    monkeypatch.setattr(masks, "_read", lambda mask: calls.append(mask.shape) or read(mask))
    q, k, v = inputs()
    mask = torch.zeros(2, 1, 1, 48).masked_fill(padding()[:, None, None], -1e9)
    module = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=48)
    for _ in range(5):  # layers
        module(q, k, v, key_padding_mask=mask)
    assert len(calls) == 1
