"""Asynchronous saves: what is saved is what was there when save_checkpoint was called; all ranks raise the same errors
after the same update; at most as many saves are in flight as was asked for.
"""

import os
import threading
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks


def build(stage=0, world=1, **checkpoint):
    import dsx

    torch.manual_seed(0)
    config = {
        "train_batch_size": world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": checkpoint,
        "steps_per_print": None,
    }
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7, track_running_stats=True))
    model[1].eval()
    return dsx.initialize(model=model, config=config)[0]


def train(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 5)).square().sum())
        engine.step()


class Held:
    """Holds every write of data back until it is let go."""

    def __init__(self, monkeypatch, fail=False):
        self.go, self.fail, self.files = threading.Event(), fail, []
        write = os.pwrite

        def held(fd, data, offset):
            if threading.current_thread().name.startswith("dsx-checkpoint"):
                self.go.wait(60)
                if self.fail:
                    raise OSError(28, "No space left on device")
            return write(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", held)


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    from dsx.checkpoint import open_checkpoint

    engine, held = build(asynchronous=True), Held(monkeypatch)
    train(engine)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    moments = {p.name: p.states["exp_avg"].clone() for p in engine.optimizer.slices(held=True)}
    folder = engine.save_checkpoint(tmp_path)
    assert not Path(folder).exists()
    train(engine, 2)
    with torch.no_grad():
        for value in engine.module.state_dict().values():
            value.fill_(7)
    held.go.set()
    engine.wait_for_checkpoints()
    reader = open_checkpoint(tmp_path)
    assert reader.folder == Path(folder)
    assert all(torch.equal(reader.whole(name), value) for name, value in expected.items())
    for name, value in moments.items():
        assert torch.equal(reader.state("exp_avg", name, 0, value.numel()), value)


def test_a_save_waits_where_too_many_are_in_flight(tmp_path, monkeypatch):
    engine, held = build(max_in_flight=2), Held(monkeypatch)
    engine.save_checkpoint(tmp_path, tag="a", asynchronous=True)
    engine.save_checkpoint(tmp_path, tag="b", asynchronous=True)
    assert engine._parts.checkpointer.behind.in_flight == 2
    third = threading.Thread(target=lambda: engine.save_checkpoint(tmp_path, tag="c", asynchronous=True))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    held.go.set()
    third.join(60)
    engine.destroy()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "latest"]
    assert (tmp_path / "latest").read_text() == "c"


@pytest.mark.parametrize("where", ["step", "wait", "save", "destroy"])
def test_an_error_surfaces_once_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, where):
    from dsx.checkpoint import CheckpointError

    engine = build()
    engine.save_checkpoint(tmp_path, tag="old")
    held = Held(monkeypatch, fail=True)
    held.go.set()
    engine.save_checkpoint(tmp_path, tag="new", asynchronous=True)
    (job,) = engine._parts.checkpointer.behind._running
    job.exception()
    calls = {
        "step": lambda: train(engine), "wait": engine.wait_for_checkpoints, "destroy": engine.destroy,
        "save": lambda: engine.save_checkpoint(tmp_path, tag="next"),
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="No space left"):
        calls[where]()
    if where != "destroy":
        train(engine)
        engine.wait_for_checkpoints()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "old"]


def fail_on_one_rank(rank, world, folder):
    from dsx.checkpoint import CheckpointError

    engine = build(3, world)
    write = os.pwrite

    def failing(fd, data, offset):
        if rank == 1 and threading.current_thread().name.startswith("dsx-checkpoint"):
            raise OSError(28, "No space left on device")
        return write(fd, data, offset)

    os.pwrite = failing
    train(engine)
    engine.save_checkpoint(folder, asynchronous=True)
    steps = 0
    try:
        while steps < 2000:
            train(engine)
            steps += 1
    except CheckpointError as error:
        os.pwrite = write
        engine.save_checkpoint(folder, tag="after")
        return engine.global_steps, str(error)


def test_a_failure_of_one_rank_is_the_same_error_on_all_after_the_same_update(tmp_path):
    (steps, text), (others, other_text) = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert steps == others and text == other_text and "rank 1 failed" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["after", "latest"]


def save_and_resume(rank, world, folder):
    engine = build(2, world, asynchronous=True)
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(folder)
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    other = build(3, world)
    other.load_checkpoint(folder) if rank < 0 else engine.wait_for_checkpoints()
    path, _ = other.load_checkpoint(folder)
    return path, all(torch.equal(expected[n], v) for n, v in other.module_state_dict().items())


def test_several_ranks_save_behind_and_load(tmp_path):
    for path, same in run_ranks(save_and_resume, 2, str(tmp_path)):
        assert path.endswith("global_step3") and same


def test_host_memory_is_used_again(tmp_path):
    engine = build()
    pointers = set()
    for number in range(3):
        engine.save_checkpoint(tmp_path, tag=str(number), asynchronous=True)
        engine.wait_for_checkpoints()
        (slot,) = engine._parts.checkpointer.behind._free
        pointers.add(slot._memory.data_ptr())
    assert len(pointers) == 1
