"""Stage 3 on one rank is stage 3: parameters are there only while their unit is used, and the bits are those of
plain torch.
"""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 32, 6
CONFIG = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Deep(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 8)
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.last(x).square().mean()


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_bits_of_plain_torch(init, accumulation, recompute):
    plain = Deep(recompute)
    optimizer = adamw(plain.parameters())
    if init:
        with dsx_zero.Init():
            model = Deep(recompute)
    else:
        model = Deep(recompute)
    model, sharded = dsx_zero.shard(model, adamw, config=CONFIG)
    assert sharded.runtime.stage == 3
    for number, x in enumerate(batches(4 * accumulation), 1):
        ours, theirs = model(x), plain(x)
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
        if number % accumulation == 0:
            for each in (sharded, optimizer):
                each.step()
                each.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, dsx_zero.PartitionedParameter), name
        assert torch.equal(parameter.full_tensor(), other), name


def test_memory_between_and_in_uses():
    model, optimizer = dsx_zero.shard(Deep(), adamw, config=CONFIG)
    nbytes = optimizer.state_bytes()
    padded = sum(unit_group.layout.numel for unit in optimizer.runtime.units for unit_group in unit.groups)
    assert nbytes["params"] == 4 * padded  # the shards, and nothing gathered
    assert nbytes["buffers"] == 0
    most = 0

    def look(*_):
        nonlocal most
        most = max(most, optimizer.state_bytes()["buffers"])

    for block in model.blocks:
        block.register_forward_hook(look)
    model(batches(1)[0])
    block = 4 * (WIDTH * WIDTH + WIDTH)
    assert 0 < most <= 2 * block + 4 * (2 * 8 * WIDTH + WIDTH + 64)  # one block, and the root's own
    assert optimizer.state_bytes()["buffers"] == 0


def test_what_users_do_with_partitioned_parameters():
    model, optimizer = dsx_zero.shard(Deep(), adamw, config=CONFIG)
    weight = model.first.weight
    with dsx_zero.GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(0.5)
    assert torch.equal(weight.full_tensor(), torch.full((WIDTH, 8), 0.5))
    model(batches(1)[0]).backward()
    assert dsx_zero.safe_get_full_grad(weight).shape == (WIDTH, 8)
    optimizer.step()
    optimizer.zero_grad()
    assert dsx_zero.safe_get_full_optimizer_state(weight, "exp_avg").shape == (WIDTH, 8)
    state = copy.deepcopy(optimizer.state_dict())
    before = [p.full_tensor() for p in model.parameters()]
    model(batches(1)[0]).backward()
    optimizer.step()
    optimizer.load_state_dict(state)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_model_goes_from_stage_3_to_others_and_back():
    model, optimizer = dsx_zero.shard(Deep(), adamw, config=CONFIG)
    values = [p.full_tensor() for p in model.parameters()]
    optimizer.release()
    model, optimizer = dsx_zero.shard(model, adamw, stage=2)
    assert all(type(p) is nn.Parameter and torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    optimizer.release()
    model, _ = dsx_zero.shard(model, adamw, config=CONFIG)
    assert all(torch.equal(p.full_tensor(), v) for p, v in zip(model.parameters(), values, strict=True))
