"""Random-LTD: a dropping layer equals the layer on the gathered tokens, masks included; the schedule is the formula."""

import copy
import pickle

import pytest
import torch
from dsx_data import RandomLTDScheduler, convert_to_random_ltd, save_without_random_ltd
from dsx_data.errors import DataArgumentError
from dsx_data.routing import TokenDrop, find_layers, remove_random_ltd
from dsx_data.routing import tokens as token_functions
from torch import nn
from torch.utils.checkpoint import checkpoint


def schedule(*arguments, **changes):
    return RandomLTDScheduler(section(*arguments, **changes))


def section(layers=3, ids=(1,), low=8, high=16, steps=10, per_step=4, **changes):
    return {
        "total_layer_num": layers, "random_ltd_layer_num": len(ids), "random_ltd_layer_id": list(ids),
        "random_ltd_schedule": {
            "min_value": low, "max_value": high, "schedule_config": {"require_steps": steps, "seq_per_step": per_step},
        }, **changes,
    }  # fmt: skip


@pytest.fixture(params=["dsx_ops", "torch"])
def backend(request, monkeypatch):
    """With and without the package dsx_ops."""
    if request.param == "dsx_ops":
        pytest.importorskip("dsx_ops")
    else:
        monkeypatch.setattr(token_functions, "_ops", lambda: None)


class Attention(nn.Module):
    """A layer with attention; its mask is additive, boolean, or none."""

    def __init__(self, width=8, causal=False, batch_first=True, tuples=False):
        super().__init__()
        self.qkv, self.causal, self.batch_first, self.tuples = nn.Linear(width, 3 * width), causal, batch_first, tuples

    def forward(self, hidden, attention_mask=None, position_ids=None):
        x = hidden if self.batch_first else hidden.transpose(0, 1)
        if position_ids is not None:
            x = x + position_ids[..., None]
        q, k, v = self.qkv(x).chunk(3, -1)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, :].bool()
        if attention_mask is not None and attention_mask.dim() == 3:
            attention_mask = attention_mask[:, None]
        mixed = nn.functional.scaled_dot_product_attention(
            q[:, None], k[:, None], v[:, None], attn_mask=attention_mask,
            is_causal=self.causal and attention_mask is None,
        )[:, 0]  # fmt: skip
        out = x + mixed
        out = out if self.batch_first else out.transpose(0, 1)
        return (out, "weights") if self.tuples else out


