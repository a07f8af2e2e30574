"""A save replaces checkpoints of dsx and nothing else: what others have put into the folder of its tag stays there."""

import os
import shutil

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointError, open_checkpoint
from dsx_checkpoint.command import main as checkpoint_command
from dsx_testkit import run_ranks
from dsx_testkit.nodes import Nodes


def build(**changes):
    torch.manual_seed(0)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None}
    return dsx.initialize(model=torch.nn.Linear(3, 2), config={**config, **changes})[0]


@pytest.fixture(scope="module")
def engine():
    return build()


def tree(folder):
    """Every file below a folder, with its text, and every link."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes().decode(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put_files(folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "thesis.tex").write_text("years of work")
    (folder / "model-card.safetensors").write_text("not ours")
    (folder / "here").symlink_to("notes")


OTHERS = {
    "tokenizer.json": "{}", "notes/deep/thesis.tex": "years of work", "model-card.safetensors": "not ours",
    "here": "notes",
}  # fmt: skip


def others(folder):
    own = ("dsx.json", "model.safetensors", "optimizer.safetensors", "client.safetensors")
    return {name: text for name, text in tree(folder).items() if name not in own} if folder.is_dir() else {}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "checkpoint of another program", "link"])
def test_what_is_no_checkpoint_is_never_replaced(engine, tmp_path, kind, asynchronous):
    target = tmp_path / "models"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        put_files(tmp_path / "elsewhere")
        target.symlink_to("elsewhere")
    else:
        target.mkdir()
        (target / ("thesis.tex" if kind == "folder" else "mp_rank_00_model_states.pt")).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"models: exists and is no checkpoint of dsx"):
        engine.save_checkpoint(tmp_path, tag="models", asynchronous=asynchronous)
    engine.wait_for_checkpoints()  # nothing was begun
    assert tree(tmp_path) == before and not (tmp_path / "latest").exists()


def test_an_empty_folder_is_in_nobodys_way(engine, tmp_path):
    (tmp_path / "best").mkdir()
    engine.save_checkpoint(tmp_path, tag="best")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "best")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_of_others_are_in_the_next_checkpoint_of_the_tag(engine, tmp_path, links, asynchronous, monkeypatch):
    engine.save_checkpoint(tmp_path, tag="best")
    put_files(tmp_path / "best")
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for note in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag="best", client_state={"note": note}, asynchronous=asynchronous)
        engine.wait_for_checkpoints()
        assert others(tmp_path / "best") == OTHERS
        assert engine.load_checkpoint(tmp_path)[1] == {"note": note}
    assert checkpoint_command(["verify", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest"]


def no_links(*args, **options):
    raise OSError(95, "Operation not supported")


def test_a_damaged_checkpoint_is_replaced_and_its_files_of_others_are_not(engine, tmp_path):
    engine.save_checkpoint(tmp_path, tag="best")
    put_files(tmp_path / "best")
    (tmp_path / "best" / "dsx.json").write_text("{")
    engine.save_checkpoint(tmp_path, tag="best")
    assert others(tmp_path / "best") == OTHERS and open_checkpoint(tmp_path).folder.name == "best"


def test_files_of_the_replaced_checkpoint_itself_are_gone(engine, tmp_path):
    other = build(optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    other.backward(other(torch.ones(2, 3)).sum())
    other.step()
    other.save_checkpoint(tmp_path, tag="best")
    assert (tmp_path / "best" / "optimizer.safetensors").is_file()
    engine.save_checkpoint(tmp_path, tag="best")
    assert set(tree(tmp_path / "best")) == {"client.safetensors", "dsx.json", "model.safetensors"}


@pytest.mark.parametrize("named", [True, False])
def test_a_kill_at_any_moment_of_the_replacement_loses_no_file_of_others(engine, tmp_path, named):
    """What is left behind: the old folder under its other name, with or without a new one that has not all files."""
    engine.save_checkpoint(tmp_path, tag="best")
    put_files(tmp_path / "best")
    old = tmp_path / ".old-best-0123456789ab"
    (tmp_path / "best").rename(old)
    if named:
        engine.save_checkpoint(tmp_path, tag="other")  # gives it its name back
        shutil.copytree(tmp_path / "other", old)
        put_files(old)
        (old / "late.txt").write_text("came last")
    engine.save_checkpoint(tmp_path, tag="third")
    expected = {**OTHERS, "late.txt": "came last"} if named else OTHERS
    assert others(tmp_path / "best") == expected and not old.exists()


def test_a_checkpoint_behind_a_link_is_not_removed(engine, tmp_path):
    engine.save_checkpoint(tmp_path / "disk", tag="real")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "best").symlink_to("../disk/real")
    engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"note": "new"})
    assert not (tmp_path / "ckpt" / "best").is_symlink()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["best", "latest"]
    assert engine.load_checkpoint(tmp_path / "disk", tag="real")[1] == {}
    assert engine.load_checkpoint(tmp_path / "ckpt")[1] == {"note": "new"}


def test_an_import_replaces_nothing_either(tmp_path, capsys):
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    (tmp_path / "out" / "mine").mkdir(parents=True)
    (tmp_path / "out" / "mine" / "thesis.tex").write_text("mine")
    assert checkpoint_command(["import", str(tmp_path / "w.pt"), str(tmp_path / "out"), "--new-tag", "mine"]) == 1
    assert "exists and is no checkpoint of dsx" in capsys.readouterr().err
    assert tree(tmp_path / "out") == {"mine/thesis.tex": "mine"}


def save_on_ranks(rank, world, folder, node_local):
    root = folder / f"node{rank}" if node_local else folder
    if rank == 1 or not node_local:
        (root / "models").mkdir(parents=True, exist_ok=True)
        (root / "models" / "thesis.tex").write_text("mine")
    with Nodes(world, 1 if node_local else world).environment(rank):
        engine = build(checkpoint={"use_node_local_storage": node_local})
        try:
            engine.save_checkpoint(root, tag="models")
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("node_local", [False, True])
def test_ranks_refuse_together(tmp_path, node_local):
    first, second = run_ranks(save_on_ranks, 2, tmp_path, node_local)
    assert first == second and "exists and is no checkpoint of dsx" in first
    assert set(tree(tmp_path)) == {"node1/models/thesis.tex" if node_local else "models/thesis.tex"}


# - Tags


@pytest.mark.parametrize(
    "tag",
    ["latest", "dsx.json", " best", "best ", "best\n", "a\nb", "a\tb", "half \ud800 of a pair", "x" * 238, "é" * 150],
)
def test_a_tag_that_would_spoil_the_folder_is_refused_and_nothing_is_written(engine, tmp_path, tag):
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(ValueError, match="expected a plain folder name"):
            engine.save_checkpoint(folder, tag=tag)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path, tag="good")  # no lock was left
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "good")


@pytest.mark.parametrize("tag", ["x" * 237, "näher am Ziel", "v1.2 (final)"])
def test_other_tags_are_taken(engine, tmp_path, tag):
    engine.save_checkpoint(tmp_path, tag=tag)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / tag)


def test_a_folder_in_the_place_of_latest_is_named_before_anything_is_written(engine, tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest: is a folder, expected a file or nothing"):
        engine.save_checkpoint(tmp_path, tag="good")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    engine.save_checkpoint(tmp_path, tag="good", save_latest=False)
    assert engine.load_checkpoint(tmp_path, tag="good")[0] == str(tmp_path / "good")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_lock_that_cannot_be_signed_is_given_back(tmp_path, monkeypatch):
    from dsx_checkpoint import saving_lock

    monkeypatch.setattr(saving_lock, "_sign", lambda fd, text: text.encode("ascii"))
    before = descriptors()
    with pytest.raises(UnicodeEncodeError):
        lock(tmp_path, "ü")
    assert descriptors() == before
    monkeypatch.undo()
    lock(tmp_path)


def lock(root, tag="tag"):
    from dsx_checkpoint.saving_lock import saving

    with saving(root, tag):
        pass
