"""`TransformerLayer` in the place of a Hugging Face `BertLayer`: the same results and gradients with its weights, alone
and inside a model.
"""

import dsx_ops
import pytest
import torch
from dsx_ops.transformer.bert import config_from_bert, copy_from_bert, copy_to_bert

pytest.importorskip("transformers")
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

PARTS = {
    "attn_ow": "attention.output.dense.weight",
    "attn_ob": "attention.output.dense.bias",
    "attn_nw": "attention.output.LayerNorm.weight",
    "attn_nb": "attention.output.LayerNorm.bias",
    "inter_w": "intermediate.dense.weight",
    "inter_b": "intermediate.dense.bias",
    "output_w": "output.dense.weight",
    "output_b": "output.dense.bias",
    "norm_w": "output.LayerNorm.weight",
    "norm_b": "output.LayerNorm.bias",
}
QKV = [f"attention.self.{n}" for n in ("query", "key", "value")]


def bert_config(attention="eager", **options):
    sizes = dict(
        hidden_size=48,
        num_attention_heads=4,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=50,
        max_position_embeddings=20,
    )
    config = BertConfig(**{**sizes, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **options})
    config._attn_implementation = attention
    return config


def noisy(module, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    "options",
    [{}, {"gelu_checkpoint": True, "attn_dropout_checkpoint": True, "normalize_invertible": True}],
    ids=["plain", "saving"],
)
@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_same_result_and_gradients_as_a_bert_layer(attention, act, options):
    config = bert_config(attention, hidden_act=act)
    theirs = noisy(BertLayer(config)).train()
    ours = copy_from_bert(dsx_ops.TransformerLayer(config_from_bert(config, **options)), theirs)
    x = torch.randn(3, 9, 48)
    padding = torch.zeros(3, 1, 1, 9)
    padding[1, ..., 4:] = torch.finfo(torch.float32).min
    for mask in (None, padding):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        results = [first(m(v, mask)) for m, v in zip((ours, theirs), xs)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)
        grad = torch.randn(3, 9, 48)
        for module, y in zip((ours, theirs), results):
            module.zero_grad()
            y.backward(grad)
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-4, atol=1e-5)
        wanted = dict(theirs.named_parameters())
        mine = {n: p.grad for n, p in ours.named_parameters()}
        for name, their_name in PARTS.items():
            torch.testing.assert_close(mine[name], wanted[their_name].grad, rtol=1e-4, atol=2e-5)
        for kind, name in (("weight", "attn_qkvw"), ("bias", "attn_qkvb")):
            together = torch.cat([wanted[f"{q}.{kind}"].grad for q in QKV])
            torch.testing.assert_close(mine[name], together, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_in_the_place_of_a_models_layers(attention):
    config = bert_config(attention)
    model = noisy(BertModel(config)).eval()
    tokens, kept = torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    kept[0, 5:] = 0
    expected = model(tokens, attention_mask=kept).last_hidden_state
    for i, old in enumerate(model.encoder.layer):
        returns_tuple = isinstance(old(torch.randn(1, 2, 48)), tuple)
        new = dsx_ops.TransformerLayer(config_from_bert(config, return_tuple=returns_tuple, training=False))
        model.encoder.layer[i] = copy_from_bert(new, old)
    got = model(tokens, attention_mask=kept).last_hidden_state
    torch.testing.assert_close(got[kept.bool()], expected[kept.bool()], rtol=1e-4, atol=1e-5)


def test_weights_go_both_ways():
    config = bert_config()
    theirs, empty = noisy(BertLayer(config)), BertLayer(config)
    ours = copy_from_bert(dsx_ops.TransformerLayer(config_from_bert(config)), theirs)
    copy_to_bert(ours, empty)
    for (name, a), b in zip(theirs.named_parameters(), empty.parameters()):
        assert torch.equal(a, b), name


def test_what_does_not_fit_is_named():
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="hidden_act: got 'relu'"):
        config_from_bert(bert_config(hidden_act="relu"))
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="expected an encoder"):
        config_from_bert(bert_config(is_decoder=True))
    pre = dsx_ops.TransformerLayer(config_from_bert(bert_config(), pre_layer_norm=True))
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="pre_layer_norm"):
        copy_from_bert(pre, BertLayer(bert_config()))
