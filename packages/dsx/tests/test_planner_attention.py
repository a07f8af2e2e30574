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
