"""Models by their configuration alone: their tensors are those of transformers' code, and so are their plans."""

from __future__ import annotations

import collections
import importlib
import json

import pytest
import torch
from dsx_plan import PlanError
from dsx_plan.decoders import decoder
from dsx_plan.families import shape_of
from dsx_plan.models import model_maker

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
MOE = {**BASE, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
       "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}  # fmt: skip

FAMILIES = {
    "llama": (BASE, "LlamaForCausalLM"),
    "mistral": ({**BASE, "head_dim": 8, "sliding_window": 16}, "MistralForCausalLM"),
    "qwen2": (BASE, "Qwen2ForCausalLM"),
    "qwen3": ({**BASE, "head_dim": 24}, "Qwen3ForCausalLM"),
    "gemma": ({**BASE, "head_dim": 24}, "GemmaForCausalLM"),
    "gemma2": ({**BASE, "head_dim": 24}, "Gemma2ForCausalLM"),
    "gemma3_text": ({**BASE, "head_dim": 24}, "Gemma3ForCausalLM"),
    "mixtral": ({**BASE, "num_experts_per_tok": 2, "num_local_experts": 4}, "MixtralForCausalLM"),
    "qwen2_moe": ({**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": []},
                  "Qwen2MoeForCausalLM"),
    "qwen3_moe": ({**MOE, "num_experts": 4, "head_dim": 24, "mlp_only_layers": []}, "Qwen3MoeForCausalLM"),
    "deepseek_v2": ({**MOE, **MLA, "n_routed_experts": 4}, "DeepseekV2ForCausalLM"),
    "deepseek_v3": ({**MOE, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}, "DeepseekV3ForCausalLM"),
    "glm4_moe": ({**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16,
                  "use_qk_norm": True, "n_group": 1, "topk_group": 1}, "Glm4MoeForCausalLM"),
}  # fmt: skip


def shapes(model):
    return collections.Counter(tuple(parameter.shape) for parameter in model.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_tensors_are_those_of_the_code(kind):
    transformers = pytest.importorskip("transformers", reason="transformers has the code that is compared")
    more, name = FAMILIES[kind]
    text = {**more, "model_type": kind, "architectures": [name]}
    with torch.device("meta"):
        theirs = getattr(transformers, name)(transformers.AutoConfig.for_model(**text))
        mine = decoder(text)
    assert shapes(mine) == shapes(theirs)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_a_decoder_trains(kind):
    more, _ = FAMILIES[kind]
    torch.manual_seed(0)
    model = decoder({**more, "model_type": kind})
    for parameter in model.parameters():
        if parameter.dim() == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 128, (2, 8))
    whole = model(ids, labels=ids)
    whole.loss.backward()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(first) == len(list(model.parameters())) and all(g.isfinite().all() for g in first)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for old, parameter in zip(first, (p for p in model.parameters() if p.grad is not None)):
        torch.testing.assert_close(parameter.grad, old)
    assert torch.equal(model(ids[:, :5]).logits, model(ids).logits[:, :5]) or torch.allclose(
        model(ids[:, :5]).logits, model(ids).logits[:, :5], atol=1e-5
    ), "a token sees no later one"


PUBLISHED = {
    "llama-3-405b": ({"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256,
                      "num_attention_heads": 128, "num_key_value_heads": 8, "model_type": "llama"}, 405.85),
    "mixtral-8x7b": ({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
                      "num_experts_per_tok": 2, "model_type": "mixtral"}, 46.70),
    "qwen3-30b-a3b": ({"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128,
                       "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                       "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
                       "model_type": "qwen3_moe"}, 30.53),
    "deepseek-v3": ({"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                     "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256,
                     "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
                     "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                     "vocab_size": 129280, "model_type": "deepseek_v3"}, 671.03),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name):
    text, billions = PUBLISHED[name]
    with torch.device("meta"):
        model = decoder(text)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_without_code_the_configuration_is_enough(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "a_new_one"}))
    assert type(model_maker(f"hf://{tmp_path}")()).__name__ == "DecoderForCausalLM"
    found = importlib.import_module

    def without(name, *args):
        if name == "transformers":
            raise ImportError("no transformers")
        return found(name, *args)

    monkeypatch.setattr("dsx_plan.models.importlib.import_module", without)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "llama"}))
    assert type(model_maker(str(tmp_path))()).__name__ == "DecoderForCausalLM"


@pytest.mark.parametrize(("more", "words"), [
    ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "it has linear_attention"),
    ({"hidden_size": None}, "it does not say hidden_size"),
    ({"mamba_d_state": 128}, "it has mamba_d_state"),
])  # fmt: skip
def test_a_model_that_is_no_such_decoder_is_refused_by_name(tmp_path, more, words):
    text = {**BASE, "model_type": "a_new_one", **more}
    with pytest.raises(PlanError, match=words):
        shape_of(text)
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(PlanError, match=r"give file\.py:function"):
        model_maker(str(tmp_path))
