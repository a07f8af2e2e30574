"""What a destroyed engine held is free: its optimizer's states at once, the rest with the last reference to it."""

from __future__ import annotations

import gc
import weakref

import dsx
import pytest
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Softmax(-1)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).sum()


def trained(stage: int, budget: float | None, model: nn.Module):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if budget is not None:
        config["activation_checkpointing"] = {"memory_budget": budget}
    made = dsx.initialize(model=model, config=config)
    for _ in range(3):
        made[0].backward(made[0](torch.randn(2, 16)))
        made[0].step()
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_freed_while_somebody_still_holds_the_optimizer(stage):
    made = trained(stage, None, Model())
    inner = made[0].optimizer.inner
    states = [
        weakref.ref(value)
        for state in inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    assert states and all(state() is not None for state in states)
    made[0].destroy()
    assert made[1] is not None and all(state() is None for state in states)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("budget", [None, 0.6])
def test_parameters_are_freed_with_the_model(stage, budget):
    model = Model()
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    made = trained(stage, budget, model)
    made[0].destroy()
    del made, model
    gc.collect()
    assert [parameter() for parameter in held] == [None] * len(held)
