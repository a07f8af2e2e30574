"""Ranks that want different things are told so before anything is divided: by key and by rank, on every rank."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch import nn


def model(**changes):
    return tiny.MLP(4, 6, 3, depth=2, **changes)


def sgd(**settings):
    return lambda params: torch.optim.SGD(params, **{"lr": 0.1, **settings})


class Deeper(tiny.MLP):
    """A class of another name."""


def groups(model, lr):
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": lr}, {"params": rest}], lr=0.1)


def frozen(model):
    model.layers[0].bias.requires_grad_(False)
    return model


def leaf(model):
    dsx_zero.set_z3_leaf_modules(model, [nn.ModuleList])
    return model


UNITS = {"stage": None, "config": {"stage": 3, "stage3_param_persistence_threshold": 0}}
DIFFERENCES = {
    "learning rate": (lambda: (model(), sgd(lr=0.2), {}), r"param_groups\[0\]\.lr \(rank 0: 0\.1; rank 1: 0\.2\)"),
    "optimizer": (
        lambda: (model(), lambda p: torch.optim.Adam(p, lr=0.1), {}),
        r"optimizer \(rank 0: SGD; rank 1: Adam\)",
    ),
    "momentum": (lambda: (model(), sgd(momentum=0.9), {}), r"\.momentum \(rank 0: 0; rank 1: 0\.9\)"),
    "groups": (lambda: ((m := model()), groups(m, 0.1), {}), r"param_groups\[1\]"),
    "stage": (lambda: (model(), sgd(), {"stage": 1}), r"zero_optimization\.stage \(rank 0: 2; rank 1: 1\)"),
    "bucket": (
        lambda: (model(), sgd(), {"config": {"stage": 2, "reduce_bucket_size": 100}, "stage": None}),
        r"zero_optimization\.reduce_bucket_size .*rank 1: 100",
    ),
    "precision": (
        lambda: (model(), sgd(), {"precision": dsx_zero.Precision(communication=torch.bfloat16)}),
        r"precision\.communication \(rank 0: None; rank 1: torch\.bfloat16\)",
    ),
    "reduction": (
        lambda: (model(), sgd(), {"reduction": dsx_zero.Reduction("sum")}),
        r"reduction\.op \(rank 0: mean; rank 1: sum\)",
    ),
    "shape": (
        lambda: (tiny.MLP(4, 7, 3, depth=2), sgd(), {}),
        r"parameter layers\.0\.weight \(rank 0: \(6, 4\) torch\.float32 trained; rank 1: \(7, 4\)",
    ),
    "dtype": (lambda: (model().bfloat16(), sgd(), {}), r"rank 1: \(6, 4\) torch\.bfloat16 trained"),
    "frozen": (lambda: (frozen(model()), sgd(), {}), r"layers\.0\.bias \(rank 0: .* trained; rank 1: .* frozen\)"),
    "a layer more": (
        lambda: (tiny.MLP(4, 6, 3, depth=3), sgd(), {}),
        r"layers\.2\.weight \(rank 0: nothing; rank 1: \(3, 6\)",
    ),
    "module": (lambda: (Deeper(4, 6, 3, depth=2), sgd(), {}), r"module \(root\) \(rank 0: MLP; rank 1: Deeper\)"),
    "buffers": (
        lambda: ((m := model()), (m.register_buffer("b", torch.ones(2)), sgd())[1], {}),
        r"buffer b \(rank 0: nothing; rank 1",
    ),
    "marks": (lambda: (leaf(model()), sgd(), UNITS), r"unit 0 \(rank 0: .*; rank 1: .*\)"),
}


def differ(rank, world, names):
    for name in names:
        build, text = DIFFERENCES[name]
        made, optimizer, settings = build() if rank == 1 else (model(), sgd(), {})
        if rank == 0 and name == "marks":
            settings = UNITS
        with pytest.raises(dsx_zero.RanksDifferError, match=text):
            dsx_zero.shard(made, optimizer, **{"stage": 2, **settings})
        # Nothing is left of it: the ranks agree again.
        made, optimizer = dsx_zero.shard(model(), sgd(), stage=2)
        made.loss(*made.example()).backward()
        optimizer.step()


def test_what_differs_is_named():
    run_ranks(differ, 2, list(DIFFERENCES))


def several(rank, world):
    with pytest.raises(dsx_zero.RanksDifferError, match=r"lr \(rank 0, 1, 3: 0\.1; rank 2: 0\.5\)"):
        dsx_zero.shard(model(), sgd(lr=0.5 if rank == 2 else 0.1), stage=1)


def test_the_odd_one_out_is_found_among_many():
    run_ranks(several, 4)


def fails(rank, world):
    """One rank raises its own error, the others do not wait for it and hear what it was."""
    mistakes = [
        lambda: dsx_zero.shard(model(), sgd(), stage=7),
        lambda: dsx_zero.shard(model(), 3, stage=1),
        lambda: dsx_zero.shard(model(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), stage=1),
        lambda: dsx_zero.shard(model(), lambda params: 1 / 0, stage=1),
    ]
    for mistake in mistakes:
        if rank == 1:
            with pytest.raises((dsx_zero.ZeroError, ZeroDivisionError)) as caught:
                mistake()
            assert not isinstance(caught.value, dsx_zero.RanksDifferError)
        else:
            with pytest.raises(dsx_zero.RanksDifferError, match="rank 1 failed"):
                dsx_zero.shard(model(), sgd(), stage=1)


def test_a_mistake_on_one_rank_ends_the_call_on_all():
    run_ranks(fails, 2)


def alike(rank, world):
    """What may differ: seeds, the values in a model, and objects that have only an address for a text."""
    torch.manual_seed(rank)
    made = model(seed=rank)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    optimizer.param_groups[0]["callback"] = lambda: rank
    optimizer.param_groups[0]["table"] = torch.full((3,), float(rank))
    dsx_zero.shard(made, optimizer, stage=2)


def test_values_may_differ():
    run_ranks(alike, 2)
