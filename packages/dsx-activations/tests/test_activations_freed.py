"""Measuring a model for a memory budget leaves no graph behind: a graph that holds its own tensors is never freed."""

from __future__ import annotations

import gc
import weakref

import dsx_activations
import pytest
import torch
from torch import nn


@pytest.mark.parametrize("operators", [True, False])
@pytest.mark.parametrize("layer", [nn.Softmax, nn.Tanh, nn.LayerNorm])
def test_a_measured_model_is_freed(layer, operators):
    last = nn.LayerNorm(8) if layer is nn.LayerNorm else layer(-1) if layer is nn.Softmax else layer()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), last) for _ in range(3)), nn.Softmax(-1))
    budget = dsx_activations.apply_memory_budget(model, 0.5, blocks=["0", "1", "2"], operators=operators)
    for _ in range(3):
        model(torch.randn(4, 8)).pow(2).sum().backward()
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    budget.remove()
    del model, budget, last
    gc.collect()
    assert [parameter() for parameter in held] == [None] * len(held)
