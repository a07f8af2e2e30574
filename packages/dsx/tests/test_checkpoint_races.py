"""What two ranks, or two jobs, do in one folder at the same moment."""

import os
import threading
import time

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointError
from dsx_testkit import run_ranks


def build(world=1, **checkpoint):
    torch.manual_seed(0)
    config = {
        "train_batch_size": world, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None,
        "checkpoint": checkpoint,
    }  # fmt: skip
    return dsx.initialize(model=torch.nn.Linear(3, 2), config=config)[0]


# - A load while another job saves and prunes


def load_while_pruned(rank, world, folder, moment, replacements):
    """Of the tags that `latest` named, the first few are removed by another job while they are read."""
    from dsx.checkpoint import loading

    engine, left = build(world), list(replacements)
    engine.save_checkpoint(folder, tag="first", client_state={"tag": "first"})
    right = getattr(loading, moment)

    def racing(*given, **options):
        if rank == 0 and left:
            told = (folder / "latest").read_text()
            (folder / told).rename(folder / left[0])
            (folder / "latest").write_text(left.pop(0))
        if world > 1:
            time.sleep(0.05 * rank)
        return right(*given, **options)

    setattr(loading, moment, racing)
    try:
        path, client = engine.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return path, client["tag"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("moment", ["open_checkpoint", "check_files"])
def test_a_load_begins_again_with_what_is_the_latest_now(tmp_path, world, moment):
    found = run_ranks(load_while_pruned, world, tmp_path, moment, ["second"])
    assert found == [(str(tmp_path / "second"), "first")] * world


def test_a_load_begins_again_only_once(tmp_path):
    (found,) = run_ranks(load_while_pruned, 1, tmp_path, "open_checkpoint", ["second", "third", "fourth"])
    assert "no checkpoint there" in found


def test_a_checkpoint_that_is_gone_for_good_is_said_at_once(tmp_path):
    engine = build()
    engine.save_checkpoint(tmp_path, tag="only")
    (tmp_path / "only").rename(tmp_path / ".hidden")
    with pytest.raises(CheckpointError, match="only: no checkpoint there"):
        engine.load_checkpoint(tmp_path)


# - The ranks of one save


def names_after_a_save(rank, world, folder, asynchronous):
    """What each rank sees in the folder right behind a save whose removals take long."""
    from dsx_checkpoint.keeping import Keeping

    engine, right = build(world, keep_last=1, asynchronous=asynchronous), Keeping.remove_others

    def slow(self, newest):
        time.sleep(0.3)
        return right(self, newest)

    Keeping.remove_others = slow
    for tag in ("a", "b"):
        engine.save_checkpoint(folder, tag=tag)
    engine.wait_for_checkpoints()
    # The files of what was removed go behind the save, under a name that no load finds.
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_over_on_all_ranks_when_older_checkpoints_are_removed(tmp_path, asynchronous):
    assert run_ranks(names_after_a_save, 2, tmp_path, asynchronous) == [["b", "latest"]] * 2


# - The key of the snapshots in memory


@pytest.mark.parametrize("links", [True, False])
def test_ranks_that_begin_together_have_one_key(tmp_path, monkeypatch, links):
    """Every rank finds no key there, and then all of them write one."""
    from dsx.elasticity.memory import NodeMemory

    ranks = 6
    barrier, roots, right = threading.Barrier(ranks), [], os.link

    def at_once(*given, **options):
        barrier.wait(timeout=20)
        if not links:
            raise OSError(95, "Operation not supported")
        return right(*given, **options)

    replace = os.replace
    monkeypatch.setattr(os, "link", at_once)
    monkeypatch.setattr(os, "replace", lambda *given: (time.sleep(0.05), replace(*given)))
    opened = [
        threading.Thread(target=lambda n=n: roots.append(NodeMemory.open(tmp_path / "disk", f"n{n}", tmp_path).root))
        for n in range(ranks)
    ]
    for thread in opened:
        thread.start()
    for thread in opened:
        thread.join(timeout=60)
    assert len(roots) == ranks and len(set(roots)) == 1
    assert {path.name for path in (tmp_path / "disk").iterdir()} - {".elastic.first"} == {".elastic"}
    monkeypatch.undo()
    assert NodeMemory.open(tmp_path / "disk", "later", tmp_path).root == roots[0]


def test_the_key_of_an_earlier_version_is_found(tmp_path, monkeypatch):
    from dsx.elasticity.memory import NodeMemory

    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / ".elastic").write_text("0123456789abcdef")
    first = NodeMemory.open(tmp_path / "disk", "a", tmp_path).root

    def refuse(*given, **options):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert NodeMemory.open(tmp_path / "disk", "b", tmp_path).root == first
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [".elastic"]
