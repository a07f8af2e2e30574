"""Giving a model a new layout at a wrong moment, with wrong tensors or not alike on the ranks: an error that names the
way, and training goes on as if nobody had asked.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def built(stage, *, held=None, frozen=("layers.0",), make=adamw, **config):
    model = tiny.MLP(depth=4)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    params = [p for n, p in model.named_parameters() if held is None or n.startswith(held)]
    config = {"stage": stage, "stage3_param_persistence_threshold": 20, **config}
    return dsx_zero.shard(model, make(params), config=config)


def train(model, optimizer, rank, seed=0):
    x, y = model.example(3, seed=seed + rank)
    optimizer.zero_grad()
    loss = model.loss(x, y)
    loss.backward()
    optimizer.step()
    return loss.item()


def rest(model):
    return [p for n, p in model.named_parameters() if n.startswith("layers.0")]


def unfreeze(model):
    for p in rest(model):
        p.requires_grad_(True)


TAIL = ("layers.1", "layers.2", "layers.3")


def wrong_groups(rank, world, stage):
    model, optimizer = built(stage, held=TAIL)
    first = train(model, optimizer, rank)
    cases = [
        (
            {"params": [torch.nn.Parameter(torch.ones(3))]},
            dsx_zero.ZeroOptimizerError,
            r"params\[0\] \(shape \(3,\)\) is not",
        ),
        ({"params": [model.layers[1].weight]}, ValueError, "more than one parameter group"),
        ({"params": rest(model), "lr": -1.0, "betas": 3}, None, ""),
        ({"lr": 0.1}, Exception, ""),
        ({"params": [1, 2]}, TypeError, ""),
    ]
    for group, kind, text in cases:
        if kind is not None:
            with pytest.raises(kind, match=text):
                optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    assert train(model, optimizer, rank) < first
    optimizer.add_param_group({"params": rest(model)})
    assert train(model, optimizer, rank) < first


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_cannot_be_added_changes_nothing(world):
    for stage in (0, 2, 3):
        run_ranks(wrong_groups, world, stage)


def in_the_middle(rank, world, stage, how):
    model, optimizer = built(stage, held=TAIL if how == "group" else None)
    train(model, optimizer, rank)
    optimizer.zero_grad()
    x, y = model.example(3, seed=rank)
    model.loss(x, y).backward()
    unfreeze(model)
    call = {
        "group": lambda: optimizer.add_param_group({"params": rest(model)}),
        "forward": lambda: model.loss(x, y),
        "replan": optimizer.replan,
    }[how]
    with pytest.raises(
        dsx_zero.ZeroStateError, match=r"gradients that no step has used.*call optimizer.zero_grad\(\) first"
    ):
        call()
    optimizer.zero_grad()
    call()
    before = [p.detach().clone() for p in whole(model)]
    train(model, optimizer, rank)
    assert not any(torch.equal(a, b) for a, b in zip(before, whole(model)))


def whole(model):
    with dsx_zero.GatheredParameters(model), torch.no_grad():
        return [p.detach().clone() for p in rest(model)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_no_step_has_used(stage):
    for how in ("group", "forward", "replan"):
        run_ranks(in_the_middle, 2, stage, how)


def old_graph(rank, world, stage):
    model, optimizer = built(stage)
    x, y = model.example(3, seed=rank)
    loss = model.loss(x, y)
    unfreeze(model)
    optimizer.replan()
    with pytest.raises(dsx_zero.ZeroStateError, match=r"given a new layout.*run the forward again"):
        loss.backward()
    train(model, optimizer, rank)


def test_a_backward_of_a_forward_of_before():
    for stage in (0, 1, 2, 3):
        run_ranks(old_graph, 2, stage)
    run_ranks(old_graph, 1, 3)


def not_cleared(rank, world, stage):
    model, optimizer = built(stage)
    train(model, optimizer, rank)
    unfreeze(model)
    x, y = model.example(3, seed=rank)
    loss = model.loss(x, y)
    with pytest.raises(dsx_zero.ZeroStateError, match=r"would have been added to them; call optimizer.zero_grad\(\)"):
        loss.backward()
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()


def test_a_backward_onto_gradients_that_were_stepped():
    for stage in (0, 2, 3):
        run_ranks(not_cleared, 2, stage)


def differs(rank, world, stage, what):
    model, optimizer = built(stage, held=TAIL)
    unfreeze(model)
    params = rest(model)
    group = {
        "parameters": {"params": params[: 1 + rank]},
        "lr": {"params": params, "lr": 0.1 * (1 + rank)},
        "failed": {"params": params if rank == 0 else [torch.nn.Parameter(torch.ones(1))]},
    }[what]
    text = {"parameters": r"parameter layers.0.bias \(rank 0: frozen; rank 1: trained\)",
            "lr": r"param_groups\[1\]\.lr",
            "failed": "is not a parameter|rank 1 failed"}[what]  # fmt: skip
    kind = dsx_zero.ZeroError if what == "failed" else dsx_zero.RanksDifferError
    with pytest.raises(kind, match=text):
        optimizer.add_param_group(group)
    for p in params:
        p.requires_grad_(False)
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, rank)


@pytest.mark.parametrize("what", ["parameters", "lr", "failed"])
def test_ranks_that_differ_are_named(what):
    for stage in (1, 3):
        run_ranks(differs, 2, stage, what)


def unfrozen_differently(rank, world, stage):
    model, optimizer = built(stage)
    rest(model)[rank].requires_grad_(True)
    x, y = model.example(3, seed=rank)
    with pytest.raises(dsx_zero.RanksDifferError, match=r"layers.0.bias \(rank 0: frozen; rank 1: trained\)"):
        model.loss(x, y)
    unfreeze(model)
    train(model, optimizer, rank)


def test_ranks_that_unfreeze_different_parameters_are_named():
    for stage in (0, 3):
        run_ranks(unfrozen_differently, 2, stage)


def edited_differently(rank, world):
    model, optimizer = built(1, held=TAIL)
    with torch.no_grad():
        model.layers[2].weight.add_(rank)
    with pytest.raises(dsx_zero.RanksDifferError, match="values written into parameters since the last step"):
        optimizer.add_param_group({"params": rest(model)})


def test_values_that_the_ranks_wrote_differently_are_found():
    run_ranks(edited_differently, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_no_group_holds_is_named_at_the_step(stage):
    model, optimizer = built(stage, held=TAIL)
    unfreeze(model)
    x, y = model.example(3)
    model.loss(x, y).backward()
    with pytest.raises(
        dsx_zero.ZeroStateError, match=r"'layers.0.weight'.*are in no group of the optimizer.*add_param_group"
    ):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": rest(model)})
    train(model, optimizer, 0)


def test_a_forward_of_parts_only_is_named_at_the_step():
    model, optimizer = built(2)
    unfreeze(model)
    x, _ = model.example(3)
    for layer in model.layers:
        x = layer(x)
    x.sum().backward()
    with pytest.raises(dsx_zero.ZeroStateError, match=r"no place for gradients.*call optimizer.replan\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.replan()
    before = whole(model)
    train(model, optimizer, 0)
    assert not torch.equal(before[0], whole(model)[0])


def moved(rank, world):
    model, optimizer = built(2, held=TAIL)
    optimizer.offload_states()
    with pytest.raises(dsx_zero.ZeroStateError, match="reload_states"):
        optimizer.add_param_group({"params": rest(model)})
    optimizer.reload_states()
    optimizer.add_param_group({"params": rest(model)})
    train(model, optimizer, rank)
    optimizer.offload_states()
    optimizer.reload_states()
    train(model, optimizer, rank)


def test_states_that_were_moved_come_back_first():
    run_ranks(moved, 2)


def test_without_an_optimizer():
    model, optimizer = dsx_zero.shard(tiny.MLP(), None, stage=3)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="without an optimizer"):
        optimizer.add_param_group({"params": list(model.parameters())})