def masks(batch, tokens):
    padding = torch.ones(batch, tokens, dtype=torch.bool)
    padding[0, tokens - 3 :] = False
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    additive = torch.zeros(batch, 1, 1, tokens, dtype=torch.float64).masked_fill(~padding[:, None, None], -1e9)
    return {
        "none": None, "padding": padding.long(), "additive": additive, "causal": causal[None, None],
        "both": (causal & padding[:, None, :] | torch.eye(tokens, dtype=torch.bool))[:, None],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "padding", "additive", "causal", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("by_position", [True, False])
def test_a_dropping_layer_is_the_layer_on_the_kept_tokens(backend, kind, batch_first, by_position):
    torch.manual_seed(0)
    layer = Attention(causal=kind == "none", batch_first=batch_first, tuples=by_position).double()
    plain = copy.deepcopy(layer)
    order = "batch_seq_dim" if batch_first else "seq_batch_dim"
    model = nn.ModuleList([layer])
    convert_to_random_ltd(model, Attention, config=schedule(1, (0,), hidden_state_order=order))
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    positions = torch.arange(16)[None].double()
    mask = masks(2, 16)[kind]
    given = x.clone() if batch_first else x.transpose(0, 1).contiguous()
    given.requires_grad_()
    torch.manual_seed(5)
    out = layer(given, mask, positions) if by_position else layer(given, attention_mask=mask, position_ids=positions)
    out = out[0] if by_position else out
    out.square().sum().backward()

    torch.manual_seed(5)
    indices = token_functions.draw_indices(2, 16, 8, x.device)
    assert (indices[:, 1:] > indices[:, :-1]).all()
    reference = x.clone().requires_grad_()
    rows = []
    for row, kept in enumerate(indices.tolist()):  # sample by sample in plain indexing
        cut = None
        if mask is not None:
            one = mask[row : row + 1] if mask.shape[0] > 1 else mask
            cut = one[:, kept] if one.dim() == 2 else one[..., kept]
            cut = cut[..., kept, :] if one.dim() == 4 and one.shape[-2] > 1 else cut
        part = reference[row : row + 1, kept]
        result = plain(part if batch_first else part.transpose(0, 1), cut, positions[:, kept])
        result = result[0] if by_position else result
        result = result if batch_first else result.transpose(0, 1)
        rows.append(reference[row].index_copy(0, torch.tensor(kept), result[0]))
    expected = torch.stack(rows)
    expected.square().sum().backward()
    found = out if batch_first else out.transpose(0, 1)
    assert torch.allclose(found, expected, atol=1e-12)
    grad = given.grad if batch_first else given.grad.transpose(0, 1)
    assert torch.allclose(grad, reference.grad, atol=1e-12)
    for ours, theirs in zip(layer.parameters(), plain.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_nothing_is_dropped_in_evaluation_at_full_length_and_in_other_layers():
    model = nn.Sequential(*(Attention() for _ in range(3)))
    plain = copy.deepcopy(model)
    drop = TokenDrop.from_config(section())
    convert_to_random_ltd(model, Attention, config=drop)
    x = torch.randn(2, 16, 8)
    assert not torch.equal(model(x), plain(x))
    assert torch.equal(model[0](x), plain[0](x)) and torch.equal(model[2](x), plain[2](x))
    assert torch.equal(model(x[:, :8]), plain(x[:, :8]))
    assert torch.equal(model.eval()(x), plain(x))
    drop.schedule.update_seq(10)
    assert torch.equal(model.train()(x), plain(x))


def test_recomputation_draws_the_same_tokens():
    torch.manual_seed(0)
    model = Attention()
    convert_to_random_ltd(nn.ModuleList([model]), Attention, config=schedule(1, (0,)))
    x = torch.randn(2, 16, 8, requires_grad=True)

    def grad(wrap):
        x.grad = None
        torch.manual_seed(3)
        wrap(x).square().sum().backward()
        return x.grad.clone()

    plain = grad(model)
    assert torch.equal(grad(lambda x: checkpoint(model, x, use_reentrant=False)), plain)
    assert torch.equal(grad(lambda x: checkpoint(model, x, use_reentrant=True)), plain)


def test_names_and_copies_are_those_of_the_plain_model():
    model = nn.Sequential(*(Attention() for _ in range(3)))
    names = list(model.state_dict())
    convert_to_random_ltd(model, Attention, config=schedule())
    assert list(model.state_dict()) == names == list(save_without_random_ltd(model))
    assert all(isinstance(layer, Attention) and type(layer).__name__ == "Attention" for layer in model)
    x = torch.randn(1, 16, 8)
    torch.manual_seed(1)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        assert torch.equal(other(x), expected)
    remove_random_ltd(model)
    assert {type(layer) for layer in model} == {Attention} and not any("ltd" in key for key in vars(model[0]))


def hugging_face(kind, attention):
    import transformers as hf

    small = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 32,
        "attn_implementation": attention,
    }
    if kind == "gpt2":
        config = hf.GPT2Config(
            n_layer=3, n_embd=16, n_head=2, vocab_size=40, n_positions=16, attn_implementation=attention
        )
        return hf.GPT2LMHeadModel(config)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, vocab_size=40, max_position_embeddings=16))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**small, vocab_size=40, max_position_embeddings=16))
    return hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=12, patch_size=3))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "vit"])
