"""SparseAttentionUtils on Hugging Face's BERT and RoBERTa: longer positions, replaced attention, padding."""

import pytest
import torch
from dsx_sparse_attn import (
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionError,
    SparseAttentionUtils,
    apply_sparse_attention,
    block_sparse_attention,
)
from dsx_sparse_attn.config import SparseAttentionConfig
from dsx_sparse_attn.errors import ArgumentError

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def bert(headed=True):
    torch.manual_seed(0)
    config = transformers.BertConfig(max_position_embeddings=32, **SIZES)
    return (transformers.BertForMaskedLM if headed else transformers.BertModel)(config).eval()


def roberta():
    torch.manual_seed(0)
    config = transformers.RobertaConfig(max_position_embeddings=34, pad_token_id=1, **SIZES)
    return transformers.RobertaForMaskedLM(config).eval()


def logits(model, ids, mask=None):
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("make", [bert, roberta, lambda: bert(headed=False)], ids=["bert", "roberta", "bare bert"])
@pytest.mark.parametrize("padded", [False, True])
def test_dense_layout_changes_nothing(make, padded):
    model = make()
    ids = torch.randint(2, 50, (2, 32))
    mask = torch.ones(2, 32, dtype=torch.long)
    if padded:
        mask[0, 20:] = 0
    before = logits(model, ids, mask)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 32, DenseSparsityConfig(4, block=16)
    )
    seen = mask.bool()
    assert torch.allclose(logits(model, ids, mask)[seen], before[seen], atol=1e-4)


@pytest.mark.parametrize("make", [bert, roberta], ids=["bert", "roberta"])
def test_dense_layout_gives_every_parameter_the_gradient_it_had(make):
    model, replaced = make().train(), make().train()
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        replaced, 32, DenseSparsityConfig(4, block=16)
    )
    ids, mask = torch.randint(2, 50, (2, 32)), torch.ones(2, 32, dtype=torch.long)
    mask[1, 25:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (model, replaced)]
    assert torch.allclose(*losses, rtol=1e-5)
    for loss in losses:
        loss.backward()
    # The keys' bias adds the same to all scores of a query: its gradient is nothing but rounding.
    pairs = {name: (p.grad, dict(replaced.named_parameters())[name].grad) for name, p in model.named_parameters()}
    for name, (expected, got) in pairs.items():
        if "self.key.bias" not in name:
            assert (got - expected).norm() <= 1e-4 * expected.norm(), name
    for m in (model, replaced):
        layer = next(x for x in m.modules() if hasattr(x, "query") and hasattr(x, "key"))
        assert layer.query.weight.grad.norm() > 0
    assert pairs.keys() == dict(replaced.named_parameters()).keys()


def test_the_layout_is_what_is_computed():
    model = bert()
    ids = torch.randint(2, 50, (1, 32))
    before = logits(model, ids)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 32, FixedSparsityConfig(4, block=16, num_local_blocks=1)
    )
    assert torch.allclose(logits(model, ids), before, atol=1e-4), "one local block that is global to all: dense here"
    layer = model.bert.encoder.layer[0].attention.self
    layer.sparse_self_attention.master_layout[:, 0, 1] = 0
    assert not torch.allclose(logits(model, ids), before, atol=1e-4)
    x = torch.randn(1, 32, 32)
    q, k, v = (layer.transpose_for_scores(f(x)) for f in (layer.query, layer.key, layer.value))
    by_hand = (
        block_sparse_attention(q, k, v, layer.sparse_self_attention.master_layout).transpose(1, 2).reshape(1, 32, 32)
    )
    assert torch.equal(layer(x)[0], by_hand)


@pytest.mark.parametrize("make, offset", [(bert, 0), (roberta, 2)], ids=["bert", "roberta"])
def test_positions_are_extended_to_exactly_what_was_asked(make, offset):
    model = make()
    base = model.bert if offset == 0 else model.roberta
    old = base.embeddings.position_embeddings.weight.detach().clone()
    short = torch.randint(2, 50, (1, 30))
    before = logits(model, short)
    SparseAttentionUtils.extend_position_embedding(model, 80)
    new = base.embeddings.position_embeddings.weight
    assert new.shape[0] == 80 + offset and torch.equal(new[: 32 + offset], old)
    assert torch.equal(new[offset + 32 : offset + 64], old[offset:]) and torch.equal(
        new[offset + 64 :], old[offset : offset + 16]
    )
    assert torch.equal(logits(model, short), before)
    assert logits(model, torch.randint(2, 50, (2, 80))).shape[1] == 80
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 80, FixedSparsityConfig(4, block=16)
    )
    model.train()
    ids = torch.randint(2, 50, (2, 75))
    model(input_ids=ids, labels=ids).loss.backward()
    assert new.grad is not None and base.encoder.layer[0].attention.self.query.weight.grad is not None
    with pytest.raises(ArgumentError, match="already has 80"):
        SparseAttentionUtils.extend_position_embedding(model, 80)


def test_replacing_checks_the_model():
    with pytest.raises(ArgumentError, match="extend_position_embedding first"):
        SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(bert(), 64)
    with pytest.raises(ArgumentError, match="got a Linear"):
        SparseAttentionUtils.extend_position_embedding(torch.nn.Linear(2, 2), 64)
    model = bert()
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, model.bert.encoder.layer, FixedSparsityConfig(4, block=16)
    )
    with pytest.raises(SparseAttentionError, match="encoder_hidden_states"):
        model.bert.encoder.layer[0].attention.self(torch.zeros(1, 16, 32), encoder_hidden_states=torch.zeros(1, 16, 32))


