"""Buffers keep the dtype they were made with in 16-bit training; `data_types.buffer_dtype` casts them."""

import dsx
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

FREQUENCIES = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)


class Rotary(nn.Module):
    """Angles of a rotary embedding beside a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("inv_freq", FREQUENCIES.clone())
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16), persistent=False)

    def forward(self, position):
        return self.scale * torch.sin(position * self.inv_freq)


def build(precision, stage=0, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        precision: {"enabled": True},
        **more,
    }
    return dsx.initialize(model=Rotary(), config=config)[0]


def dtypes(engine):
    return [engine.module.get_buffer(name).dtype for name in ("inv_freq", "table", "low")]


def keep(rank, world, precision, stage):
    engine = build(precision, stage)
    assert dtypes(engine) == [torch.float32, torch.int64, torch.bfloat16]
    assert torch.equal(engine.module.inv_freq, FREQUENCIES)
    # In bf16 the angle at position 4096 is off by more than a radian.
    position = torch.tensor(4096.0)
    low = engine.precision.dtype("compute")
    got = engine(position).float()
    want = torch.sin(position.to(low) * FREQUENCIES)
    assert (got - want).abs().max() < 0.02
    engine.backward(got.sum())
    engine.step()
    assert torch.equal(engine.module.inv_freq, FREQUENCIES)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world, stage", [(1, 0), (2, 3)])
def test_buffers_keep_their_dtype(precision, world, stage):
    run_ranks(keep, world, precision, stage)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_buffer_dtype_casts_those_of_floating_point(name, dtype):
    engine = build("bf16", data_types={"buffer_dtype": name})
    assert dtypes(engine) == [dtype, torch.int64, dtype]
    engine.destroy()
