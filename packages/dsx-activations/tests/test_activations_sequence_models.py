"""`sequence_parallel` for Hugging Face models and own ones: losses and all gradients are those of one process with the
whole sequence, with padding, packed samples, sliding windows, dropout and recomputation.
"""

import copy

import dsx_activations
import dsx_comm
import pytest
import torch
from dsx_activations import ActivationArgumentError, ActivationStateError, sequence_parallel, token_mean
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F


def averaged(model):
    """The gradients after the average over the ranks that data parallelism makes."""
    found = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dsx_comm.all_reduce(grad)
        found[name] = grad / dsx_comm.get_world_size()
    return found


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


def compare(model, whole, part, targets, parallel, **tolerance):
    """`whole(model)` and `part(model)` give logits of all tokens and of this rank's."""
    single = copy.deepcopy(model)
    logits = whole(single)
    count = (targets != -100).sum()
    expected = summed(logits, targets) / count
    expected.backward()
    with parallel(model) as sp:
        mine = sp.shard(targets)
        loss = token_mean(summed(part(model, sp), mine), (mine != -100).sum())
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), **tolerance)
    for name, grad in averaged(model).items():
        right = dict(single.named_parameters())[name].grad
        torch.testing.assert_close(grad, torch.zeros_like(grad) if right is None else right, **tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip


class Converted:
    def __init__(self, **given):
        self.given = given

    def __call__(self, model):
        self.handle = sequence_parallel(model, **self.given)
        return self

    def __enter__(self):
        return self.handle

    def __exit__(self, *error):
        self.handle.remove()


# - Hugging Face


def hf_model(kind, **further):
    import transformers as t

    torch.manual_seed(0)
    common = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
    gqa = {**common, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64}
    gemma = {**gqa, "head_dim": 8, "sliding_window": 6}
    models = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**gqa, **further)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**gqa, **further)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**gqa, head_dim=6, **further)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**gqa, sliding_window=5, **further)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**gemma, query_pre_attn_scalar=8, **further)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**gemma, query_pre_attn_scalar=8, **further)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=40, n_layer=2, n_embd=24, n_head=3, n_positions=64, **no_dropout("gpt2"), **further)
        ),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(**common, intermediate_size=32, max_position_embeddings=64, **no_dropout("bert"), **further)
        ),
    }  # fmt: skip
    return models[kind]().double().train()


def no_dropout(kind):
    names = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
             "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob")}  # fmt: skip
    return dict.fromkeys(names[kind], 0.0)


def tokens_and_targets(batch=2, length=19):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def hugging_face(rank, world, cases):
    for kind, order, how in cases:
        hugging_face_case(kind, order, how)


def hugging_face_case(kind, order, how):
    model = hf_model(kind, **({"attn_implementation": "eager"} if how == "plain" else {}))
    tokens, targets = tokens_and_targets()
    extra = {}
    if how == "padded":
        extra["attention_mask"] = (torch.arange(19) < torch.tensor([[19], [13]])).long()
        targets = targets.masked_fill(extra["attention_mask"] == 0, -100)
    if how == "packed":
        extra["position_ids"] = torch.tensor([[*range(8), *range(11)], [*range(3), *range(9), *range(7)]])
    if how == "recomputed":
        model.gradient_checkpointing_enable()

    def part(model, sp):
        mine = {key: sp.shard(one) for key, one in extra.items()}
        return model(input_ids=sp.shard(tokens), use_cache=False, **mine).logits

    def whole(model):
        return model(input_ids=tokens, use_cache=False, **extra).logits

    compare(model, whole, part, targets, Converted(order=order), rtol=1e-5, atol=1e-6)


CASES = {
    1: [("llama", "plain", "packed"), ("mistral", "plain", "padded")],
    2: [
        ("llama", "zigzag", "packed"), ("llama", "plain", "recomputed"), ("qwen3", "zigzag", "plain"),
        ("gemma2", "plain", "plain"), ("gpt2", "zigzag", "padded"), ("bert", "plain", "padded"),
    ],
    3: [
        ("llama", "zigzag", "padded"), ("llama", "zigzag", "plain"), ("mistral", "zigzag", "packed"),
        ("qwen2", "plain", "packed"), ("gemma3", "zigzag", "plain"), ("gpt2", "plain", "recomputed"),
        ("bert", "zigzag", "plain"),
    ],
    4: [("llama", "plain", "plain")],
}  # fmt: skip
SLOW = (3, 4)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in CASES])
def test_hugging_face_models(world):
    """One test for each number of ranks: most of its time is the import of transformers."""
    pytest.importorskip("transformers")
    run_ranks(hugging_face, world, CASES[world])


