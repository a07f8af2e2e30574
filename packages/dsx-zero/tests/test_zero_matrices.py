"""Muon on equal slices: the matrices are brought together at the step, and training has the bits of the plain
optimizer's, whatever the stage, the number of ranks, accumulation and clipping.

Gradients here are small whole numbers, so that their sums, their means and the norm have no rounding that depends on an
order.
"""

import dsx_ops
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Model(nn.Module):
    """Matrices of several forms, a stack of them, a tensor of queries, keys and values, and vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.qkv = nn.Parameter(torch.randn(20, 9))
        self.experts = nn.Parameter(torch.randn(5, 4, 6))
        self.tall = nn.Parameter(torch.randn(33, 2))
        self.scale = nn.Parameter(torch.randn(7))

    def forward(self, seeds):
        total = 0.0
        for seed in seeds:
            generator = torch.Generator().manual_seed(int(seed))
            for block in self.blocks:
                total = total + block(torch.randint(-2, 3, (12,), generator=generator).float()).dot(
                    torch.randint(-1, 2, (20,), generator=generator).float()
                )
            for parameter in (self.qkv, self.experts, self.tall, self.scale):
                numbers = torch.randint(-2, 3, parameter.shape, generator=generator).float()
                total = total + (parameter * numbers).sum()
        return total / 2  # two seeds


def torchs(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices[:2], "adjust_lr_fn": "match_rms_adamw"}, {"params": matrices[2:], "nesterov": False}]
    return torch.optim.Muon(groups, lr=0.02, weight_decay=0.25, momentum=0.75, ns_steps=4)


def ours(model, **settings):
    named = dict(model.named_parameters())
    own = {"qkv": {"split_rows": [8, 6, 6]}, "experts": {"stacked": True, "split_columns": 2}, "tall": {}}
    rest = [p for name, p in named.items() if name not in own]
    groups = [{"params": [named[name]], **more} for name, more in own.items()]
    return dsx_ops.Muon([*groups, {"params": rest}], lr=0.03, weight_decay=0.25, momentum=0.75, **settings)


MAKERS = {
    "torch": torchs,
    "ours": ours,
    "ours in bf16": lambda model: ours(model, ns_dtype="bfloat16", decay="cautious", adjust_lr_fn="unit_rms_norm"),
    "gram": lambda model: ours(model, ns_method="gram", nesterov=False),
}
STEPS = 3


def plain(make, accumulation, clip):
    model = Model()
    optimizer = MAKERS[make](model)
    for step in range(STEPS):
        for micro in range(accumulation):
            (model([2 * step + micro, 100 + micro]) / accumulation).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(rank, world, make, stage, accumulation, clip, config=None):
    import dsx_zero

    model = Model()
    optimizer = MAKERS[make](model)
    model, optimizer = dsx_zero.shard(
        model, optimizer, config={"stage": stage, "stage3_param_persistence_threshold": 0, **(config or {})}
    )
    for step in range(STEPS):
        for micro in range(accumulation):
            (model([2 * step + micro, 100 + micro]) / accumulation).backward()
        optimizer.step(max_norm=clip)
        optimizer.zero_grad()
    return {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}


def same_bits(make, world, stage, accumulation=1, clip=None, config=None):
    wanted = plain(make, accumulation, clip)
    for found in run_ranks(sharded, world, make, stage, accumulation, clip, config):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("make", "world", "stage", "accumulation", "clip"),
    [
        ("torch", 1, 3, 1, None), ("torch", 2, 1, 4, 2.0), ("torch", 3, 2, 1, None), ("torch", 4, 3, 4, 2.0),
        ("torch", 2, 0, 1, 2.0),
        ("ours", 1, 2, 1, 2.0), ("ours", 2, 3, 4, None), ("ours", 3, 1, 1, 2.0), ("ours", 4, 2, 1, None),
        ("ours", 2, 0, 1, None),
        ("ours in bf16", 2, 3, 1, None), ("ours in bf16", 4, 1, 1, 2.0), ("gram", 3, 3, 1, 2.0),
    ],
)  # fmt: skip
def test_training_has_the_bits_of_the_plain_optimizer(make, world, stage, accumulation, clip):
    same_bits(make, world, stage, accumulation, clip)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("make", MAKERS)
def test_everywhere(make, stage, world, accumulation, clip):
    same_bits(make, world, stage, accumulation, clip)
