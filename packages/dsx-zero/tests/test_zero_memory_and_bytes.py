"""Resident bytes and bytes on the wire are those of the formulas: within 2 % and 1 %, counted, not estimated.

P parameters, N ranks, a micro-batches. Adam in fp32: 16P; 8P + 8P/N; 4P + 12P/N; 16P/N for stages 0 to 3. bf16
parameters and gradients with fp32 masters: 16P; 4P + 12P/N; 2P + 14P/N; 16P/N. Sent per rank and step: 2P(N-1)/N for
stages 0-1, (a+1)P(N-1)/N for stage 2, 3aP(N-1)/N for stage 3, in the dtype that travels.
"""

from __future__ import annotations

import contextlib

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny

WIDTH = 64  # large enough that alignment of biases is below the tolerance, small enough to be quick


def build(dtype):
    return tiny.MLP(width=WIDTH, hidden=WIDTH * 4, out=WIDTH, depth=4).to(dtype)


def train(model, optimizer, rank, accumulation, *, each, steps=1):
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        if step:
            optimizer.zero_grad()
        for micro in range(accumulation):
            with contextlib.nullcontext() if each or micro == accumulation - 1 else optimizer.no_sync():
                x, y = model.example(2, seed=rank)
                model.loss(x.to(dtype), y).backward()
        optimizer.step(max_norm=1.0)


def expected_bytes(stage, world, count, low):
    n = world
    fp32 = {0: 16, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}
    bf16 = {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}
    return count * (bf16 if low else fp32)[stage]


def check_memory(rank, world):
    for low in (False, True):
        for stage in range(4):
            model = build(torch.bfloat16 if low else torch.float32)
            count = sum(p.numel() for p in model.parameters())
            model, optimizer = dsx_zero.shard(
                model,
                lambda p: torch.optim.AdamW(p),
                stage=stage,
                config={"stage3_param_persistence_threshold": 0},
            )
            train(model, optimizer, rank, 1, each=True, steps=2)
            held = optimizer.state_bytes()
            want = expected_bytes(stage, world, count, low)
            assert sum(held.values()) == pytest.approx(want, rel=0.02), (stage, low, held)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resident_bytes_are_the_formula(world):
    run_ranks(check_memory, world, timeout=120)


def check_traffic(rank, world, low):
    size = 2 if low else 4
    for stage, accumulation, keep in [
        (s, a, k) for s in range(4) for a in (1, 3) for k in ((False, True) if s > 1 else (False,))
    ]:
        model = build(torch.bfloat16 if low else torch.float32)
        count = sum(p.numel() for p in model.parameters())
        model, optimizer = dsx_zero.shard(
            model, lambda p: torch.optim.AdamW(p), stage=stage, config={"stage3_param_persistence_threshold": 0}
        )
        each = stage >= 2 and not keep
        train(model, optimizer, rank, accumulation, each=each, steps=2)  # the first step agrees, the second is frozen
        optimizer.zero_grad()
        with dsx_comm.count_traffic() as traffic:
            train(model, optimizer, rank, accumulation, each=each)
        a = accumulation
        volume = {0: 2, 1: 2, 2: 2 if keep else a + 1, 3: 2 * a + 1 if keep else 3 * a}[stage]
        want = volume * count * size * (world - 1) / world
        assert traffic.sent_bytes() == pytest.approx(want, rel=0.01), (stage, a, keep, low, traffic.sent_bytes() / want)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_sent_are_the_formula(world, low):
    run_ranks(check_traffic, world, low, timeout=120)