def two_forwards(rank, world):
    """Two forwards with different documents before one backward, both recomputed."""
    model = hf_model("llama")
    model.gradient_checkpointing_enable()
    tokens, targets = tokens_and_targets()
    single, masks = copy.deepcopy(model), [(torch.arange(19) < n).long().expand(2, -1) for n in (19, 11)]
    single.gradient_checkpointing_disable()
    for mask in masks:
        labels = targets.masked_fill(mask == 0, -100)
        (summed(single(tokens, attention_mask=mask).logits, labels) / (labels != -100).sum()).backward()
    sp = sequence_parallel(model, order="zigzag")
    losses = []
    for mask in masks:
        mine = sp.shard(targets.masked_fill(mask == 0, -100))
        logits = model(sp.shard(tokens), sp.shard(mask)).logits
        losses.append(token_mean(summed(logits, mine), (mine != -100).sum()))
    sum(losses).backward()
    for name, grad in averaged(model).items():
        torch.testing.assert_close(grad, dict(single.named_parameters())[name].grad, rtol=1e-6, atol=1e-8)


def test_two_forwards_before_a_backward_are_recomputed_with_their_own_masks():
    pytest.importorskip("transformers")
    run_ranks(two_forwards, 2)


def generation(rank, world):
    model = hf_model("llama").eval()
    tokens, _ = tokens_and_targets()
    before = model.generate(tokens, max_new_tokens=4, do_sample=False)
    sp = sequence_parallel(model)
    with sp.paused():
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), before)
    with torch.no_grad():
        part = model(sp.shard(tokens)).logits
        sp.remove()
        whole = model(tokens).logits
    torch.testing.assert_close(part, sp.shard(whole))
    return model.config._attn_implementation


def test_generation_in_a_pause_and_evaluation():
    pytest.importorskip("transformers")
    assert run_ranks(generation, 2) == ["sdpa", "sdpa"]


def test_models_that_attend_otherwise_are_refused():
    t = pytest.importorskip("transformers")
    t5 = t.T5ForConditionalGeneration(t.T5Config(vocab_size=40, d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=4))
    with pytest.raises(ActivationArgumentError, match="T5ForConditionalGeneration was not found"):
        sequence_parallel(t5)
    gpt = t.GptOssForCausalLM(
        t.GptOssConfig(vocab_size=40, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, head_dim=8,
                       num_key_value_heads=1, intermediate_size=8, num_local_experts=2, num_experts_per_tok=1)
    )  # fmt: skip
    sp = sequence_parallel(gpt)
    with pytest.raises(ActivationArgumentError, match=r"GptOssAttention gives its attention s_aux"):
        gpt(torch.zeros(1, 4, dtype=torch.int64))
    sp.remove()
    llama = hf_model("llama")
    sp = sequence_parallel(llama)
    with pytest.raises(ActivationStateError, match="converted already"):
        sequence_parallel(llama)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ActivationArgumentError, match="labels without shift_labels"):
        llama(tokens, labels=tokens)
    with pytest.raises(ActivationArgumentError, match=r"attention_mask: got shape \(1, 8\), expected \(1, 4\)"):
        llama(tokens, attention_mask=torch.ones(1, 8))
    with pytest.raises(ActivationArgumentError, match="belongs to no converted model"):
        copy.deepcopy(llama)(tokens)
    sp.remove()


# - own models


class Own(nn.Module):
    """Two blocks over torch's attention functions, with positions from outside."""

    def __init__(self, kind, dropout=0.0, recomputes=False):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.dropout, self.recomputes = kind, dropout, recomputes
        self.embed, self.place = nn.Embedding(40, 24), nn.Embedding(64, 24)
        if kind == "encoder":
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(24, 3, 32, dropout, batch_first=True) for _ in range(2)
            )
        else:
            self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(2))
        self.head = nn.Linear(24, 40)

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, kind, dropout):
        super().__init__()
        self.kind, self.dropout = kind, dropout
        if kind == "mha":
            self.attention = nn.MultiheadAttention(24, 3, dropout=dropout)
        else:
            self.qkv = nn.Linear(24, 24 + 2 * 8)
        self.out = nn.Linear(24, 24)

    def forward(self, x):
        if self.kind == "mha":
            y = x.transpose(0, 1)
            length = y.shape[0]
            mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
            y, _ = self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)
            y = y.transpose(0, 1)
        else:
            q, k, v = self.qkv(x).split([24, 8, 8], -1)
            q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=dropout)
            y = y.transpose(1, 2).flatten(2)
        return x + self.out(y).tanh()


def own(rank, world, kind, order, recomputes):
    model = Own(kind, recomputes=recomputes).double()
    tokens, targets = tokens_and_targets()
    positions = torch.arange(19)[None]
    compare(
        model,
        lambda m: m(tokens, positions),
        lambda m, sp: m(sp.shard(tokens), sp.positions(19)),
        targets,
        Converted(order=order, length=19),
        rtol=1e-8,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    "kind, world, order, recomputes",
    [
        ("sdpa", 2, "zigzag", False),
        ("sdpa", 3, "plain", True),
        ("mha", 2, "plain", True),
        ("mha", 2, "zigzag", False),
        ("encoder", 2, "plain", False),
    ],
)
def test_own_models(kind, world, order, recomputes):
    run_ranks(own, world, kind, order, recomputes)


