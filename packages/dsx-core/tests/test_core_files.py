"""Files are replaced whole or not at all, and folders belong to one process at a time."""

from __future__ import annotations

import glob
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_core import FolderInUseError, FolderLock, ProcessIdentity, replace_text, replacing


def test_a_text_replaces_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "first")
    replace_text(path, "second \N{SNOWMAN}", durable=False)
    assert path.read_text(encoding="utf-8") == "second \N{SNOWMAN}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o600)
    replace_text(tmp_path / "new", "y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_permissions_can_be_given_and_hold_while_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    replace_text(path, "open to all")
    path.chmod(0o644)
    with replacing(path, mode=0o600) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("of this user alone")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("when", ["before anything is written", "in the middle"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, when: str) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old")
    with pytest.raises(OSError, match="disk is full"):
        with replacing(path) as temporary:
            if when == "in the middle":
                temporary.write_text("half of the new conte")
            raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_the_old_content_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert glob.glob(f"{tmp_path}/*") == [str(path)]  # a pattern for finished files does not find the new one
    assert path.read_text() == "new"


def test_a_leftover_of_a_killed_process_with_the_same_id_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".state.json.{os.getpid()}").write_text("leftover, longer than the new text")
    replace_text(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        replace_text(tmp_path / "nowhere" / "state.json", "x")


def _lock(folder: Path) -> FolderLock:
    return FolderLock(str(folder), os.open(folder / "lock", os.O_RDWR | os.O_CREAT), user="store")


def test_a_second_holder_is_refused_by_name_and_succeeds_after_release(tmp_path: Path) -> None:
    first, second = _lock(tmp_path), _lock(tmp_path)
    first.acquire()
    with pytest.raises(FolderInUseError, match=rf"in use by another store \(process {os.getpid()}\)"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from dsx_core import FolderLock\n"
        "lock = FolderLock(sys.argv[1], os.open(sys.argv[1] + '/lock', os.O_RDWR | os.O_CREAT)); lock.acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    owner = ProcessIdentity.parse((tmp_path / "owner").read_text())
    assert owner is not None and not owner.is_running()
    lock = _lock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_process_is_told_apart_from_another_with_its_id() -> None:
    me = ProcessIdentity.current()
    assert ProcessIdentity.parse(str(me)) == me
    assert me.is_running()
    if me.started:
        assert not me._replace(started=str(int(me.started) + 1)).is_running()
    assert me._replace(machine="elsewhere").is_running()  # this machine cannot tell
    assert ProcessIdentity.parse("not an identity at all") is None
