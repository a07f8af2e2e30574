"""Planned memory of phases against formulas; tests/device/test_device_phases.py has a simulated device's allocator."""

from __future__ import annotations

import pytest
import torch
from dsx.planning import Plan, PlanError, plan
from dsx_plan.phases import Generator
from dsx_plan.text import describe_plan
from torch import nn

WIDTH, DEPTH, BUCKET = 128, 6, 1 << 16
PARAMETERS = DEPTH * WIDTH * WIDTH


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.float().square().mean()


def ask(stage, generator, model=Stack, batch=None) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    batch = torch.zeros(4, WIDTH, dtype=torch.bfloat16) if batch is None else batch
    return plan(model, config, world_size=2, machine="H100-SXM", batch=batch, changes=False, generator=generator)


@pytest.mark.parametrize("stage", [1, 3])
def test_sleep_leaves_nothing_and_a_push_takes_one_bucket(stage):
    found, plain = ask(stage, Generator(ranks=2, bucket_bytes=BUCKET)), ask(stage, None)
    totals = {name: sum(parts.values()) for name, parts in found.phases.items()}
    assert list(totals) == ["train", "sleep", "generate", "push"]
    assert totals["train"] == found.peak_bytes == plain.peak_bytes and plain.phases == {}
    assert totals["sleep"] < 4096
    assert totals["generate"] == totals["sleep"] + PARAMETERS  # 2 bytes each, divided by two ranks
    beside = totals["push"] - totals["generate"]
    assert 0.4 * BUCKET < beside <= BUCKET + 64
    assert (found.peak, found.bytes, found.step_seconds) == (plain.peak, plain.bytes, plain.step_seconds)
    assert "memory of the device by phase" in describe_plan(found) and "phase" not in describe_plan(plain)
    assert Plan.from_json(found.to_json()).phases == found.phases


def test_torchs_kernels_are_given_copies_of_gradients_where_a_step_clips():
    def peak(kernels, **settings):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        } | settings
        batch = torch.zeros(4, WIDTH, dtype=torch.bfloat16)
        found = plan(Stack, config, world_size=1, machine="H100-SXM", batch=batch, changes=False, kernels=kernels)
        return found.peak_bytes

    compiled, by_torch = peak("compiled"), peak("torch")  # clipping is the default
    assert 0.9 * 4 * PARAMETERS <= by_torch - compiled <= 4 * PARAMETERS
    assert peak("torch", gradient_clipping=0.0) == compiled
    with pytest.raises(PlanError, match="kernels: got 'triton', expected 'compiled' or 'torch'"):
        peak("triton")


def test_keys_and_values_are_those_of_the_model():
    t = pytest.importorskip("transformers")
    config = t.LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                           num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    tokens = torch.zeros(4, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    found = ask(3, Generator(tokens=1000, ranks=2), lambda: t.LlamaForCausalLM(config), batch)
    assert found.phases["generate"]["keys and values"] == 1000 * 2 * 3 * 2 * 16 * 2 // 2  # both, layers, heads, width
    elsewhere = ask(3, Generator(tokens=1000, ranks=0), lambda: t.LlamaForCausalLM(config), batch)
    assert elsewhere.phases["generate"] == elsewhere.phases["sleep"]


def test_a_model_without_a_cache_is_noted_and_mistakes_are_named():
    found = ask(2, Generator(tokens=100))
    assert any("past_key_values" in note for note in found.notes)
    with pytest.raises(PlanError, match="generator ranks: got -1"):
        Generator(ranks=-1)
