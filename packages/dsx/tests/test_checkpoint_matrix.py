"""Any stage and number of ranks reads what any other wrote: states bit for bit, the next steps alike.

All pairs are slow; a sample of them is in the suite.
"""

import functools
import itertools

import pytest
import torch
from dsx_testkit import run_ranks

LAYOUTS = list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4)))
SAMPLE = [((1, 3), (3, 2)), ((3, 4), (0, 1)), ((0, 2), (2, 3)), ((2, 1), (3, 4))]


class Model(torch.nn.Module):
    """Uneven sizes, a tied weight, a frozen layer, a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.inner, self.frozen = torch.nn.Linear(7, 5), torch.nn.Linear(5, 7)
        self.outer = torch.nn.Linear(7, 5, bias=False)
        self.outer.weight = self.inner.weight
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.gain * self.outer(torch.tanh(self.frozen(self.inner(x))))


def build(stage, world, seed, low, placement):
    import dsx

    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **({"bf16": {"enabled": True}} if low else {}),
    }
    if placement == "cpu" and stage:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return dsx.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )[0]


def train(engine, rank, world, first, steps):
    import dsx_comm

    losses = []
    for step in range(first, first + steps):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[
            rank * 12 // world : (rank + 1) * 12 // world
        ]
        loss = engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        if world > 1:
            dsx_comm.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def state(engine):
    """Weights, masters and states, whole; collective."""
    from dsx.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = dict(engine.module_state_dict())
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def save(rank, world, folder, stage, low, placement):
    engine = build(stage, world, 0, low, placement)
    train(engine, rank, world, 0, 3)
    engine.save_checkpoint(folder)
    return state(engine), train(engine, rank, world, 3, 3)


def load(rank, world, folder, stages, low, placement):
    """At each of the stages, one after the other: starting ranks is what takes time."""
    found = []
    for stage in stages:
        engine = build(stage, world, 9, low, placement)
        engine.load_checkpoint(folder)
        found.append((state(engine), train(engine, rank, world, 3, 3)))
        engine.destroy()
    return found


@functools.lru_cache
def saved(folder, stage, world, low, placement):
    path = f"{folder}/{stage}-{world}-{low}-{placement}"
    return path, run_ranks(save, world, path, stage, low, placement)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("matrix"))


def check(folder, source, world, stages, low, placement):
    path, (expected, losses) = saved(folder, *source, low, placement)
    for got, after in run_ranks(load, world, path, stages, low, placement)[0]:
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        assert after == pytest.approx(losses, rel=2e-2 if low else 1e-5)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("source, target", SAMPLE[:2])
def test_a_sample_of_pairs(folder, source, target, low):
    check(folder, source, target[1], [target[0]], low, "none")


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("placement", ["none", "cpu"])
@pytest.mark.parametrize("source", LAYOUTS)
def test_all_pairs(folder, source, placement, low):
    for world in (1, 2, 3, 4):
        check(folder, source, world, [0, 1, 2, 3], low, placement)
