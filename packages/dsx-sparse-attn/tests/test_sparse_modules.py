"""SparseSelfAttention and BertSparseSelfAttention: what they compute, keep, save and refuse."""

import random
from types import SimpleNamespace

import pytest
import torch
from dsx_sparse_attn import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    apply_sparse_attention,
    block_sparse_attention,
)
from dsx_sparse_attn.config import SparseAttentionConfig
from dsx_sparse_attn.errors import ArgumentError, LayoutError


def test_dense_layout_is_ordinary_attention():
    module = SparseSelfAttention(DenseSparsityConfig(4, block=16), max_seq_length=64)
    q, k, v = torch.randn(3, 2, 4, 48, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(module(q, k, v), expected, atol=1e-5)


def test_masks_follow_their_modes():
    q, k, v = torch.randn(3, 2, 4, 32, 8)
    rpe, keys, pairs = torch.randn(4, 32, 32), torch.randn(2, 32), torch.rand(32, 32) < 0.7
    config = FixedSparsityConfig(4, block=16)
    got = SparseSelfAttention(config, max_seq_length=64)(
        q, k, v, rpe=rpe, key_padding_mask=keys, attn_mask=pairs.float()
    )
    scores = q @ k.transpose(-1, -2) / 8**0.5 + rpe + keys[:, None, None]
    assert torch.allclose(got, scores.masked_fill(~pairs, -1e30).softmax(-1) @ v, atol=1e-5)
    swapped = SparseSelfAttention(config, "mul", "add", 64)
    got = swapped(q, k, v, key_padding_mask=(keys > 0).float(), attn_mask=rpe[0])
    scores = q @ k.transpose(-1, -2) / 8**0.5 + rpe[0]
    assert torch.allclose(got, scores.masked_fill((keys <= 0)[:, None, None], -1e30).softmax(-1) @ v, atol=1e-5)


def test_a_transposed_key_and_an_extended_mask_are_taken_as_scripts_pass_them():
    module = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=32)
    q, k, v = torch.randn(3, 2, 2, 32, 8)
    added = torch.zeros(2, 32).masked_fill(torch.rand(2, 32) < 0.3, -10000.0)
    expected = module(q, k, v, key_padding_mask=added)
    got = module(q, k.transpose(-1, -2), v, key_padding_mask=added[:, None, None])
    assert torch.equal(got, expected) and not torch.allclose(got, module(q, k, v))
    with pytest.raises(ArgumentError, match="self-attention"):
        module(q, k[:, :, :16], v[:, :, :16])


def test_two_modules_of_one_length_keep_their_own_layouts():
    q = torch.randn(1, 2, 64, 8)
    a = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, block=16), max_seq_length=64)
    b = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=64)
    first = a(q, q, q)
    assert not torch.allclose(first, b(q, q, q)) and torch.equal(a(q, q, q), first)


def test_shorter_sequences_cut_the_layout_and_need_not_be_whole_blocks():
    random.seed(0)
    module = SparseSelfAttention(BigBirdSparsityConfig(2, block=16), max_seq_length=128)
    q = torch.randn(1, 2, 70, 8)
    expected = block_sparse_attention(q, q, q, module.master_layout[:, :5, :5], block=16)
    assert torch.equal(module(q, q, q), expected)
    assert module.density(128) < 1 and 0 < module.density(64) <= 1


def test_the_layout_is_saved_with_the_module():
    random.seed(1)
    config = BigBirdSparsityConfig(2, block=16, num_random_blocks=2)
    a, b = (SparseSelfAttention(config, max_seq_length=256) for _ in range(2))
    assert not torch.equal(a.master_layout, b.master_layout)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.master_layout, b.master_layout)


def test_refusals():
    module = SparseSelfAttention(FixedSparsityConfig(2, block=16), max_seq_length=64)
    with pytest.raises(LayoutError, match="max_seq_length=64"):
        module(*torch.randn(3, 1, 2, 80, 8))
    with pytest.raises(ArgumentError, match=r"\[batch, 2, seq, dim\]"):
        module(*torch.randn(3, 1, 3, 64, 8))
    with pytest.raises(ArgumentError, match="attn_mask_mode"):
        SparseSelfAttention(FixedSparsityConfig(2), attn_mask_mode="times")
    with pytest.raises(LayoutError, match="expected a multiple of the block"):
        SparseSelfAttention(FixedSparsityConfig(2, block=16), max_seq_length=65)


BERT = SimpleNamespace(
    hidden_size=32, num_attention_heads=4, attention_probs_dropout_prob=0.0, max_position_embeddings=60
)


@pytest.mark.parametrize("kind", ["none", "keys", "extended", "pairs", "bool pairs"])
def test_bert_attention_with_berts_masks(kind):
    module = BertSparseSelfAttention(BERT, DenseSparsityConfig(4, block=16))
    x, seen = torch.randn(2, 40, 32), torch.rand(2, 40) < 0.7
    pairs = seen[:, None, None, :].expand(2, 1, 40, 40)
    added = torch.zeros(2, 1, 1, 40).masked_fill(~seen[:, None, None], -10000.0)
    mask = {"none": None, "keys": seen, "extended": added, "pairs": added.expand(2, 1, 40, 40), "bool pairs": pairs}[
        kind
    ]
    q, k, v = (f(x).view(2, 40, 4, 8).transpose(1, 2) for f in (module.query, module.key, module.value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else pairs)
    assert torch.allclose(module(x, mask), expected.transpose(1, 2).reshape(2, 40, 32), atol=1e-5)


def test_bert_attention_trains_with_dropout_and_refuses_what_does_not_fit():
    config = SimpleNamespace(**{**vars(BERT), "attention_probs_dropout_prob": 0.5})
    module, x = BertSparseSelfAttention(config, FixedSparsityConfig(4, block=16)), torch.randn(2, 40, 32)
    assert not torch.equal(module(x), module(x))
    module(x).sum().backward()
    assert module.query.weight.grad is not None
    assert torch.equal(module.eval()(x), module(x))
    with pytest.raises(ArgumentError, match="for 2 heads and a model with 4"):
        BertSparseSelfAttention(BERT, FixedSparsityConfig(2))
    with pytest.raises(ArgumentError, match="hidden_size=33"):
        BertSparseSelfAttention(SimpleNamespace(**{**vars(BERT), "hidden_size": 33}))
    with pytest.raises(ArgumentError, match="attention_mask of shape"):
        module(x, torch.ones(2, 3, 40))


def test_a_section_is_applied_to_every_module_or_refused():
    section = SparseAttentionConfig(mode="local", block=32, num_sliding_window_blocks=1)
    model = torch.nn.Sequential(
        SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=80), torch.nn.Identity()
    )
    q = torch.randn(1, 2, 64, 8)
    before = model[0](q, q, q)
    assert apply_sparse_attention(model, section) == ["0"]
    assert not torch.allclose(model[0](q, q, q), before)
    expected = section.sparsity_config(2).make_layout(64)
    assert torch.equal(model[0](q, q, q), block_sparse_attention(q, q, q, expected)) and model[0].max_seq_length == 96
    with pytest.raises(ArgumentError, match="Linear has nothing to apply it to"):
        apply_sparse_attention(torch.nn.Linear(2, 2), section)
    with pytest.raises(ArgumentError, match="for 3 heads, this module has 2"):
        model[0].set_sparsity(DenseSparsityConfig(3))
