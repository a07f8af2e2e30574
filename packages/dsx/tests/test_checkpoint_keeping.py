"""Which checkpoints stay, what is linked instead of written again, and which one loads where the latest is damaged."""

import os
import shutil
from pathlib import Path

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


def frozen_file(folder, tag):
    from dsx.checkpoint import open_checkpoint

    placed = open_checkpoint(folder, tag).index.tensors["model"]["1.weight"].placed
    return folder / tag / placed.file, placed.offset


def flip(folder, tag):
    path, offset = frozen_file(folder, tag)
    with path.open("r+b") as file:
        file.seek(offset + 12345)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("where", ["values", "header"])
def test_a_damaged_file_is_not_linked_and_what_comes_after_it_loads(tmp_path, caplog, where):
    from dsx.checkpoint import CheckpointCorruptError

    engine = build(frozen=FROZEN)
    engine.save_checkpoint(tmp_path, tag="a")
    if where == "values":
        flip(tmp_path, "a")
    else:
        with frozen_file(tmp_path, "a")[0].open("r+b") as file:
            file.seek(20)
            file.write(b"x")
    engine.save_checkpoint(tmp_path, tag="b")
    engine.save_checkpoint(tmp_path, tag="c")
    assert sum("is damaged" in message for message in caplog.messages) == 1
    inodes = [frozen_file(tmp_path, tag)[0].stat().st_ino for tag in "abc"]
    assert inodes[0] != inodes[1] == inodes[2]
    for tag in "bc":
        assert engine.load_checkpoint(tmp_path, tag=tag)[0] == str(tmp_path / tag)
    with pytest.raises(CheckpointCorruptError):
        engine.load_checkpoint(tmp_path, tag="a")


@pytest.mark.parametrize("keep_last", [None, 1, 2, 3])
def test_damage_that_comes_later_never_takes_all_checkpoints(tmp_path, keep_last):
    """Whichever file is damaged after the saves, another checkpoint loads if several were kept."""
    engine = build(frozen=FROZEN, **({} if keep_last is None else {"keep_last": keep_last}))
    shared = []
    for number in range(7):
        engine.save_checkpoint(tmp_path, tag=f"n{number}")
        engine.wait_for_checkpoints()  # older ones go behind the save
        tags = sorted(path.parent.name for path in tmp_path.glob("*/dsx.json"))
        shared.append(len({frozen_file(tmp_path, tag)[0].stat().st_ino for tag in tags}))
        assert len(tags) == min(number + 1, keep_last or 7)
    assert shared == {
        None: [1, 1, 1, 1, 2, 2, 2], 1: [1] * 7, 2: [1, 2, 2, 2, 2, 2, 2], 3: [1, 1, 2, 2, 2, 2, 2],
    }[keep_last]  # fmt: skip
    flip(tmp_path, "n6")
    if keep_last != 1:
        other = build(frozen=FROZEN)
        assert Path(other.load_checkpoint(tmp_path)[0]).name < "n6"


def save_after_damage(rank, world, folder):
    engine = build(frozen=FROZEN, stage=3)
    engine.save_checkpoint(folder, tag="a")
    if rank == 0:
        flip(folder, "a")
    torch.distributed.barrier()
    engine.save_checkpoint(folder, tag="b")
    return engine.load_checkpoint(folder, tag="b")[0]


def test_ranks_share_out_the_check_of_old_files(tmp_path):
    assert run_ranks(save_after_damage, 2, tmp_path) == [str(tmp_path / "b")] * 2


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
