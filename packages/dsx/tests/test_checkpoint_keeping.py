"""Which checkpoints stay, what is linked instead of written again, and which one loads where the latest is damaged."""

import os
import shutil

import pytest
import torch
from dsx_testkit import run_ranks


def build(seed=0, frozen=0, stage=0, **checkpoint):
    import dsx

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), *([torch.nn.Linear(frozen, 5)] if frozen else []))
    for parameter in list(model.parameters())[2:]:
        parameter.requires_grad_(False)
    config = {
        "train_batch_size": 1 if not torch.distributed.is_initialized() else torch.distributed.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": checkpoint,
        "steps_per_print": None,
    }
    return dsx.initialize(model=model, config=config)[0]


def train(engine):
    engine.backward(
        engine.module[0](torch.ones(1, 5)).sum() if len(engine.module) > 1 else engine(torch.ones(1, 5)).sum()
    )
    engine.step()


def tags(folder):
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_and_every_nth_stay(tmp_path, asynchronous):
    engine = build(keep_last=2, keep_every=3, asynchronous=asynchronous)
    for step in range(1, 8):
        train(engine)
        engine.save_checkpoint(tmp_path)
        if step == 1:
            engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    engine.wait_for_checkpoints()
    assert tags(tmp_path) == ["best", "global_step3", "global_step6", "global_step7"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_checkpoint_that_cannot_be_removed_is_said_and_no_error(tmp_path, monkeypatch, caplog):
    engine = build(keep_last=1)
    engine.save_checkpoint(tmp_path, tag="a")
    rename = os.rename

    def refuse(old, new, **options):
        if os.path.basename(old) == "a":
            raise PermissionError(13, "denied")
        return rename(old, new, **options)

    monkeypatch.setattr(os, "rename", refuse)
    engine.save_checkpoint(tmp_path, tag="b")
    assert tags(tmp_path) == ["a", "b"] and any("cannot be removed" in m for m in caplog.messages)


def test_keeping_is_checked_with_the_configuration():
    with pytest.raises(ValueError, match="keep_last"):
        build(keep_last=0)


# - Falling back


def damage(folder, tag):
    path = folder / tag / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.fixture
def saved(tmp_path):
    engine = build()
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_a_damaged_latest_checkpoint_is_passed_over_and_said(saved, caplog):
    damage(saved, "global_step3")
    engine = build(seed=4)
    path, _ = engine.load_checkpoint(saved)
    assert path == str(saved / "global_step2") and engine.global_steps == 2
    said = [m for m in caplog.messages if "Going back to the checkpoint before it" in m]
    assert len(said) == 1 and "global_step3" in said[0] and "global_step2" in said[0]


def test_a_damaged_index_is_passed_over_too(saved):
    index = saved / "global_step3" / "dsx.json"
    index.write_text(index.read_text()[:-40])
    damage(saved, "global_step2")
    engine = build(seed=4)
    engine.load_checkpoint(saved)
    assert engine.global_steps == 1


def test_what_was_asked_for_by_its_tag_is_not_replaced_by_another(saved):
    from dsx.checkpoint import CheckpointCorruptError

    damage(saved, "global_step3")
    engine = build(seed=4)
    with pytest.raises(CheckpointCorruptError, match="global_step3"):
        engine.load_checkpoint(saved, tag="global_step3")
    assert engine.global_steps == 0


def test_where_all_are_damaged_the_error_is_that_of_the_latest(saved):
    from dsx.checkpoint import CheckpointCorruptError

    for step in (1, 2, 3):
        damage(saved, f"global_step{step}")
    with pytest.raises(CheckpointCorruptError, match="global_step3"):
        build(seed=4).load_checkpoint(saved)


def load_damaged(rank, world, folder):
    engine = build(seed=4, stage=3)
    path, _ = engine.load_checkpoint(folder)
    return path, engine.global_steps


def test_all_ranks_fall_back_to_the_same_one(saved):
    damage(saved, "global_step3")
    assert run_ranks(load_damaged, 2, str(saved)) == [(str(saved / "global_step2"), 2)] * 2


# - Links


def files_of(folder, tag):
    return {p.name: p.stat().st_ino for p in (folder / tag).glob("model-*.safetensors")}


FROZEN = 1 << 20  # columns; times 5 rows of 4 bytes is above the size from which frozen parameters get a file


def test_frozen_parameters_are_linked_and_written_again_when_they_change(tmp_path):
    from dsx.checkpoint import open_checkpoint

    engine = build(frozen=FROZEN)
    train(engine)
    engine.save_checkpoint(tmp_path, tag="a")
    train(engine)
    engine.save_checkpoint(tmp_path, tag="b", asynchronous=True)
    engine.wait_for_checkpoints()
    a, b = files_of(tmp_path, "a"), files_of(tmp_path, "b")
    assert len(a) == 2 and sum(a[name] == b[name] for name in a) == 1
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(open_checkpoint(tmp_path, "b").whole("1.weight"), engine.module[1].weight)
    with torch.no_grad():
        engine.module[1].weight[3, 5] += 1
    engine.save_checkpoint(tmp_path, tag="c")
    assert not set(files_of(tmp_path, "c").values()) & set(b.values())
    assert torch.equal(open_checkpoint(tmp_path, "c").whole("1.weight"), engine.module[1].weight)


def save_twice(rank, world, folder):
    engine = build(frozen=FROZEN, stage=3)
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b")
    return engine.load_checkpoint(folder)[0]


def test_ranks_that_hold_parts_of_frozen_parameters_agree_on_links(tmp_path):
    assert run_ranks(save_twice, 2, str(tmp_path)) == [str(tmp_path / "b")] * 2
    a, b = files_of(tmp_path, "a"), files_of(tmp_path, "b")
    assert sum(a[name] == b[name] for name in a) == 1


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    engine = build(frozen=FROZEN)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b")
    assert not set(files_of(tmp_path, "a").values()) & set(files_of(tmp_path, "b").values())
    assert engine.load_checkpoint(tmp_path, tag="b")[0] == str(tmp_path / "b")
