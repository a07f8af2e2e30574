"""`apply_sparse_attention` on causal Hugging Face models: GPT-2, Llama and others of the same rule, against the dense
models.
"""

import pytest
import torch
from dsx_sparse_attn import (
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionError,
    apply_sparse_attention,
)
from dsx_sparse_attn.errors import ArgumentError

transformers = pytest.importorskip("transformers", minversion="5.0")
LENGTH = 37
SMALL = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def gpt2(**options):
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    )  # fmt: skip


def llama(**options):
    sizes = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, **options}
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)


def mistral():
    sizes = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 9}
    return transformers.MistralForCausalLM, transformers.MistralConfig(**sizes)


MODELS = {"GPT-2": gpt2, "Llama with grouped queries": llama, "Mistral with a sliding window": mistral}


def made(recipe, seed=0):
    torch.manual_seed(seed)
    kind, config = recipe
    return kind(config).eval()


def tokens(seed=1):
    return torch.randint(2, 50, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def padding():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :5] = 0  # in front, as for generation
    mask[1, 30:] = 0
    return mask


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_layout_changes_nothing(name):
    model, dense = made(MODELS[name]()), made(MODELS[name]())
    changed = apply_sparse_attention(model, {"mode": "dense"})
    assert len(changed) == 2 and all(n.endswith("sparse_self_attention") for n in changed)
    ids, mask = tokens(), padding()
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, dense(ids).logits, atol=1e-5)
        got, expected = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, dense))
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_layout_gives_every_parameter_the_gradient_it_had(name):
    model, dense = (made(MODELS[name]()).train() for _ in range(2))
    apply_sparse_attention(model, {"mode": "dense"})
    ids, mask = tokens(), padding()
    labels = ids.masked_fill(mask == 0, -100)
    for m in (model, dense):
        m(ids, attention_mask=mask, labels=labels).loss.backward()
    expected = {n: p.grad for n, p in dense.named_parameters()}
    assert {n for n, _ in model.named_parameters()} == expected.keys()
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[n], atol=1e-5), n


@pytest.mark.parametrize("name", MODELS)
def test_a_sparse_layout_is_the_dense_model_with_that_mask(name):
    model, dense = made(MODELS[name]()), made(MODELS[name]())
    pattern = LocalSlidingWindowSparsityConfig(4, block=16, num_sliding_window_blocks=1, attention="bidirectional")
    apply_sparse_attention(model, pattern)
    at = torch.arange(LENGTH)
    seen = (at[:, None] >= at) & (at[:, None] // 16 == at // 16)
    if "Mistral" in name:
        seen &= at[:, None] - at < 9
    with torch.no_grad():
        expected = dense(tokens(), attention_mask=seen.expand(2, 1, -1, -1)).logits
        assert torch.allclose(model(tokens()).logits, expected, atol=1e-5)
        assert not torch.allclose(dense(tokens()).logits, expected, atol=1e-3)


def test_packed_sequences_stay_apart():
    model, dense = made(llama()), made(llama(use_cache=False))
    apply_sparse_attention(model, {"mode": "dense"})
    places = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
    with torch.no_grad():
        got, expected = (m(tokens()[:1], position_ids=places).logits for m in (model, dense))
        alone = dense(tokens()[:1, 20:]).logits
    assert torch.allclose(got, expected, atol=1e-5) and torch.allclose(got[:, 20:], alone, atol=1e-5)


@pytest.mark.parametrize("floats", [False, True])
def test_a_mask_of_queries_by_keys_says_all(floats):
    model, dense = made(gpt2()), made(gpt2())
    apply_sparse_attention(model, DenseSparsityConfig(4, block=16))
    mask = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.7
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    if floats:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        got, expected = (m(tokens(), attention_mask=mask).logits for m in (model, dense))
    assert torch.allclose(got, expected, atol=1e-5)


def test_the_callers_configuration_is_not_changed_and_serves_for_another_model():
    kind, config = llama()
    before = config.to_dict()
    model = kind(config)
    apply_sparse_attention(model, {"mode": "dense"})
    assert config.to_dict() == before and config._attn_implementation != model.config._attn_implementation
    assert all(m.config is not config for m in model.modules() if hasattr(m, "config"))
    assert kind(config)(tokens()).logits.shape == (2, LENGTH, 50)


def test_it_generates_without_a_cache_and_refuses_one():
    model, dense = made(llama()), made(llama())
    apply_sparse_attention(model, {"mode": "dense"})
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(tokens(), **options), dense.generate(tokens(), **options))
    with pytest.raises(SparseAttentionError, match="use_cache=False"):
        model.generate(tokens(), use_cache=True, **options)


def test_it_compiles_in_one_graph_and_recomputes():
    model, ids = made(llama()), tokens()
    apply_sparse_attention(model, {"mode": "local", "attention": "unidirectional"})
    expected = model(ids, labels=ids).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-6)
    model.train().gradient_checkpointing_enable()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.allclose(loss, expected, atol=1e-6) and all(p.grad is not None for p in model.parameters())


def test_a_shorter_longest_sequence_and_one_layout_for_all_heads():
    model = made(llama())
    apply_sparse_attention(model, {"mode": "fixed", "block": 16}, max_position=40)
    layout = model.model.layers[0].self_attn.sparse_self_attention.master_layout
    assert layout.shape == (1, 3, 3), "the pattern is one for all heads, so one is kept"
    apply_sparse_attention(model, {"mode": "fixed", "block": 32, "different_layout_per_head": True,
                                   "num_different_global_patterns": 2})  # fmt: skip
    layout = model.model.layers[0].self_attn.sparse_self_attention.master_layout
    assert layout.shape == (4, 2, 2), "applied again: the same modules get the new pattern"
    with pytest.raises(ArgumentError, match="max_seq_length"):
        apply_sparse_attention(model, {"mode": "dense"}, max_position=32)
    with pytest.raises(ArgumentError, match="has 64 positions"):
        apply_sparse_attention(made(gpt2()), {"mode": "dense"}, max_position=65)


def test_models_that_do_not_follow_the_rule_are_refused_before_anything_changes():
    crossed = made(gpt2(add_cross_attention=True))
    with pytest.raises(ArgumentError, match=r"not causal self-attention: transformer\.h\.0\.crossattention"):
        apply_sparse_attention(crossed, {"mode": "dense"})
    assert crossed.config.use_cache and crossed.config._attn_implementation != "dsx_sparse"
    both_ways = made(llama(is_causal=False))
    with pytest.raises(ArgumentError, match=r"config\.is_causal=False"):
        apply_sparse_attention(both_ways, {"mode": "dense"})
    with pytest.raises(ArgumentError, match="a pattern for 2 heads and attention with 4"):
        apply_sparse_attention(made(llama()), FixedSparsityConfig(2))


def test_what_a_layer_asks_for_beyond_attention_is_refused():
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    gemma = made((transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**sizes)))
    apply_sparse_attention(gemma, {"mode": "dense"})
    with pytest.raises(SparseAttentionError, match="softcap from Gemma2Attention"):
        gemma(tokens())
    kind, config = llama()
    plain = kind(config)
    plain.config._attn_implementation = "dsx_sparse"
    with pytest.raises(SparseAttentionError, match="apply_sparse_attention"):
        plain(tokens())
