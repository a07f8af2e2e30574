"""Attention is planned as the target runs it: a device has fused kernels for attention with dropout, a CPU has not."""

from __future__ import annotations

import pytest
import torch
from dsx_plan import Machine, layer_costs, plan
from torch import nn
from torch.nn import functional as F

HEADS, LENGTH, WIDTH = 4, 256, 256


class Attention(nn.Module):
    def __init__(self, dropout, by_place=False):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.by_place = dropout, by_place

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.inner(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.by_place:
            found = F.scaled_dot_product_attention(q, k, v, None, self.dropout, True)
        else:
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.outer(found.transpose(1, 2).reshape(x.shape))


def planned(dropout, machine, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
    }
    model = lambda: nn.Sequential(*(Attention(dropout, **more) for _ in range(2)))  # noqa: E731
    return plan(model, config, world_size=2, machine=machine, batch=torch.zeros(2, LENGTH, WIDTH))


@pytest.mark.parametrize("by_place", [False, True])
def test_dropout_does_not_change_the_kernel_of_a_device(by_place):
    without, with_dropout = planned(0.0, "V100-32"), planned(0.1, "V100-32", by_place=by_place)
    assert with_dropout.flops == without.flops
    assert with_dropout.parts == without.parts and with_dropout.peak_bytes == without.peak_bytes


def test_a_cpu_is_planned_with_what_it_runs():
    here = Machine.of_this_host()
    assert planned(0.1, here).peak_bytes > planned(0.0, here).peak_bytes, "scores and their mask are kept"


def test_costs_of_layers_are_of_the_target_too():
    inputs = torch.zeros(4, LENGTH, WIDTH)
    without, with_dropout = (layer_costs([Attention(p)], inputs, machine="A100-80")[0] for p in (0.0, 0.1))
    assert with_dropout == without


class Latent(nn.Module):
    """Heads whose values have another size than their keys, as those of latent attention (MLA)."""

    def __init__(self, value):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, HEADS * (2 * 48 + value)), nn.Linear(HEADS * value, WIDTH)
        self.value = value

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).split((48, 48, self.value), -1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("value", [32, 64])
def test_values_of_another_size_do_not_change_the_kernel_of_a_device(value):
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}  # fmt: skip
    batch = torch.zeros(2, 8 * LENGTH, WIDTH)
    unequal, equal = (
        plan(lambda size=size: Latent(size), config, world_size=1, machine="H100-SXM", batch=batch)
        for size in (value, 48)
    )
    assert unequal.parts["attention"] > 0.0
    assert unequal.parts["attention"] == pytest.approx(equal.parts["attention"] * max(value, 48) / 48, rel=0.35)
    scores = 2 * HEADS * (8 * LENGTH) ** 2 * 4
    assert unequal.peak_bytes < equal.peak_bytes + scores / 4, "no scores are kept"
    here = plan(lambda: Latent(value), config, world_size=1, machine=Machine.of_this_host(), batch=batch)
    assert here.peak_bytes > unequal.peak_bytes + scores / 4, "a CPU is planned with what it runs"