def test_hugging_face_models_by_rule(kind, attention):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face(kind, attention)
    layers = find_layers(model)
    assert len(layers) == 3
    convert_to_random_ltd(model, config=schedule(ids=(1, 2)))
    seen = []
    for layer in layers:
        linear = next(
            m for name, m in layer.named_modules() if isinstance(m, nn.Linear) or "Conv1D" in type(m).__name__
        )
        linear.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    ids = torch.randint(3, 40, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    inputs = (
        {"pixel_values": torch.randn(2, 3, 12, 12)} if kind == "vit" else {"input_ids": ids, "attention_mask": mask}
    )
    model.train()
    out = model(**inputs).logits
    out.square().mean().backward()
    assert seen[0] >= 16 and set(seen[1:]) == {8} and torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_causal_models_do_not_look_ahead_while_they_drop():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face("gpt2", "sdpa").double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    convert_to_random_ltd(model, config=schedule(ids=(0, 1, 2)))
    ids = torch.randint(0, 40, (1, 16))
    other = ids.clone()
    other[0, 10] = (ids[0, 10] + 1) % 40
    torch.manual_seed(4)
    first = model(input_ids=ids).logits
    torch.manual_seed(4)
    second = model(input_ids=other).logits
    assert torch.equal(first[:, :10], second[:, :10]) and not torch.equal(first[:, 10], second[:, 10])


def test_the_schedule_is_the_formula_and_goes_on():
    made = RandomLTDScheduler(section(6, (1, 3), low=10, high=101, steps=7, per_step=8), global_batch_size=4)
    total = 0
    for step in range(1, 12):
        kept = made.get_current_seq()
        total += 4 * (kept * 2 + 101 * 4)
        expected = 10 + 91 * step // 7
        assert made.update_seq(step) == max(10, min(expected - expected % 8, 101))
    assert made.consumed_layer_tokens == total == made.get_total_layer_tokens(11)
    other = RandomLTDScheduler(section(6, (1, 3), low=10, high=101, steps=7, per_step=8))
    other.load_state_dict(made.state_dict())
    assert (other.get_current_seq(), other.consumed_layer_tokens) == (made.get_current_seq(), total)


def test_a_step_is_counted_once_and_the_state_has_the_published_names():
    made = RandomLTDScheduler(section(6, (1, 3)), global_batch_size=4)
    assert made.state["current_steps"] == -1 and made.state["current_value"] == 8
    made.update_seq(5)
    made.update_seq(5)
    assert made.state == {
        "min_value": 8, "max_value": 16, "current_value": 12, "current_steps": 5, "schedule_type": "fixed_linear",
        "consumed_layer_tokens": 4 * (2 * 8 + 4 * 16), "schedule_config": {"require_steps": 10, "seq_per_step": 4},
    }  # fmt: skip
    assert (made.model_layer_num, made.random_ltd_layer_num, made.get_random_ltd_layer_num()) == (6, 2, 2)
    with pytest.raises(TypeError):
        made.state["current_value"] = 16  # a write that would do nothing
    other = RandomLTDScheduler(section(6, (1, 3)), global_batch_size=4)
    other.load_state_dict(made.state_dict())
    assert other.state == made.state
    other.load_state_dict({"current_seq": 12, "consumed_layer_tokens": 5})  # of an earlier version
    assert other.state["current_value"] == 12 and other.state["consumed_layer_tokens"] == 5


def test_layers_follow_the_schedule_that_the_caller_advances():
    model, made = nn.Sequential(*(Attention() for _ in range(3))), schedule(ids=(0, 2))
    convert_to_random_ltd(model, Attention, config=made)
    kept = []
    model[0].qkv.register_forward_hook(lambda _, args, __: kept.append(args[0].shape[1]))
    for step in range(1, 13):
        model(torch.randn(1, 16, 8))
        made.update_seq(step)
    assert kept == [made.get_seq(step) for step in range(12)] and kept[0] == 8 and kept[-1] == 16


def test_a_section_whose_schedule_nothing_would_advance_is_refused():
    model = nn.Sequential(*(Attention() for _ in range(3)))
    with pytest.raises(DataArgumentError, match=r"got a dict, expected a RandomLTDScheduler[\s\S]*update_seq\(steps\)"):
        convert_to_random_ltd(model, Attention, config=section())
    assert {type(layer) for layer in model} == {Attention}


def test_layers_without_a_mask():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden):
            return hidden + self.linear(hidden)

    model = nn.Sequential(Mixer(), Mixer(), Mixer())
    convert_to_random_ltd(model, Mixer, config=schedule(model_mask_name=None))
    x = torch.randn(2, 16, 8)
    assert ((model[1](x) != x).any(-1).sum(1) == 8).all()


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"random_ltd_layer_num": 2}, "random_ltd_layer_num: got 2, expected 1"),
        ({"ids": (3,)}, r"random_ltd_layer_id: got \[3\], expected different numbers from 0 to 2"),
        ({"ids": ()}, r"random_ltd_layer_id: got \[\]"),
        ({"low": 32}, "min_value 32, expected at most max_value, 16"),
        ({"steps": 0}, "require_steps: got 0"),
        ({"layer_token_lr_schedule": {"enabled": True}}, "layer_token_lr_schedule.enabled: got True, expected False"),
        ({"hidden_state_order": "x"}, "'batch_seq_dim' or 'seq_batch_dim'"),
    ],
)
def test_mistakes_in_the_section_are_named(changes, text):
    with pytest.raises(DataArgumentError, match=text):
        convert_to_random_ltd(nn.Sequential(*(Attention() for _ in range(3))), Attention, config=schedule(**changes))


def test_mistakes_of_use_are_named():
    model = nn.Sequential(Attention(), Attention())
    with pytest.raises(DataArgumentError, match="total_layer_num: got 3, expected 2"):
        convert_to_random_ltd(model, Attention, config=schedule())
    with pytest.raises(DataArgumentError, match="pass the class of the layers"):
        convert_to_random_ltd(model, config=schedule(2))
    with pytest.raises(DataArgumentError, match="has no module of it"):
        convert_to_random_ltd(model, nn.LSTM, config=schedule(2))
    convert_to_random_ltd(model, Attention)
    with pytest.raises(DataArgumentError, match="this layer has no schedule"):
        model(torch.randn(1, 16, 8))
    convert_to_random_ltd(model, Attention, config=schedule(2))
    with pytest.raises(DataArgumentError, match="got an attention mask of str"):
        model[1](torch.randn(1, 16, 8), "flex")
    patched = Attention()
    patched.forward = patched.forward
    with pytest.raises(DataArgumentError, match="forward was replaced on the object"):
        convert_to_random_ltd(nn.Sequential(patched), Attention)
