"""Asynchronous saves of an engine whose states live on disk: what is saved is what was there at the call, and little of
it is in memory at any time.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointError, open_checkpoint
from dsx_testkit import MemoryStore
from torch import nn

BLOCKS, WIDTH = 12, 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def built(folder, device="nvme"):
    place = {"device": device, "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
            "offload_param": place | {"max_in_cpu": 0},
        },
        "bf16": {"enabled": True},
        "steps_per_print": None,
    }
    return dsx.initialize(model=Net(), config=config)[0]


def train(engine, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Held:
    """Holds writes to checkpoint files back until it is let go; copies for them are not held."""

    def __init__(self, monkeypatch):
        self.go, write = threading.Event(), os.pwrite

        def held(fd, data, offset):
            if threading.current_thread().name.startswith("dsx-checkpoint"):
                assert self.go.wait(60)
            return write(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", held)


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    engine, held = built(tmp_path / "swap"), Held(monkeypatch)
    train(engine, 2)
    kept = {p.name: (p.master.clone(), p.states["exp_avg"].clone()) for p in engine.optimizer.slices()}
    engine.save_checkpoint(tmp_path / "saved", asynchronous=True)
    wanted = train(engine, 3, 2)  # overwrites all of it on disk
    held.go.set()
    engine.wait_for_checkpoints()
    reader = open_checkpoint(tmp_path / "saved")
    for name, (master, state) in kept.items():
        assert torch.equal(reader.master(name, 0, master.numel()), master)
        assert torch.equal(reader.state("exp_avg", name, 0, state.numel()), state)
    engine.load_checkpoint(tmp_path / "saved")
    assert train(engine, 3, 2) == wanted
    engine.destroy()
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["global_step2", "latest"]


def test_little_of_it_is_in_memory(tmp_path, monkeypatch):
    from dsx import sharding

    store = MemoryStore()
    store.close = lambda: None
    monkeypatch.setattr(sharding, "store_on_disk", lambda config: store)
    engine, held = built(tmp_path), Held(monkeypatch)
    train(engine, 1)
    total = sum(t.nbytes for t in store.tensors.values())
    store.peak = before = store.held  # the next forward's shards are read ahead
    engine.save_checkpoint(tmp_path / "saved", asynchronous=True)
    assert store.held == before  # nothing that the copy has read is kept while the save waits
    assert store.peak - before <= 4 * (WIDTH * WIDTH + WIDTH) < 0.1 * total
    (slot,) = [job for job in engine._parts.checkpointer.behind._running]
    assert not slot.done()
    held.go.set()
    engine.wait_for_checkpoints()
    engine.destroy()


def test_a_full_disk_is_named_and_the_earlier_checkpoint_stays(tmp_path):
    engine = built(tmp_path / "swap")
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved", tag="old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a disk without room: every write fails
    try:
        with pytest.raises(CheckpointError, match=r"copying what to save.*File too large"):
            engine.save_checkpoint(tmp_path / "saved", tag="new", asynchronous=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    train(engine, 1, 1)
    engine.save_checkpoint(tmp_path / "saved", tag="next", asynchronous=True)
    engine.destroy()
    assert sorted(p.name for p in Path(tmp_path / "saved").iterdir()) == ["latest", "next", "old"]
