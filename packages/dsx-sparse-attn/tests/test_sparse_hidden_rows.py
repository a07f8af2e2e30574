"""Which added numbers hide, and what a query gets from which every key is hidden: the same on every backend."""

import pytest
import torch
from dsx_sparse_attn import BertSparseSelfAttention, DenseSparsityConfig, Softmax, block_sparse_attention, native
from dsx_sparse_attn.masks import HIDES_BELOW

needs_native = pytest.mark.skipif(native.module() is None, reason=native.missing() or "native code is there")
BACKENDS = [pytest.param("native", marks=[pytest.mark.native, needs_native]), "torch"]
HIDING = {
    "-inf": (torch.float32, float("-inf")),
    "lowest float32": (torch.float32, torch.finfo(torch.float32).min),
    "lowest bfloat16": (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "lowest bfloat16 as float32": (torch.float32, torch.finfo(torch.bfloat16).min),
    "lowest float16": (torch.float16, torch.finfo(torch.float16).min),
    "just below the limit": (torch.float32, HIDES_BELOW * 1.00001),
}
LOW = {"BERT's -10000": -10000.0, "-1e9": -1e9, "-1e30": -1e30, "just above the limit": HIDES_BELOW * 0.99999}


def inputs():
    g = torch.Generator().manual_seed(0)
    return torch.randn(4, 2, 2, 32, 8, generator=g).unbind(0)


@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
@pytest.mark.parametrize("place", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("kind", HIDING)
def test_the_lowest_numbers_hide_as_a_bool_mask_does(kind, place, backend):
    q, k, v, dout = inputs()
    dtype, value = HIDING[kind]
    hidden = torch.rand(2, 32, generator=torch.Generator().manual_seed(1)) < 0.5
    hidden[1] = True  # nothing to see in the second sample
    if place == "attn_mask":
        hidden = hidden[:, None, None, :]
    added = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, value)
    layout, results = torch.ones(1, 2, 2), []
    for mask in (added, hidden if place == "key_padding_mask" else ~hidden):
        if backend == "flex":  # it has no backward on CPU
            with torch.no_grad():
                out = block_sparse_attention(q, k, v, layout, backend=backend, **{place: mask}, attn_mask_mode="add")
            results.append([out])
            continue
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = block_sparse_attention(*leaves, layout, backend=backend, **{place: mask}, attn_mask_mode="add")
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    assert all(t[1].eq(0).all() for t in results[0]), "the sample that sees nothing gives zeros and passes no gradient"


@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
@pytest.mark.parametrize("kind", LOW)
def test_other_low_numbers_are_only_added(kind, backend):
    q, k, v, _ = inputs()
    mask = torch.full((2, 32), LOW[kind])
    with torch.no_grad():
        got = block_sparse_attention(q, k, v, torch.ones(1, 2, 2), key_padding_mask=mask, backend=backend)
    scores = q @ k.transpose(-1, -2) / 8**0.5 + mask[:, None, None, :]
    assert torch.allclose(got, scores.softmax(-1) @ v, atol=2e-3)  # float32 keeps the scores to 1e-3 beside -10000


@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
def test_two_masks_hide_together(backend):
    q, k, v, _ = inputs()
    half = torch.full((2, 32), 0.6 * HIDES_BELOW)
    options = {"key_padding_mask": half, "attn_mask": half[0].expand(32, 32), "attn_mask_mode": "add"}
    with torch.no_grad():
        assert block_sparse_attention(q, k, v, torch.ones(1, 2, 2), backend=backend, **options).eq(0).all()


def test_softmax_of_blocks_follows_the_same_rule():
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    layout = torch.ones(1, 2, 2, dtype=torch.int64)
    mask = torch.zeros(8, 8)
    mask[0], mask[1, 3] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    got = Softmax(layout, 4)(x, attn_mask=mask)
    assert torch.equal(got, Softmax(layout, 4)(x, attn_mask=mask == 0))
    assert got[0, :2, 0].eq(0).all() and got[0, 0, 1, 3] == 0


@pytest.mark.parametrize("shape", ["keys", "pairs"])
def test_a_bert_layer_gives_zeros_where_its_mask_hides_everything(shape):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = type("Config", (), {**sizes, "attention_probs_dropout_prob": 0.0})
    module, x = BertSparseSelfAttention(config, DenseSparsityConfig(2, block=16)), torch.randn(2, 32, 16)
    mask = torch.zeros(2, 1, 1, 32)
    mask[1] = torch.finfo(torch.float32).min
    got = module(x, mask if shape == "keys" else mask.expand(2, 1, 32, 32))
    assert got[1].eq(0).all() and torch.allclose(got[:1], module(x[:1]), atol=1e-6)
