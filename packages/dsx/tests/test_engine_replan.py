"""Engines whose models begin to train more: schedules of fine-tuning go on over checkpoints of before and after."""

from __future__ import annotations

import os

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

LAYERS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def built(stage, folder="", place="none", trained=(2,), groups=True, bf16=True):
    """An engine of which these blocks train."""
    import dsx

    model = Net()
    for number, block in enumerate(model.blocks):
        block.requires_grad_(number in trained)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if place != "none":
        zero["offload_optimizer"] = {"device": place, "nvme_path": os.path.join(folder, "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "steps_per_print": None,
    }
    held = [p for p in model.parameters() if p.requires_grad] if groups else None
    return dsx.initialize(model=model, model_parameters=held, config=config)[0]


def train(engine, rank, steps, first=0):
    losses = []
    for micro in range(2 * first, 2 * (first + steps)):
        x = torch.randn(2, 12, generator=torch.Generator().manual_seed(100 * micro + rank))
        loss = engine(x.to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def grow(engine, number):
    block = engine.module.blocks[number].requires_grad_(True)
    engine.optimizer.add_param_group({"params": block.parameters(), "lr": 5e-3})


def goes_on(rank, world, stage, folder, place):
    """Train, save, grow, train, save; then an engine that has them from the beginning reads the later one, and one that
    has not reads the earlier one, grows and comes to the same.
    """
    engine = built(stage, folder, place)
    train(engine, rank, 2)
    engine.save_checkpoint(os.path.join(folder, "before"))
    grow(engine, 0)
    train(engine, rank, 2, 2)
    engine.save_checkpoint(os.path.join(folder, "after"))
    wanted = train(engine, rank, 2, 4)
    engine.load_checkpoint(os.path.join(folder, "after"))
    assert train(engine, rank, 2, 4) == wanted
    engine.destroy()

    other = built(stage, folder, place)
    other.load_checkpoint(os.path.join(folder, "before"))
    grow(other, 0)
    train(other, rank, 2, 2)
    assert train(other, rank, 2, 4) == wanted
    other.destroy()

    third = built(stage, folder, place)
    grow(third, 0)
    third.load_checkpoint(os.path.join(folder, "after"))
    assert train(third, rank, 2, 4) == wanted
    third.destroy()
    return wanted


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_of_before_and_after(world, tmp_path):
    for stage, place in ((0, "none"), (2, "nvme"), (3, "none")):
        folder = tmp_path / f"{stage}{place}"
        folder.mkdir()
        run_ranks(goes_on, world, stage, str(folder), place)


def unfreezes(rank, world, stage, place, folder):
    """Parameters that the engine holds from the beginning, of which some train later, in the middle of nothing."""
    engine = built(stage, folder, place, groups=False)
    losses = train(engine, rank, 2)
    engine.module.blocks[0].requires_grad_(True)
    losses += train(engine, rank, 2, 2)
    with torch.no_grad():
        moved = [not torch.equal(p.cpu(), q.bfloat16()) for p, q in zip(whole(engine), Net().parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True]
    engine.destroy()
    return losses


def whole(engine):
    import dsx_zero

    with dsx_zero.GatheredParameters(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


def test_unfreezing_has_the_same_losses_in_every_stage(tmp_path):
    wanted = run_ranks(unfreezes, 2, 0, "none", str(tmp_path))
    for stage, place in ((1, "none"), (2, "cpu"), (3, "nvme")):
        assert run_ranks(unfreezes, 2, stage, place, str(tmp_path)) == wanted


def in_the_middle(rank, world):
    import dsx_zero

    engine = built(2)
    x = torch.ones(2, 12).bfloat16()
    engine.backward(engine(x))
    engine.step()  # the first of two micro-batches
    with pytest.raises(dsx_zero.ZeroStateError, match=r"gradients that no step has used.*between optimizer.step\(\)"):
        grow(engine, 0)
    engine.module.blocks[0].requires_grad_(False)
    engine.backward(engine(x))
    engine.step()
    grow(engine, 1)
    engine.backward(engine(x))
    engine.step()


def test_in_the_middle_of_an_update():
    run_ranks(in_the_middle, 2)
