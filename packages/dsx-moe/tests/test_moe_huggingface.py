"""Hugging Face models with random weights: conversion to expert parallelism, training, state, and restoring."""

import copy
import warnings

import dsx_comm
import dsx_moe
import pytest
import torch
from dsx_moe import apply_expert_parallel, restore_experts
from dsx_moe.errors import ConversionError
from dsx_moe.rules import RouterRule
from dsx_testkit import run_ranks
from torch import nn

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 32,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 4, "shared_expert_intermediate_size": 12, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "norm_topk_prob": True, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
         "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "topk_method": "greedy",
         "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
         "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2,
         "topk_group": 1},
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8}),
}  # fmt: skip


def tiny(family):
    name, more = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, name)(**{**SIZES, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # some families start with zeros
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens_of(rank):
    return torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(rank))


def _train(rank, world, family, ep_size, chunks):
    dsx_comm.init_distributed()
    model = tiny(family)
    names = apply_expert_parallel(model, ep_size, overlap_chunks=chunks)
    held = sum(p.numel() for p in model.parameters() if dsx_moe.is_moe_param(p))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(tokens_of(rank), labels=tokens_of(rank)).loss
        loss.backward()
        dsx_moe.average_gradients(model)
        dsx_moe.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    saved = dsx_moe.full_optimizer_state_dict(model, optimizer)
    restore_experts(model)
    return names, held, losses, model.state_dict(), saved["state"]


def _oracle(family, world):
    model = tiny(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        each = [model(tokens_of(rank), labels=tokens_of(rank)).loss for rank in range(world)]
        (sum(each) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    names = {id(p): name for name, p in model.named_parameters()}
    state = {names[id(p)]: values for p, values in optimizer.state.items()}
    return losses, model.state_dict(), state


def _compare(family, world, ep_size, chunks=1):
    losses, weights, moments = _oracle(family, world)
    for rank, (names, _, mine, after, state) in enumerate(run_ranks(_train, world, family, ep_size, chunks)):
        assert names
        assert all("experts" in name for name in names)
        assert mine == pytest.approx([step[rank] for step in losses], rel=2e-4)
        assert after.keys() == weights.keys()
        for name in weights:
            torch.testing.assert_close(after[name], weights[name], rtol=2e-3, atol=2e-3)
        assert state.keys() == moments.keys()
        for name in moments:
            torch.testing.assert_close(state[name]["exp_avg"], moments[name]["exp_avg"], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_a_family_trains_like_one_process(family):
    _compare(family, 2, 2, chunks=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_every_family_trains_like_one_process(family, ep_size):
    _compare(family, 4, ep_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_on_one_rank_keeps_the_outputs_and_can_be_undone(family):
    model = tiny(family)
    inputs = tokens_of(0)
    expected = model(inputs, labels=inputs)
    expected.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    names = apply_expert_parallel(model, 1)
    got = model(inputs, labels=inputs)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    got.loss.backward()
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-4)
    assert model.state_dict().keys() == before.keys()
    kinds = {type(model.get_submodule(name)).__name__ for name in names}
    assert kinds == {"PackedExpertShard"}
    assert restore_experts(model) == names
    torch.testing.assert_close(model(inputs).logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_restored_model_saves_and_loads_the_hugging_face_way(tmp_path):
    model = tiny("mixtral")
    expected = model(tokens_of(0)).logits
    apply_expert_parallel(model, 1)
    restore_experts(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(again(tokens_of(0)).logits, expected, rtol=1e-5, atol=1e-5)


class OldBlock(nn.Module):
    """Mixtral's block as it was before transformers 5: a router, and experts in a list."""

    def __init__(self, norm=True, logits=True):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 8)) for _ in range(4)])
        self.top_k, self.norm, self.logits = 2, norm, logits

    def forward(self, hidden):
        flat = hidden.view(-1, 8)
        logits = self.gate(flat)
        weights, chosen = torch.softmax(logits.float(), 1).topk(2, dim=-1)
        if self.norm:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        out = out.view_as(hidden)
        return (out, logits) if self.logits else out


class OldModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.block = OldBlock(**options)

    def forward(self, x):
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("logits", [True, False])
def test_experts_in_a_module_list_are_found_and_restored(logits):
    torch.manual_seed(0)
    model = OldModel(logits=logits)
    x = torch.randn(2, 5, 8)
    expected, keys = model.block(x), list(model.state_dict())
    assert apply_expert_parallel(model, 1) == ["block"]
    got = model.block(x)
    assert isinstance(got, tuple) == logits
    torch.testing.assert_close(got, expected)
    assert list(model.state_dict()) == keys
    restore_experts(model)
    assert isinstance(model.block, OldBlock)
    torch.testing.assert_close(model.block(x), expected)


def test_a_router_of_another_kind_is_refused_until_it_is_described():
    torch.manual_seed(0)
    model = OldModel(norm=False)
    x = torch.randn(2, 5, 8)
    expected = model(x)
    with pytest.raises(ConversionError, match=r"block: \(OldBlock\) gives other outputs"):
        apply_expert_parallel(model, 1)
    assert torch.equal(model(x), expected)
    apply_expert_parallel(model, 1, rule=RouterRule(route_norm=False))
    torch.testing.assert_close(model(x), expected)


def _module_list(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    model = OldModel()
    x = torch.randn(2, 5, 8)
    expected, whole = model(x), copy.deepcopy(model.state_dict())
    apply_expert_parallel(model, world)
    held = [name for name in model.state_dict() if ".experts." in name]
    torch.testing.assert_close(model(x), expected)
    full = dsx_moe.full_state_dict(model)
    restore_experts(model)
    same = all(torch.equal(model.state_dict()[name], value) for name, value in whole.items())
    return held, same, all(torch.equal(full[name], value) for name, value in whole.items()), full.keys() == whole.keys()


def test_experts_in_a_module_list_on_several_ranks():
    for rank, (held, same, full, keys) in enumerate(run_ranks(_module_list, 2)):
        assert {name.split(".")[2] for name in held} == {str(2 * rank), str(2 * rank + 1)}
        assert same
        assert full
        assert keys


def _resume(rank, world, ep_size, family, weights, saved):
    dsx_comm.init_distributed()
    model = tiny(family)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    apply_expert_parallel(model, ep_size, check=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model.load_state_dict(weights)
    dsx_moe.load_full_optimizer_state_dict(model, optimizer, saved)
    loss = model(tokens_of(rank), labels=tokens_of(rank)).loss
    loss.backward()
    dsx_moe.average_gradients(model)
    optimizer.step()
    return dsx_moe.full_state_dict(model), dsx_moe.full_optimizer_state_dict(model, optimizer)


def test_state_may_be_loaded_at_another_expert_parallel_size():
    model = tiny("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(tokens_of(5), labels=tokens_of(5)).loss.backward()
    optimizer.step()
    start = (model.state_dict(), dsx_moe.full_optimizer_state_dict(model, optimizer))
    two = run_ranks(_resume, 2, 2, "qwen3_moe", *start)[0]
    one = run_ranks(_resume, 2, 1, "qwen3_moe", *start)[0]
    for name in one[0]:
        torch.testing.assert_close(two[0][name], one[0][name], rtol=1e-4, atol=1e-5)
    assert two[1]["param_groups"][0]["lr"] == 0.01
    loaded_from_two = run_ranks(_resume, 2, 1, "qwen3_moe", *two)[0]
    assert loaded_from_two[0].keys() == one[0].keys()


def test_experts_that_do_not_divide_and_models_without_experts_are_refused():
    model = tiny("mixtral")
    before = dict(model.named_modules())
    with pytest.raises(ConversionError, match="multiple of ep_size"):
        apply_expert_parallel(model, 3)
    with pytest.raises(ConversionError, match="no module"):
        apply_expert_parallel(nn.Sequential(nn.Linear(2, 2)), 1)
    with pytest.raises(ConversionError, match="matches 'nothing'"):
        apply_expert_parallel(model, 1, pattern="nothing")
    assert dict(model.named_modules()).keys() == before.keys()
    assert apply_expert_parallel(model, 1, pattern=r"model\.layers\.1\..*") == ["model.layers.1.mlp.experts"]


class SquaredWeights(nn.Module):
    """Packed experts whose output is not the weighted sum: the routing weights are squared."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.hidden_dim = 3, 8
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, tokens, chosen, weights):
        return torch.einsum("tkij,tj,tk->ti", self.weight[chosen], tokens, weights.square())


def test_packed_experts_whose_output_is_not_a_weighted_sum_are_refused():
    with pytest.raises(ConversionError, match="gives other outputs"):
        apply_expert_parallel(nn.ModuleDict({"experts": SquaredWeights()}), 1)