def dropped(rank, world):
    """Losses of three steps with attention dropout."""
    model = Own("sdpa", dropout=0.3, recomputes=True).double()
    sp = sequence_parallel(model, length=19)
    tokens, targets = tokens_and_targets()
    torch.manual_seed(5)
    found = []
    for _ in range(3):
        mine = sp.shard(targets)
        loss = token_mean(summed(model(sp.shard(tokens), sp.positions(19)), mine), mine.numel())
        loss.backward()
        found.append(loss.item())
    return found, {name: grad.norm().item() for name, grad in averaged(model).items()}


def test_dropout_of_a_model_is_the_same_on_any_number_of_ranks():
    ((losses, norms),) = run_ranks(dropped, 1)
    assert len(set(losses)) == 3
    for again in run_ranks(dropped, 2):
        assert again[0] == pytest.approx(losses, rel=1e-10)
        assert again[1] == pytest.approx(norms, rel=1e-8)


def described(rank, world):
    """Documents that are given for the next forward hold for it alone, and for its recomputation."""
    model = Own("sdpa", recomputes=True).double()
    tokens, _ = tokens_and_targets(batch=1)
    documents = torch.tensor([[0] * 9 + [1] * 10])
    sp = sequence_parallel(model)
    sp.describe(documents=sp.shard(documents))
    packed = model(sp.shard(tokens), sp.positions(19))
    plain = model(sp.shard(tokens), sp.positions(19)) if world == 1 else None
    sp.remove()
    positions = torch.arange(19)[None]
    parts = [model(tokens[:, a:b], positions[:, a:b]) for a, b in ((0, 9), (9, 19))]
    torch.testing.assert_close(packed, sp.shard(torch.cat(parts, 1)))
    if plain is not None:
        torch.testing.assert_close(plain, model(tokens, positions))


@pytest.mark.parametrize("world", [1, 2])
def test_documents_of_the_next_forward(world):
    run_ranks(described, world)


def uneven(rank, world):
    sp = sequence_parallel(Own("sdpa"), order="plain")
    with pytest.raises(ActivationArgumentError, match=r"the ranks have \[3, 5\] tokens, expected \[4, 4\]"):
        sp.describe(documents=torch.zeros(1, 3 + 2 * rank, dtype=torch.int64))


def test_ranks_with_other_numbers_of_tokens_are_named():
    run_ranks(uneven, 2)


def test_mistakes_of_own_models_are_named():
    class Handmade(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model = Handmade()
    sequence_parallel(model)
    with pytest.raises(ActivationArgumentError, match="no attention was found in Handmade"):
        model(torch.randn(1, 4, 8))

    class Masked(nn.Module):
        def forward(self, x, **given):
            return F.scaled_dot_product_attention(x, x, x, **given)

    model = Masked()
    sp = sequence_parallel(model)
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ActivationArgumentError, match=r"a mask of shape \(4, 4\)"):
        model(x, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    sp.remove()
    model(x, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    attention = nn.MultiheadAttention(8, 2)
    sequence_parallel(attention)
    with pytest.raises(ActivationArgumentError, match="need_weights=False"):
        attention(x[0], x[0], x[0])
    with pytest.raises(ActivationArgumentError, match="shorter than the group"):
        sequence_parallel(nn.Linear(2, 2), length=0)


class Bare(nn.Module):
    """Its attention is recomputed by a function without a module."""

    def __init__(self, reentrant, inside):
        super().__init__()
        self.given, self.inside, self.norm = {"use_reentrant": reentrant}, inside, nn.LayerNorm(8)
        self.block = Attends()

    def forward(self, x):
        def attend(x):
            return self.block(x) if self.inside else F.scaled_dot_product_attention(x, x, x, is_causal=True)

        return torch.utils.checkpoint.checkpoint(attend, self.norm(x), **self.given)


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_without_a_module_is_refused(reentrant):
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    for inside in (False, True):
        model = Bare(reentrant, inside)
        sp = sequence_parallel(model)
        if inside:  # the recomputation goes through a module's call
            model(x).sum().backward()
        else:
            with pytest.raises(ActivationArgumentError, match="checkpointed by itself"):
                model(x)
            with torch.no_grad(), sp.paused():
                model(x)
        sp.remove()


# - the loss


def weighed(rank, world):
    """Ranks with 1, 2, ... tokens, and one with none."""
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    mine = torch.arange(rank, dtype=torch.float64) + 10 * rank
    loss = token_mean((weight * mine).sum(), rank)
    loss.backward()
    grad = weight.grad.clone()
    dsx_comm.all_reduce(grad)
    everything = torch.cat([torch.arange(r, dtype=torch.float64) + 10 * r for r in range(world)])
    torch.testing.assert_close(loss.detach(), 2 * everything.mean())
    torch.testing.assert_close(grad / world, everything.mean())
    assert token_mean(weight.detach() * 0, 0) == 0
    with pytest.raises(ActivationArgumentError, match="expected the sum of this rank's losses"):
        token_mean(torch.ones(3), 3)


def test_the_mean_over_uneven_numbers_of_tokens():
    run_ranks(weighed, 3)


def test_the_package_names_what_it_has():
    for name in ("sequence_parallel", "token_mean", "SequenceParallel"):
        assert name in dsx_activations.__all__
