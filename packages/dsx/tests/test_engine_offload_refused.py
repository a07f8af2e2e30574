"""Offload that the machine or the configuration refuses: a named error on every rank, before the model is changed.

This machine has no device that locks pages: the engine is told that it computes on one, and a stand-in notes what is
asked of it, and refuses from some request on. Nothing is computed there, because the error comes before.
"""

from __future__ import annotations

import os
import weakref

import dsx
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WIDTH, BLOCKS = 32, 4  # no padding: parameters fill whole places of flat buffers
NUMEL = BLOCKS * (WIDTH * WIDTH + WIDTH)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def config(stage, bf16=True, **sections):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **sections}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "steps_per_print": None,
    }


class PageLocks:
    """In the place of what locks pages: notes the bytes of each request, grants `granted` bytes, and refuses more."""

    def __init__(self, monkeypatch, granted=0):
        self.asked, self.given, self.granted = [], weakref.WeakSet(), granted
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self)
        monkeypatch.setattr("dsx.wiring.device_of", lambda topology: torch.device("cuda", 0))

    def __call__(self, *shape, pin_memory=False, **options):
        made = self.empty(*shape, **options)
        if not pin_memory:
            return made
        self.asked.append(made.nbytes)
        if sum(self.asked) > self.granted:
            raise RuntimeError("CUDA error: out of memory")
        self.given.add(made)
        return made


def trained(model, settings):
    engine = dsx.initialize(model=model, config=settings)[0]
    losses = []
    for step in range(3):
        loss = engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def untouched(model, parameters):
    return [(id(p), p.data_ptr(), type(p)) for p in model.parameters()] == parameters


PINNED = {"device": "cpu", "pin_memory": True}
PLACES = {
    "states at stage 1": (1, {"offload_optimizer": PINNED}, (4 + 2) * NUMEL),
    "states at stage 2": (2, {"offload_optimizer": PINNED}, (4 + 2) * NUMEL),
    "states at stage 3": (3, {"offload_optimizer": PINNED}, (4 + 2) * NUMEL),
    "all at stage 3": (3, {"offload_optimizer": PINNED, "offload_param": PINNED}, (4 + 2 + 2) * NUMEL),
    "parameters at stage 3": (3, {"offload_param": PINNED}, 2 * NUMEL),
}


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", PLACES)
def test_refused_page_locks_are_named_before_the_model_is_changed(name, part, monkeypatch):
    stage, sections, wanted = PLACES[name]
    model = Net().bfloat16()
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    with monkeypatch.context() as patch:
        locks = PageLocks(patch, int(part * wanted))
        with pytest.raises(dsx_zero.ZeroStateError, match=r"page-locked. was refused: CUDA error.*pin_memory to false"):
            dsx.initialize(model=model, config=config(stage, **sections))
    assert sum(locks.asked) <= wanted and sum(locks.asked) > locks.granted
    assert not list(locks.given)  # what was granted is given back
    assert untouched(model, before)
    without = {key: {"device": "cpu"} for key in sections}
    assert trained(model, config(stage, **without)) == trained(Net().bfloat16(), config(stage, **without))


@pytest.mark.parametrize("name", PLACES)
def test_what_will_be_locked_is_asked_for_and_given_back(name, monkeypatch):
    """To the byte; then the engine goes on to the device, which is not there."""
    stage, sections, wanted = PLACES[name]
    with monkeypatch.context() as patch:
        locks = PageLocks(patch, 10 * wanted)
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
            dsx.initialize(model=Net().bfloat16(), config=config(stage, **sections))
    assert sum(locks.asked[: len(locks.asked)]) >= wanted
    assert not list(locks.given)


def test_nothing_is_locked_that_need_not_be(monkeypatch):
    """Without `pin_memory`, and of fp32 parameters on the host, which are their own masters, nothing is asked twice."""
    for sections, wanted in (
        ({"offload_optimizer": {"device": "cpu"}}, 0),
        ({"offload_optimizer": PINNED, "offload_param": PINNED}, (4 + 4) * NUMEL),
    ):
        with monkeypatch.context() as patch:
            locks = PageLocks(patch, max(0, wanted - 1))
            with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
                dsx.initialize(model=Net(), config=config(3, bf16=False, **sections))
        assert sum(locks.asked) == wanted


def refused_on_one_rank(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        PageLocks(patch, 0 if rank == 1 else 1 << 30)
        model = Net().bfloat16()
        before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
        try:
            dsx.initialize(model=model, config=config(3, offload_optimizer=PINNED))
        except Exception as error:
            return type(error).__name__, str(error), untouched(model, before)


def test_a_refusal_on_one_rank_ends_the_call_on_all():
    (kind, text, same), (own, words, same_too) = run_ranks(refused_on_one_rank, 2)
    assert kind == "RanksDifferError" and "rank 1 failed: ZeroStateError" in text and "was refused" in text
    assert own == "ZeroStateError" and "was refused" in words and same and same_too


# - A budget of host memory


def settings_of_budget(folder, count, size):
    disk = {"device": "nvme", "nvme_path": str(folder), "buffer_count": count, "buffer_size": size, "max_in_cpu": 0}
    return config(3, offload_param=disk)


def files_in(folder):
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]


def test_a_budget_too_small_for_one_unit_is_named_before_the_model_is_changed(tmp_path):
    model, unit = Net().bfloat16(), WIDTH * WIDTH + WIDTH
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    with pytest.raises(
        dsx_zero.ZeroConfigError,
        match="offload_param.buffer_size: got buffer_count x buffer_size = 200 elements"
        rf".*at least the {unit:,} of",
    ):
        dsx.initialize(model=model, config=settings_of_budget(tmp_path, 2, 100))
    assert untouched(model, before) and files_in(tmp_path) == []
    enough = settings_of_budget(tmp_path, 2, unit // 2)
    assert trained(model, enough) == trained(Net().bfloat16(), config(3))
    assert files_in(tmp_path) == []


def budget_of_two(rank, world, folder):
    model = Net().bfloat16()
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    try:
        dsx.initialize(model=model, config=settings_of_budget(folder, 1, 100))
    except dsx_zero.ZeroConfigError as error:
        return str(error), untouched(model, before)


def test_a_budget_counts_for_the_part_of_a_unit_that_a_rank_has(tmp_path):
    first, second = run_ranks(budget_of_two, 2, str(tmp_path))
    assert first == second and first[1] and f"at least the {(WIDTH * WIDTH + WIDTH) // 2} of" in first[0]
    assert files_in(tmp_path) == []