def test_padding_to_blocks_and_back():
    ids, types = torch.randint(2, 50, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    pad, new_ids, mask, new_types, positions, embeds = SparseAttentionUtils.pad_to_block_size(
        16, input_ids=ids, token_type_ids=types, pad_token_id=7
    )
    assert pad == 2 and positions is None and embeds is None
    assert (
        new_ids[:, 30:].eq(7).all() and mask[:, :30].all() and not mask[:, 30:].any() and new_types[:, 30:].eq(0).all()
    )
    out = torch.randn(2, 32, 8)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad, out), out[:, :30])
    assert SparseAttentionUtils.pad_to_block_size(10, input_ids=ids)[0] == 0
    table = torch.nn.Embedding(50, 8)
    pad, _, mask, _, _, embeds = SparseAttentionUtils.pad_to_block_size(
        16, attention_mask=types, inputs_embeds=table(ids), pad_token_id=7, model_embeddings=table
    )
    assert embeds.shape == (2, 32, 8) and torch.equal(embeds[0, 31], table.weight[7]) and mask.sum() == 60
    with pytest.raises(ArgumentError, match="model_embeddings"):
        SparseAttentionUtils.pad_to_block_size(16, inputs_embeds=table(ids))
    with pytest.raises(ArgumentError, match="neither"):
        SparseAttentionUtils.pad_to_block_size(16)


def test_padded_and_unpadded_batches_agree():
    model = bert()
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 32, DenseSparsityConfig(4, block=16)
    )
    ids = torch.randint(2, 50, (2, 21))
    pad, padded, mask, *_ = SparseAttentionUtils.pad_to_block_size(16, input_ids=ids)
    got = SparseAttentionUtils.unpad_sequence_output(pad, logits(model, padded, mask))
    assert torch.allclose(got, logits(model, ids), atol=1e-4)


def test_tokenizer_limit():
    class Tokenizer:
        model_max_length = 512
        init_kwargs = {}

    tokenizer = SparseAttentionUtils.update_tokenizer_model_max_length(Tokenizer(), 4096)
    assert tokenizer.model_max_length == 4096 == tokenizer.init_kwargs["model_max_length"]


def test_a_configuration_section_replaces_the_attention():
    model, other = bert(), bert()
    ids = torch.randint(2, 50, (1, 32))
    changed = apply_sparse_attention(model, SparseAttentionConfig(mode="local", num_sliding_window_blocks=1))
    assert len(changed) == 2 and not torch.allclose(logits(model, ids), logits(other, ids), atol=1e-4)


@pytest.mark.parametrize("way", ["model", "layers", "section", "positions"])
def test_the_callers_configuration_is_not_changed_and_serves_for_another_model(way):
    config = transformers.BertConfig(max_position_embeddings=32, **SIZES)
    before, kind = config.to_dict(), transformers.BertForMaskedLM
    model, pattern = kind(config), FixedSparsityConfig(4, block=16)
    if way == "model":
        SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 32, pattern)
    elif way == "layers":
        layers = model.bert.encoder.layer
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(config, layers, pattern)
    elif way == "section":
        apply_sparse_attention(model, {"mode": "fixed"})
    else:
        SparseAttentionUtils.extend_position_embedding(model, 64)
        assert model.config.max_position_embeddings == 64 == model.bert.config.max_position_embeddings
    assert config.to_dict() == before and config._attn_implementation != "dsx_sparse"
    assert kind(config)(torch.randint(2, 50, (1, 32))).logits.shape == (1, 32, 50)


def test_replacing_draws_nothing_from_torchs_generator_and_keeps_the_projections():
    model = bert()
    query, state = model.bert.encoder.layer[0].attention.self.query, torch.get_rng_state()
    apply_sparse_attention(model, {"mode": "fixed"})
    assert torch.equal(torch.get_rng_state(), state)
    assert model.bert.encoder.layer[0].attention.self.query is query


def test_a_section_is_a_dictionary_a_validated_section_or_a_pattern():
    ids = torch.randint(2, 50, (1, 32))
    section = {"mode": "local", "num_sliding_window_blocks": 1}
    models = [bert() for _ in range(3)]
    apply_sparse_attention(models[0], section)
    apply_sparse_attention(models[1], SparseAttentionConfig(**section))
    apply_sparse_attention(models[2], SparseAttentionConfig(**section).sparsity_config(4))
    first, *others = [logits(m, ids) for m in models]
    assert all(torch.equal(first, other) for other in others)
    assert not torch.allclose(first, logits(bert(), ids), atol=1e-4)


@pytest.mark.parametrize(
    "section, text",
    [
        ({"mode": "fixd"}, "mode"),
        ({"blok": 16}, "blok"),
        ({"sparse_attention": {"mode": "fixed"}}, r'pass config\["sparse_attention"\]'),
        (FixedSparsityConfig(2), "for 2 heads and attention with 4"),
        ("fixed", "of type str, expected the keys"),
    ],
)
def test_bad_sections_are_named_and_change_nothing(section, text):
    model = bert()
    with pytest.raises(ArgumentError, match=text):
        apply_sparse_attention(model, section)
    assert model.config._attn_implementation != "dsx_sparse"
    assert not any("Sparse" in type(m).__name__ for m in model.modules())


def test_keys_that_the_mode_does_not_read_are_named():
    with pytest.warns(UserWarning, match=r"mode dense does not read num_random_blocks \[DSX157\]"):
        apply_sparse_attention(bert(), {"mode": "dense", "num_random_blocks": 2})
