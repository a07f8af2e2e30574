"""A process killed while it saves: the checkpoint that was there before, or the new one, is whole; never a part of one.

The save runs in forked processes that kill themselves (SIGKILL, nothing is flushed or cleaned up) at the k-th call that
changes the disk, for every k there is.
"""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from dsx.checkpoint import CheckpointError, open_checkpoint, save
from dsx.checkpoint.ranks import Solo
from dsx_testkit import RankError, run_ranks
from torch import nn

CHANGES = ("open", "pwrite", "posix_fallocate", "fsync", "rename", "replace", "mkdir")


@dataclass
class Part:
    value: float
    name: str = "w"
    shape: tuple = (50, 3)
    start: int = 0
    stop: int = 150
    aliases: tuple = ()
    trainable: bool = True
    master: None = None
    states: dict = field(default_factory=dict)
    ranges: tuple = ()

    @property
    def param(self):
        return torch.full((150,), self.value)


def save_and_die(rank, world, folder, deadly_call, tag="new"):
    calls = 0

    def deadly(original):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
    save(folder, tag, module=nn.Module(), slices=[Part(2.0)], state={"n": 2}, ranks=Solo())
    return calls


def test_killed_at_any_point_leaves_a_whole_checkpoint(tmp_path):
    (total,) = run_ranks(save_and_die, 1, str(tmp_path / "dry"), 0, backend=None)
    assert total > 10
    seen = set()
    for deadly_call in range(1, total + 1):
        folder = tmp_path / str(deadly_call)
        save(folder, "old", module=nn.Module(), slices=[Part(1.0)], state={"n": 1}, ranks=Solo())
        with pytest.raises(RankError):
            run_ranks(save_and_die, 1, str(folder), deadly_call, backend=None)
        reader = open_checkpoint(folder)  # what `latest` names is there and whole
        value = {"old": 1.0, "new": 2.0}[reader.folder.name]
        assert torch.equal(reader.whole("w"), torch.full((50, 3), value))
        if (folder / "new").exists():  # visible means complete, even before `latest` says so
            assert torch.equal(open_checkpoint(folder, "new").whole("w"), torch.full((50, 3), 2.0))
        save(
            folder, "new", module=nn.Module(), slices=[Part(3.0)], state={"n": 3}, ranks=Solo()
        )  # and saving again works
        assert torch.equal(open_checkpoint(folder).whole("w"), torch.full((50, 3), 3.0))
        assert not list(folder.glob(".tmp-*"))
        seen.add(reader.folder.name)
    assert seen == {"old", "new"}


def test_killed_while_replacing_a_tag_keeps_the_old_or_the_new_values(tmp_path):
    save(tmp_path / "dry", "old", module=nn.Module(), slices=[Part(1.0)], state={}, ranks=Solo())
    (total,) = run_ranks(save_and_die, 1, str(tmp_path / "dry"), 0, "old", backend=None)
    seen = set()
    for deadly_call in range(total - 9, total + 1):
        folder = tmp_path / str(deadly_call)
        save(folder, "old", module=nn.Module(), slices=[Part(1.0)], state={}, ranks=Solo())
        with pytest.raises(RankError):
            run_ranks(save_and_die, 1, str(folder), deadly_call, "old", backend=None)
        seen.add(float(open_checkpoint(folder).whole("w")[0, 0]))
        save(folder, "old", module=nn.Module(), slices=[Part(3.0)], state={}, ranks=Solo())
        assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".latest")) == ["latest", "old"]
    assert seen == {1.0, 2.0}


def save_with_little_room(rank, world, folder):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # as a full disk: writes beyond fail with an errno
    try:
        save(folder, "new", module=nn.Module(), slices=[Part(2.0)], state={"n": 2}, ranks=Solo())
    except CheckpointError as error:
        return str(error)


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path):
    save(tmp_path, "old", module=nn.Module(), slices=[Part(1.0)], state={"n": 1}, ranks=Solo())
    (text,) = run_ranks(save_with_little_room, 1, str(tmp_path), backend=None)
    assert "File too large" in text and "rank 0 failed" in text
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["latest", "old"]
    assert torch.equal(open_checkpoint(tmp_path).whole("w"), torch.full((50, 3), 1.0))
