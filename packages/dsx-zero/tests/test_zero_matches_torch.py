"""Every stage equals plain PyTorch on the global batch: models with oddities, accumulation, several ranks, fp32 and
bf16.

fp32 tolerance: rtol 2e-5, atol 2e-6 after 3 steps of AdamW (eps 1e-3, so that rounding noise in zero gradients is not
blown up) with clipping. That is a few units in the last place per step; a wrong scale, a lost or doubled gradient is
1e-3 and more. bf16: the reference rounds where sharding rounds (each rank's gradient, their mean, the sum over
micro-batches).
"""

from __future__ import annotations

import contextlib

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny

STEPS, ROWS, MAX_NORM = 3, 4, 0.5

MODELS = {
    "mlp": lambda rank: tiny.MLP(),
    "gpt": lambda rank: tiny.TinyGPT(tied=True),
    "tied": lambda rank: tiny.Tied(),
    "reused": lambda rank: tiny.Reused(),
    "frozen": lambda rank: tiny.Frozen(),
    "unused": lambda rank: tiny.Unused(rank, rows=ROWS),
    "odd": lambda rank: tiny.OddSizes(),
    "groups": lambda rank: tiny.TwoGroups(),
    "mixed": lambda rank: tiny.MixedDtypes(),
    "reentrant": lambda rank: tiny.Checkpointed(reentrant=True),
    "checkpointed": lambda rank: tiny.Checkpointed(reentrant=False),
}


def batch_of(model, world, step, micro):
    """The global batch of a micro-step; inputs in the dtype of the model's first parameter."""
    x, y = model.example(ROWS * world, seed=100 * step + micro)
    return (x.to(next(model.parameters()).dtype) if x.is_floating_point() else x), y


def rows_of(tensors, rank):
    return tuple(t[rank * ROWS : (rank + 1) * ROWS] for t in tensors)


def make_optimizer(model, parameters):
    if isinstance(model, tiny.TwoGroups):
        return torch.optim.AdamW(model.groups(1e-2), eps=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


class Reference:
    """Plain PyTorch, one process: fp32 masters, missing gradients are zeros."""

    def __init__(self, model, world, *, reduce_each):
        self.model, self.world, self.reduce_each = model, world, reduce_each
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer = make_optimizer(model, self.params)
        place = {id(p): m for p, m in zip(self.params, self.masters)}
        for group in self.optimizer.param_groups:
            group["params"] = [place[id(p)] for p in group["params"] if id(p) in place]

    def gradients(self, rank, batch, accumulation):
        if hasattr(self.model, "rank"):
            self.model.rank = rank
        (self.model.loss(*rows_of(batch, rank)) / accumulation).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        for p in self.model.parameters():
            p.grad = None
        return found

    def step(self, step, accumulation):
        batches = [batch_of(self.model, self.world, step, micro) for micro in range(accumulation)]
        local = [[self.gradients(r, b, accumulation) for b in batches] for r in range(self.world)]
        if self.reduce_each:
            per_micro = [self.mean([local[r][m] for r in range(self.world)]) for m in range(accumulation)]
            grads = self.total(per_micro)
        else:
            grads = self.mean([self.total(local[r]) for r in range(self.world)])
        for master, grad in zip(self.masters, grads):
            master.grad = grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters):
                p.copy_(master)
        return norm.item()

    @staticmethod
    def mean(ranks):
        return [(sum(g.float() for g in gs) / len(gs)).to(gs[0].dtype) for gs in zip(*ranks)]

    @staticmethod
    def total(micros):
        out = [g.clone() for g in micros[0]]
        for more in micros[1:]:
            for o, g in zip(out, more):
                o += g
        return out


def run_case(rank, world, make, stage, accumulation, *, keep=False, tolerance=(2e-5, 2e-6)):
    each = stage >= 2 and not keep
    reference = Reference(make(0), world, reduce_each=each)
    model = make(rank)
    model, optimizer = dsx_zero.shard(
        model,
        lambda params: make_optimizer(model, params),
        stage=stage,
        config={"stage3_param_persistence_threshold": 0, "keep_full_gradients": keep},
    )
    for step in range(STEPS):
        for micro in range(accumulation):
            last = micro == accumulation - 1
            with contextlib.nullcontext() if each or last else optimizer.no_sync():
                (model.loss(*rows_of(batch_of(model, world, step, micro), rank)) / accumulation).backward()
        outcome = optimizer.step(max_norm=MAX_NORM)
        optimizer.zero_grad()
        want = reference.step(step, accumulation)
        assert not outcome.overflow
        assert outcome.grad_norm == pytest.approx(want, rel=max(1e-4, tolerance[0]))
    rtol, atol = tolerance
    expected = dict(reference.model.named_parameters())
    actual = {name: whole(p).detach() for name, p in model.named_parameters()}
    assert_close_named(actual, {n: p.detach() for n, p in expected.items()}, rtol=rtol, atol=atol)


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def run_all(rank, world, cases):
    for name, stage, accumulation, keep, low in cases:
        make = MODELS[name]
        if low:
            make = lambda r, build=make: build(r).to(torch.bfloat16)  # noqa: E731
        try:
            run_case(
                rank,
                world,
                make,
                stage,
                accumulation,
                keep=keep,
                tolerance=(8e-3, 1e-3) if low or name == "mixed" else (2e-5, 2e-6),
            )
        except Exception as error:
            raise AssertionError(
                f"model {name}, stage {stage}, accumulation {accumulation}, keep {keep}, bf16 {low}: {error!r}"
            ) from error


def cases(stage, low):
    names = ("mlp", "tied", "frozen", "unused", "odd") if low else MODELS
    found = [(name, stage, accumulation, False, low) for name in names for accumulation in (1, 3)]
    return found + ([("mlp", stage, 3, True, low), ("unused", stage, 3, True, low)] if stage >= 2 else [])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_plain_torch(stage, world):
    run_ranks(run_all, world, cases(stage, low=False), timeout=120)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bf16_equals_a_reference_with_fp32_masters(world):
    run_ranks(run_all, world, [case for stage in range(4) for case in cases(stage, low=True)], timeout=120)
